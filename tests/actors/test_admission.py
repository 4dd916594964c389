"""Waiting for room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cedar.actors.admission import AdmissionQueue
from cedar.actors.errors import Busy, DeadlinePassed


class TestAdmission:
    """First come, first served, with what is given back."""

    async def test_order_and_departures(self) -> None:
        room = [0]
        given_back: list[int] = []
        queue: AdmissionQueue[int] = AdmissionQueue(3, given_back.append, 10)

        def attempt(needed: int) -> Any:
            def reserve() -> int | None:
                if needed > room[0]:
                    return None
                room[0] -= needed
                return needed

            return reserve

        large = asyncio.create_task(queue.reserve(attempt(3), 5))
        small = asyncio.create_task(queue.reserve(attempt(1), 5))
        late = asyncio.create_task(queue.reserve(attempt(1), 0.05))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="at most 3"):
            await queue.reserve(attempt(1), 5)
        room[0] = 2
        queue.pump()
        assert not small.done(), "it does not overtake"
        with pytest.raises(DeadlinePassed):
            await late
        large.cancel()
        assert await small == 1
        assert len(queue) == 0
        assert not given_back

    async def test_a_waiter_that_leaves_as_it_is_granted_gives_it_back(self) -> None:
        given_back: list[int] = []
        open_ = [False]
        queue: AdmissionQueue[int] = AdmissionQueue(3, given_back.append, 10)
        waiting = asyncio.create_task(queue.reserve(lambda: 7 if open_[0] else None, 5))
        await asyncio.sleep(0)
        open_[0] = True
        queue.pump()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert given_back == [7]

    async def test_an_attempt_that_raises_ends_its_own_request(self) -> None:
        queue: AdmissionQueue[int] = AdmissionQueue(3, lambda _: None, 10)
        answers: list[Any] = [None, None]

        def attempt() -> int | None:
            if isinstance(answers[0], Exception):
                raise answers[0]
            return None

        failing = asyncio.create_task(queue.reserve(attempt, 5))
        fine = asyncio.create_task(queue.reserve(lambda: answers[1], 5))
        await asyncio.sleep(0)
        answers[:] = [KeyError("x"), 4]
        queue.pump()
        with pytest.raises(KeyError):
            await failing
        assert await fine == 4
