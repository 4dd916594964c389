"""Pages of a chain in order, out of several nodes' streams that run at the same time.

Each stream gives its node's pages in order; the reader takes the next page of the chain from whichever
stream has it. When the next page is late, or its stream has ended, the next holder of that run is asked for
the rest of the run, and whoever is first with a page gives it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from cedar.kvstore.hedge import HedgeTimer
from cedar.kvstore.placement import Run

Values = AsyncGenerator[tuple[int, memoryview], None]


class _Ended(Exception):
    """A StopAsyncIteration cannot be a task's result."""


class PageSource:
    """One node's stream; ``positions`` in the chain of the pages it was asked for, ascending."""

    def __init__(self, values: Values, positions: Sequence[int]) -> None:
        self._values = values
        self._positions = positions
        self._pending: asyncio.Task[tuple[int, memoryview]] | None = None
        self._held: tuple[int, memoryview] | None = None
        self.ended = False

    def take(self, position: int) -> memoryview | None:
        """The page at ``position`` if it is here; starts waiting for it if it is not. Skips earlier ones."""
        while not self.ended:
            if self._held is None:
                if self._pending is None:
                    self._pending = asyncio.get_running_loop().create_task(self._next())
                if not self._pending.done():
                    return None
                pending, self._pending = self._pending, None
                try:
                    index, value = pending.result()
                except _Ended:
                    self.ended = True
                    return None
                self._held = (self._positions[index], value)
            if self._held[0] > position:
                return None
            found, self._held = self._held, None
            if found[0] == position:
                return found[1]
        return None

    @property
    def waiting_for(self) -> asyncio.Task[tuple[int, memoryview]] | None:
        """What to wait for after ``take`` gave nothing."""
        return self._pending

    async def close(self) -> None:
        """End the stream."""
        self.ended = True
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait([self._pending])
            if not self._pending.cancelled():
                self._pending.exception()
            self._pending = None
        await self._values.aclose()

    async def _next(self) -> tuple[int, memoryview]:
        try:
            return await anext(self._values)
        except StopAsyncIteration:
            raise _Ended from None


async def read_run(
    run: Run,
    sources: Sequence[PageSource],
    next_source: Callable[[int, int], PageSource | None],
    timer: HedgeTimer,
    count: Callable[[str], None],
    *,
    patient: bool = True,
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """(position, value) of the run's pages in order, as far as any holder has them.

    ``sources``: streams that are open already; they stay open. ``next_source(position, end)``: opens the next
    holder's stream, None when there is no further one. ``patient=False``: asks it at once.
    """
    live = [source for source in sources if not source.ended]
    extra: list[PageSource] = []
    position = run.start
    try:
        while position < run.end:
            began_s = time.monotonic()
            deadline_s: float | None = began_s + (timer.delay_s if patient else 0.0)
            while True:
                value, giver = _first(live, position)
                if value is not None:
                    break
                live = [source for source in live if not source.ended]
                waits = [source.waiting_for for source in live if source.waiting_for is not None]
                left_s = deadline_s - time.monotonic() if deadline_s is not None else None
                if waits and (left_s is None or left_s > 0):
                    await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    continue
                another = next_source(position, run.end)
                if another is None:
                    if not waits:
                        return
                    deadline_s = None
                    continue
                count("reads_hedged" if waits else "reads_failed_over")
                live.append(another)
                extra.append(another)
                deadline_s = time.monotonic() + timer.delay_s
            timer.answered(time.monotonic() - began_s)
            if giver in extra:
                count("pages_from_replica")
            yield position, value
            position += 1
    finally:
        for source in extra:
            await source.close()


def _first(live: Sequence[PageSource], position: int) -> tuple[memoryview | None, PageSource | None]:
    for source in live:
        value = source.take(position)
        if value is not None:
            return value, source
    return None, None
