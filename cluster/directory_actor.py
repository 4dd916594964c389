"""The directory as a Ray actor: the pure state, a clock, and nothing else.

Ray restarts it when its process dies; it comes back empty, with another epoch, and fills up within a
heartbeat.
"""

from __future__ import annotations

import secrets
import time

from cedar.cluster.directory import DirectoryState, View, Worker


class DirectoryActor:
    """Runs on one event loop, so every method is atomic. ``expire_after_s``: see ``DirectoryState``."""

    def __init__(self, expire_after_s: float) -> None:
        self._state = DirectoryState(expire_after_s, epoch=secrets.randbits(62))

    async def announce(self, worker: Worker) -> int:
        """Register or refresh a worker; returns the view's version."""
        now_s = time.monotonic()
        self._state.expire(now_s)
        self._state.announce(worker, now_s)
        return self._state.version

    async def leave(self, address: str, incarnation: int) -> None:
        """A worker says goodbye."""
        self._state.leave(address, incarnation, time.monotonic())

    async def suspect(self, address: str, incarnation: int) -> None:
        """A client could not reach this process."""
        self._state.suspect(address, incarnation)

    async def view(self) -> View:
        """Who is alive now."""
        self._state.expire(time.monotonic())
        return self._state.view()

    async def ready(self) -> bool:
        """Answers once the actor runs."""
        return True
