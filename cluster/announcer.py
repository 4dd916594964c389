"""Keeps a worker in the directory, and tells it when the store moves.

One task a worker. The directory being away is normal: announcements go on, and the first that gets
through registers the worker again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from cedar.cluster.directory import Worker
from cedar.cluster.directory_client import Directory

Describe = Callable[[], Worker]
StoreMoved = Callable[[str | None], None]


class Announcer:
    """``describe`` gives the worker's present record (its ``sequence`` is set here);
    ``store_moved`` is called with what to connect to for the store (``View.store_target``) when it moves."""

    def __init__(
        self,
        directory: Directory,
        describe: Describe,
        heartbeat_s: float,
        store_moved: StoreMoved | None = None,
    ) -> None:
        self._directory = directory
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._store_moved = store_moved
        self._store: str | None = None
        self._version = -1
        self._sequence = 0
        self._task: asyncio.Task[None] | None = None
        self.failures = 0

    @property
    def failed(self) -> bool:
        """Whether a bug has ended it: nobody finds this worker any more, however well it is."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Announce at once and then every heartbeat."""
        self._task = asyncio.create_task(self._run(), name="announcer")

    async def announce(self) -> None:
        """One announcement. A directory that cannot be reached is counted, not an error."""
        self._sequence += 1
        try:
            version = await self._directory.announce(replace(self._describe(), sequence=self._sequence))
            if self._store_moved is not None and version != self._version:
                await self._look_for_store(self._store_moved)
                self._version = version
        except ConnectionError:
            self.failures += 1
            self._version = -1

    async def stop(self) -> None:
        """Stop announcing and say goodbye."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        worker = self._describe()
        try:
            await self._directory.leave(worker.address, worker.incarnation)
        except ConnectionError:
            self.failures += 1

    async def _look_for_store(self, moved: StoreMoved) -> None:
        target = (await self._directory.view()).store_target
        # A directory that has just restarted knows no store yet: keep the old one, a dead store is a miss
        # anyway.
        if target is not None and target != self._store:
            self._store = target
            moved(target)

    async def _run(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(self._heartbeat_s)
