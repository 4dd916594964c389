"""The network's thread: order, cancelled waiters, failing steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import Unavailable


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    thread = EngineThread("test", 1)
    thread.start()
    yield thread
    thread.close()


async def test_calls_run_in_order_and_errors_come_back(thread: EngineThread) -> None:
    seen: list[int] = []
    await asyncio.gather(*(thread.call(lambda i=i: seen.append(i)) for i in range(20)))  # type: ignore[misc]
    assert seen == list(range(20))
    with pytest.raises(KeyError):
        await thread.call(lambda: {}["x"])
    assert thread.busy_s() == 0.0


async def test_a_call_that_has_begun_is_waited_for_also_when_cancelled(thread: EngineThread) -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(10)
        ended.set()

    waiter = asyncio.create_task(thread.call(work))
    await asyncio.to_thread(began.wait, 10)
    never: list[int] = []
    queued = asyncio.create_task(thread.call(lambda: never.append(1)))
    await asyncio.sleep(0)
    for _ in range(3):
        waiter.cancel()
        queued.cancel()
        await asyncio.sleep(0.01)
        assert not waiter.done(), "its memory is still being written"
    assert queued.cancelled(), "it had not begun"
    assert thread.busy_s() > 0
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert ended.is_set()
    await thread.call(lambda: None)
    assert not never


async def test_a_step_that_fails_is_told_once_and_calls_go_on() -> None:
    steps: list[int] = []
    failures: list[BaseException] = []

    def step() -> bool:
        steps.append(len(steps))
        if len(steps) == 3:
            raise RuntimeError("no")
        return True

    thread = EngineThread("test", 1, step=step, on_failure=failures.append)
    thread.start()
    thread.wake()
    while not failures:
        await asyncio.sleep(0.001)
    thread.wake()
    assert await thread.call(lambda: 5) == 5
    assert steps == [0, 1, 2]
    assert len(failures) == 1
    thread.close()
    thread.close()
    with pytest.raises(Unavailable):
        await thread.call(lambda: 5)
