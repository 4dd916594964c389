"""One fetch, many readers: callers that want the same pages at the same time share one stream.

A fetch runs in a task of its own, which takes a frame's pages at a time. It keeps the first ``join_bytes``,
and after them what its slowest reader still lacks, up to ``keep_bytes``; whoever asks for the same keys while
nothing has been let go reads along from the start. The fetch waits when it is ``ahead_bytes`` ahead of its
fastest reader. A reader that falls so far behind that its next page has been let go is told so. When the last
reader leaves, the fetch is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)
Values = AsyncGenerator[tuple[int, memoryview], None]
Frames = AsyncGenerator[Sequence[memoryview], None]


class FellBehind(Exception):
    """The next page for this reader has been let go; it must fetch the rest itself."""


@dataclass(eq=False)
class _Reader:
    next: int = 0
    bytes: int = 0


class SharedFetch:
    """A running fetch of pages 0, 1, 2, ... by ``source``, which gives some at a time. Event loop only."""

    def __init__(
        self,
        source: Frames,
        *,
        ahead_bytes: int,
        keep_bytes: int,
        join_bytes: int,
        on_end: Callable[[SharedFetch], None],
    ) -> None:
        self._source = source
        self._ahead_bytes = ahead_bytes
        self._keep_bytes = keep_bytes
        self._join_bytes = join_bytes
        self._on_end = on_end
        self._kept: deque[memoryview] = deque()
        self._first_kept = 0
        self._kept_bytes = 0
        self._received_bytes = 0
        self._readers: set[_Reader] = set()
        self._ended = False
        self._news = asyncio.Event()  # for the readers
        self._room = asyncio.Event()  # for the fetch
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
                    self._room.set()
                    yield index, value
                elif self._ended:
                    return
                else:
                    await self._news.wait()
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
            async for values in self._source:
                self._kept.extend(values)
                size = sum(map(len, values))
                self._kept_bytes += size
                self._received_bytes += size
                self._let_go()
                self._tell_readers()
                while self._received_bytes - self._fastest_bytes() > self._ahead_bytes:
                    self._room.clear()
                    await self._room.wait()
        except Exception:  # the source answers for its failures; this is a bug in it
            log.exception("a fetch failed")
        finally:
            self._ended = True
            self._on_end(self)
            self._tell_readers()
            await self._source.aclose()

    def _fastest_bytes(self) -> int:
        return max((reader.bytes for reader in self._readers), default=0)

    def _let_go(self) -> None:
        """Forget what every reader has had, and what is more than may be kept for the slowest.

        Soon, since memory that is used again at once costs far less than fresh memory.
        """
        nexts = [reader.next for reader in self._readers] or [self._first_kept]
        needed = min(nexts) if self._received_bytes > self._join_bytes else self._first_kept
        taken = max(nexts)
        while self._first_kept < needed or (self._kept_bytes > self._keep_bytes and self._first_kept < taken):
            self._kept_bytes -= len(self._kept.popleft())
            self._first_kept += 1

    def _tell_readers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
