"""One fetch, many readers: callers that want the same pages at the same time share one stream.

A fetch runs in a task of its own and keeps what it has received, up to ``keep_bytes``; whoever asks for the
same keys while nothing has been let go reads along from the start. The fetch waits when it is ``ahead_bytes``
ahead of its fastest reader. A reader that falls so far behind that its next page has been let go is told so.
When the last reader leaves, the fetch is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)
Values = AsyncGenerator[tuple[int, memoryview], None]


class FellBehind(Exception):
    """The next page for this reader has been let go; it must fetch the rest itself."""


@dataclass(eq=False)
class _Reader:
    next: int = 0
    bytes: int = 0


class SharedFetch:
    """A running fetch of pages 0, 1, 2, ... by ``source``. Event loop only."""

    def __init__(
        self, source: Values, *, ahead_bytes: int, keep_bytes: int, on_end: Callable[[SharedFetch], None]
    ) -> None:
        self._source = source
        self._ahead_bytes = ahead_bytes
        self._keep_bytes = keep_bytes
        self._on_end = on_end
        self._kept: deque[memoryview] = deque()
        self._first_kept = 0
        self._kept_bytes = 0
        self._received_bytes = 0
        self._readers: set[_Reader] = set()
        self._ended = False
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def joinable(self) -> bool:
        """Whether a new reader would still get everything from the start."""
        return not self._ended and self._first_kept == 0

    async def read(self) -> Values:
        """(index, value) of every page received; ends when the fetch does. FellBehind."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                if reader.next < self._first_kept:
                    raise FellBehind
                if reader.next < self._first_kept + len(self._kept):
                    index = reader.next
                    value = self._kept[index - self._first_kept]
                    reader.next += 1
                    reader.bytes += len(value)
                    self._notify()
                    yield index, value
                elif self._ended:
                    return
                else:
                    await self._changed.wait()
        finally:
            self._readers.discard(reader)
            if not self._readers:
                await self.cancel()

    async def cancel(self) -> None:
        """End the fetch; its readers see the end of what was received."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async for _, value in self._source:
                self._kept.append(value)
                self._kept_bytes += len(value)
                self._received_bytes += len(value)
                self._let_go()
                self._notify()
                while self._received_bytes - self._fastest_bytes() > self._ahead_bytes:
                    await self._changed.wait()
        except Exception:  # the source answers for its failures; this is a bug in it
            log.exception("a fetch failed")
        finally:
            self._ended = True
            self._on_end(self)
            self._notify()
            await self._source.aclose()

    def _fastest_bytes(self) -> int:
        return max((reader.bytes for reader in self._readers), default=0)

    def _let_go(self) -> None:
        while self._kept_bytes > self._keep_bytes and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft())
            self._first_kept += 1

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
