import asyncio

import pytest
from cedar.cluster.cleanup import to_the_end


async def test_work_is_done_however_often_one_is_cancelled() -> None:
    done: list[int] = []

    async def work() -> None:
        for step in range(5):
            await asyncio.sleep(0.01)
            done.append(step)

    task = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0.005)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [0, 1, 2, 3, 4]


async def test_its_errors_are_raised() -> None:
    async def work() -> None:
        raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        await to_the_end(work())
