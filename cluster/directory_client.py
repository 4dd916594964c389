"""How workers and the gateway reach the directory: one interface, an in-process twin, and Ray's."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from cedar.cluster.directory import DirectoryState, View, Worker

DIRECTORY_ACTOR = "cedar-directory"


class Directory(Protocol):
    """Raises ``ConnectionError`` when the directory cannot be reached; callers go on with what they have."""

    async def announce(self, worker: Worker) -> int:
        """Register or refresh; returns the view's version."""

    async def leave(self, address: str, incarnation: int) -> None:
        """Say goodbye."""

    async def suspect(self, address: str, incarnation: int) -> None:
        """Report a process that could not be reached."""

    async def view(self) -> View:
        """Who is alive."""


class LocalDirectory:
    """A directory in this process, for tests and single-process use."""

    def __init__(self, expire_after_s: float = 3.0) -> None:
        self._expire_after_s = expire_after_s
        self.state = DirectoryState(expire_after_s, epoch=1)
        self.reachable = True

    def restart(self) -> None:
        """Forget everything, as a directory does whose process was replaced."""
        epoch, store = self.state.epoch + 1, self.state.store
        self.state = DirectoryState(self._expire_after_s, epoch=epoch, store=store)

    async def announce(self, worker: Worker) -> int:
        """See ``Directory``."""
        self._reach()
        self.state.announce(worker, time.monotonic())
        return self.state.version

    async def leave(self, address: str, incarnation: int) -> None:
        """See ``Directory``."""
        self._reach()
        self.state.leave(address, incarnation, time.monotonic())

    async def suspect(self, address: str, incarnation: int) -> None:
        """See ``Directory``."""
        self._reach()
        self.state.suspect(address, incarnation)

    async def view(self) -> View:
        """See ``Directory``."""
        self._reach()
        self.state.expire(time.monotonic())
        return self.state.view()

    def _reach(self) -> None:
        if not self.reachable:
            raise ConnectionError("the directory does not answer")


class RayDirectory:
    """The directory actor of a cluster, found by name; found again when it was replaced."""

    def __init__(self, namespace: str, name: str = DIRECTORY_ACTOR, timeout_s: float = 2.0) -> None:
        self._namespace = namespace
        self._name = name
        self._timeout_s = timeout_s
        self._handle: Any = None

    async def announce(self, worker: Worker) -> int:
        """See ``Directory``."""
        version: int = await self._call("announce", worker)
        return version

    async def leave(self, address: str, incarnation: int) -> None:
        """See ``Directory``."""
        await self._call("leave", address, incarnation)

    async def suspect(self, address: str, incarnation: int) -> None:
        """See ``Directory``."""
        await self._call("suspect", address, incarnation)

    async def view(self) -> View:
        """See ``Directory``."""
        view: View = await self._call("view")
        return view

    async def _call(self, method: str, *arguments: object) -> Any:
        import ray
        from ray.exceptions import RayError

        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
            reference = getattr(self._handle, method).remote(*arguments)
            return await asyncio.wait_for(reference, self._timeout_s)
        except (RayError, ValueError, TimeoutError) as error:
            self._handle = None
            raise ConnectionError(f"directory: {type(error).__name__}: {error}") from error
