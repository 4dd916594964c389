"""How many requests are in the stages, how many wait, and who is refused.

The decision is a pure function; ``Admission`` keeps the numbers and the waiting line. First come, first
served. Room is a lease: leaving the ``async with`` gives it back on every path. A request whose prompt is
still being prepared holds its bytes already, so it counts before it stands in the line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from cedar.cluster.errors import Overloaded

Verdict = Literal["admit", "wait", "refuse"]


def verdict(active: int, waiting: int, max_active: int, max_waiting: int) -> Verdict:
    """What happens to one more request."""
    if active < max_active and waiting == 0:
        return "admit"
    return "wait" if waiting < max_waiting else "refuse"


def retry_after_ms(waiting: int, max_active: int, mean_service_s: float) -> int:
    """When a refused request may find room: the time that the line before it needs, 100 ms to 60 s."""
    return round(1000 * min(60.0, max(0.1, mean_service_s * (waiting + 1) / max_active)))


class Admission:
    """A bounded room with a bounded waiting line. Belongs to one event loop."""

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._line: deque[asyncio.Future[None]] = deque()
        self._mean_service_s = 1.0
        self.active = 0
        self.preparing = 0
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Around the preparation of a prompt. Raises ``Overloaded`` when there would be no room after it."""
        self._check(self.preparing)
        self.preparing += 1
        try:
            yield
        finally:
            self.preparing -= 1

    def _check(self, ahead: int = 0) -> None:
        """Raise ``Overloaded`` when one more request would be refused, ``ahead`` others coming before it."""
        room = self._max_active - self.active
        waiting = len(self._line) + max(0, ahead - room)
        if verdict(self.active + min(ahead, room), waiting, self._max_active, self._max_waiting) == "refuse":
            self.refused += 1
            delay = retry_after_ms(waiting, self._max_active, self._mean_service_s)
            raise Overloaded(f"gateway.max_queued_requests: {self._max_waiting} requests wait already", delay)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """A place in the stages, after waiting if need be. Raises ``Overloaded`` when the line is full."""
        self._check()
        if verdict(self.active, len(self._line), self._max_active, self._max_waiting) == "wait":
            await self._stand_in_line()
        else:
            self.active += 1
        started_s = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            elapsed_s = asyncio.get_running_loop().time() - started_s
            self._mean_service_s += 0.1 * (elapsed_s - self._mean_service_s)
            self._leave()

    def check_integrity(self) -> None:
        """The books: never more than allowed, and nobody waits while there is room."""
        assert 0 <= self.active <= self._max_active, (self.active, self._max_active)
        assert not self._line or self.active == self._max_active, (self.active, len(self._line))

    async def _stand_in_line(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place was handed over just as the caller left
            elif turn in self._line:
                self._line.remove(turn)
            raise

    def _leave(self) -> None:
        # The place goes straight to the next in line, so that a newcomer cannot slip in between.
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.active -= 1
