"""First come, first served: who waits for room, and who gets it next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from cedar.actors.errors import Busy, DeadlinePassed

T = TypeVar("T")


class AdmissionQueue(Generic[T]):
    """Requests that wait until an attempt to reserve succeeds, in order of arrival.

    ``release`` gives back a reservation whose waiter left at the very moment it was granted.
    """

    def __init__(self, limit: int, release: Callable[[T], None], retry_after_ms: int) -> None:
        self._limit = limit
        self._release = release
        self._retry_after_ms = retry_after_ms
        self._waiting: deque[tuple[Callable[[], T | None], asyncio.Future[T]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def reserve(self, attempt: Callable[[], T | None], timeout_s: float) -> T:
        """What ``attempt`` returns once it returns something.

        Busy when the queue is full, DeadlinePassed after ``timeout_s``. What ``attempt`` raises ends its own
        request only.
        """
        if not self._waiting and (granted := attempt()) is not None:
            return granted
        if len(self._waiting) >= self._limit:
            raise Busy(
                f"{len(self._waiting)} requests wait already: at most {self._limit}",
                retry_after_ms=self._retry_after_ms,
            )
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = (attempt, future)
        self._waiting.append(entry)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        except asyncio.CancelledError:
            if future.done() and future.exception() is None:
                self._release(future.result())
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self.pump()
        if not future.done():
            raise DeadlinePassed(f"no room within {timeout_s:g} s", retry_after_ms=self._retry_after_ms)
        return future.result()

    def pump(self) -> None:
        """Grant as many waiting requests as there is room for now. Called whenever room is given back."""
        while self._waiting:
            attempt, future = self._waiting[0]
            try:
                granted = attempt()
            except Exception as error:
                self._waiting.popleft()
                future.set_exception(error)
                continue
            if granted is None:
                return
            self._waiting.popleft()
            future.set_result(granted)
