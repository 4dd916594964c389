import asyncio

import pytest
from cedar.cluster.admission import Admission, retry_after_ms, verdict
from cedar.cluster.errors import Overloaded


@pytest.mark.parametrize(
    ("active", "waiting", "expected"),
    [(0, 0, "admit"), (1, 0, "admit"), (2, 0, "wait"), (2, 2, "wait"), (2, 3, "refuse"), (1, 1, "wait")],
)
def test_verdict(active: int, waiting: int, expected: str) -> None:
    assert verdict(active, waiting, max_active=2, max_waiting=3) == expected


def test_retry_delay_grows_with_the_line_and_is_bounded() -> None:
    assert retry_after_ms(0, 10, 0.001) == 100
    assert retry_after_ms(9, 10, 2.0) == 2000
    assert retry_after_ms(10_000, 1, 60.0) == 60_000


async def test_first_come_first_served_and_refusal_beyond_the_line() -> None:
    admission = Admission(max_active=1, max_waiting=2)
    order: list[int] = []
    go = asyncio.Event()

    async def request(number: int) -> None:
        async with admission.room():
            order.append(number)
            await go.wait()

    tasks = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert (admission.active, admission.waiting) == (1, 2)
    with pytest.raises(Overloaded) as refused:
        async with admission.room():
            pass
    assert refused.value.retry_after_ms >= 100
    admission.check_integrity()
    go.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert (admission.active, admission.waiting, admission.refused) == (0, 0, 1)


async def test_leaving_the_line_gives_the_place_to_the_next() -> None:
    admission = Admission(max_active=1, max_waiting=5)
    go = asyncio.Event()
    served: list[int] = []

    async def request(number: int) -> None:
        async with admission.room():
            served.append(number)
            await go.wait()

    tasks = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert admission.waiting == 1
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert served == [0, 2]
    assert (admission.active, admission.waiting) == (0, 0)


async def test_a_place_handed_to_someone_who_just_left_is_not_lost() -> None:
    admission = Admission(max_active=1, max_waiting=5)
    holder = admission.room()
    await holder.__aenter__()

    async def request() -> None:
        async with admission.room():
            pass

    waiter = asyncio.create_task(request())
    await asyncio.sleep(0)
    await holder.__aexit__(None, None, None)  # hands the place over
    waiter.cancel()  # before the waiter has run
    await asyncio.gather(waiter, return_exceptions=True)
    assert (admission.active, admission.waiting) == (0, 0)
    admission.check_integrity()
