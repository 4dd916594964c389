"""Pages of a chain in order, out of several nodes' streams that run at the same time.

Each stream gives its node's pages in order; the reader takes the next page of the chain from whichever
stream has it. When the next page is late, or its stream has ended, the next holder of that run is asked for
the rest of the run, and whoever is first with a page gives it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from cedar.kvstore.hedge import HedgeTimer
from cedar.kvstore.placement import Run

Values = AsyncGenerator[tuple[int, memoryview], None]
PAGES_AHEAD: Final = 16


class PageSource:
    """One node's stream, read by a task of its own, a few pages ahead.

    ``positions``: in the chain, of the pages it was asked for, ascending. ``bell``: rung when there is news.
    """

    def __init__(self, values: Values, positions: Sequence[int], bell: asyncio.Event) -> None:
        self._values = values
        self._positions = positions
        self._bell = bell
        self._ready: deque[tuple[int, memoryview]] = deque()
        self._room = asyncio.Event()
        self._finished = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._finished and not self._ready

    def take(self, position: int) -> memoryview | None:
        """The page at ``position`` if it is here; earlier ones are let go."""
        ready = self._ready
        while ready and ready[0][0] < position:
            ready.popleft()
        value = ready.popleft()[1] if ready and ready[0][0] == position else None
        if len(ready) < PAGES_AHEAD // 2:
            self._room.set()
        return value

    async def close(self) -> None:
        """End the stream."""
        self._ready.clear()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._values.aclose()

    async def _run(self) -> None:
        try:
            async for index, value in self._values:
                self._ready.append((self._positions[index], value))
                self._bell.set()
                if len(self._ready) >= PAGES_AHEAD:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._finished = True
            self._bell.set()


async def read_run(
    run: Run,
    sources: Sequence[PageSource],
    next_source: Callable[[int, int], PageSource | None],
    *,
    bell: asyncio.Event,
    timer: HedgeTimer,
    count: Callable[[str], None],
    patient: bool = True,
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """(position, value) of the run's pages in order, as far as any holder has them.

    ``sources``: streams that are open already; they stay open. ``next_source(position, end)``: opens the next
    holder's stream, None when there is no further one. ``patient=False``: asks it at once.
    """
    now_s = asyncio.get_running_loop().time
    live = list(sources)
    extra: list[PageSource] = []
    further = True
    try:
        for position in range(run.start, run.end):
            began_s = asked_s = now_s()
            waited = False
            while (found := _first(live, position)) is None:
                live = [source for source in live if not source.ended]
                delay_s = timer.delay_s if patient or extra else 0.0
                left_s = asked_s + delay_s - now_s() if further else None
                if live and (left_s is None or left_s > 0):
                    bell.clear()
                    await _rung(bell, left_s)
                    waited = True
                    continue
                another = next_source(position, run.end) if further else None
                if another is None:
                    further = False
                    if not live:
                        return
                    continue
                count("reads_hedged" if live else "reads_failed_over")
                live.append(another)
                extra.append(another)
                asked_s = now_s()
            value, giver = found
            if waited:
                timer.answered(now_s() - began_s)
            if giver in extra:
                count("pages_from_replica")
            yield position, value
    finally:
        for source in extra:
            await source.close()


def _first(live: Sequence[PageSource], position: int) -> tuple[memoryview, PageSource] | None:
    for source in live:
        value = source.take(position)
        if value is not None:
            return value, source
    return None


async def _rung(bell: asyncio.Event, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await bell.wait()
    except TimeoutError:
        return
