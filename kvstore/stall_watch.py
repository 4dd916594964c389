"""A limit to how long each message of a stream may take, cheaper than ``asyncio.timeout`` for each of them.

One timer a stream looks from time to time when the last message came, instead of one timer for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class StallWatch:
    """Used by one task, in a ``with``. ``limit_s``: for each message."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._since_s: float | None = None  # the task waits since then
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> StallWatch:
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()

    async def within(self, awaitable: Awaitable[T]) -> T:
        """What it gives; TimeoutError when that takes longer."""
        self._task = task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._since_s = self._loop.time()
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._expired and task.uncancel() <= before:
                raise TimeoutError(f"nothing came for {self._limit_s:g} s") from None
            raise
        finally:
            self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + self._limit_s
        if now_s < due_s:  # compared with the very time that is set: no remainder is left by rounding
            self._timer = self._loop.call_at(due_s, self._look)
            return
        self._expired = True
        assert self._task is not None
        self._task.cancel()
