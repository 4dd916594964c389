"""When to ask the second holder as well: once the first is slower than nearly all answers lately."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

REMEMBERED = 128


class HedgeTimer:
    """The delay before a hedge: 1.5 times the 95th percentile of recent answers, within bounds."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._answers_s: deque[float] = deque(maxlen=REMEMBERED)
        self._delay_s = most_s
        self._count = 0

    def answered(self, after_s: float) -> None:
        """An answer came after this long."""
        self._answers_s.append(after_s)
        self._count += 1
        if self._count % 8 == 0:
            ordered = sorted(self._answers_s)
            percentile = ordered[int(len(ordered) * 0.95)]
            self._delay_s = min(max(1.5 * percentile, self._least_s), self._most_s)

    @property
    def delay_s(self) -> float:
        """How long to wait for the first holder."""
        return self._delay_s


async def hedged(
    first: Awaitable[int | None],
    second: Callable[[], Awaitable[int]],
    *,
    enough: Callable[[int], bool],
    after_s: float,
    count: Callable[[str], None],
) -> int:
    """The first's answer, unless it fails (None) or is late and the second's is ``enough``."""
    tasks = [asyncio.ensure_future(first)]
    try:
        await asyncio.wait(tasks, timeout=after_s)
        answer = tasks[0].result() if tasks[0].done() else None
        if answer is not None:
            return answer
        count("matches_failed_over" if tasks[0].done() else "matches_hedged")
        tasks.append(asyncio.ensure_future(second()))
        while True:
            if tasks[0].done() and (answer := tasks[0].result()) is not None:
                return answer
            if tasks[1].done():
                answer = tasks[1].result()
                assert answer is not None
                if enough(answer) or tasks[0].done():
                    return answer
            pending = [task for task in tasks if not task.done()]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
