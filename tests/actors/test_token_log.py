"""Readers of one log: from any index, any number of them, one end."""

from __future__ import annotations

import asyncio

import pytest
from cedar.actors.errors import BooksError, OutOfRange, Unavailable
from cedar.actors.token_log import TokenLog
from cedar.v1.common_pb2 import FinishReason, TokenEvent
from cedar.v1.stages_pb2 import StreamEnd

END = StreamEnd(reason=FinishReason.FINISH_REASON_STOP)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def collect(log: TokenLog, start: int) -> list[int | str]:
    return [e.index if isinstance(e, TokenEvent) else "end" async for e in log.read(start)]


async def test_readers_get_every_token_once_in_order_and_one_end() -> None:
    log = TokenLog(0, Clock())
    readers = [asyncio.create_task(collect(log, start)) for start in (0, 0, 2, 9)]
    for index in range(4):
        log.append(TokenEvent(index=index, id=10 + index))
        if index % 2:
            await asyncio.sleep(0)
    assert log.finish(END)
    assert not log.finish(END)
    late = await collect(log, 1)
    got = [await reader for reader in readers]
    assert got == [[0, 1, 2, 3, "end"], [0, 1, 2, 3, "end"], [2, 3, "end"], ["end"]]
    assert late == [1, 2, 3, "end"]


async def test_a_resumed_log_begins_where_the_other_worker_stopped() -> None:
    log = TokenLog(5, Clock())
    with pytest.raises(BooksError, match="expects 5"):
        log.append(TokenEvent(index=0))
    log.append(TokenEvent(index=5))
    with pytest.raises(OutOfRange, match="first token is 5"):
        await collect(log, 4)
    log.finish(END)
    assert await collect(log, 5) == [5, "end"]
    with pytest.raises(BooksError, match="after the end"):
        log.append(TokenEvent(index=6))


async def test_an_abandoned_log_gives_its_tokens_and_then_the_error() -> None:
    log = TokenLog(0, Clock())
    reader = asyncio.create_task(collect(log, 0))
    log.append(TokenEvent(index=0))
    log.finish(Unavailable("the worker is stopping"))
    with pytest.raises(Unavailable, match="stopping"):
        await reader
    with pytest.raises(Unavailable, match="stopping"):
        await collect(log, 0)


async def test_the_lease_runs_only_while_nobody_reads() -> None:
    clock = Clock()
    log = TokenLog(0, clock)
    clock.now = 3.0
    assert log.unread_s() == 3.0
    reader = log.read(0)
    log.append(TokenEvent(index=0))
    await anext(reader)
    clock.now = 9.0
    assert log.readers == 1
    assert log.unread_s() == 0.0
    await reader.aclose()
    clock.now = 10.0
    assert log.readers == 0
    assert log.unread_s() == 1.0
