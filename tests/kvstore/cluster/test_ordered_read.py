"""The merge of several nodes' streams, and when the second holder is asked: small parts, many cases."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.client import StoreClient
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.connect import connect
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.hedge import HedgeTimer, hedged
from cedar.kvstore.ordered_read import PageSource, read_run
from cedar.kvstore.placement import Run
from hypothesis import given, settings
from hypothesis import strategies as st

Page = tuple[int, memoryview]


async def stream(count: int, delays: Sequence[float]) -> AsyncGenerator[Page, None]:
    for index in range(count):
        if delays:
            await asyncio.sleep(delays[index % len(delays)])
        yield index, memoryview(b"%d" % index)


async def merged(
    pages: int, held: list[int], delays: list[list[float]], runs: list[Run]
) -> tuple[list[int], Counter[str]]:
    """Read ``runs`` from holders of which number i has the first ``held[i]`` pages."""
    bell, counts = asyncio.Event(), Counter[str]()
    timer = HedgeTimer(least_s=0.001, most_s=0.004)
    sources = [PageSource(stream(held[0], delays[0]), range(pages), bell)]
    got = []
    for run in runs:
        left = list(range(1, len(held)))

        def another(position: int, end: int, left: list[int] = left) -> PageSource | None:
            if not left:
                return None
            holder = left.pop(0)
            count = max(min(held[holder], end) - position, 0)
            return PageSource(stream(count, delays[holder]), range(position, end), bell)

        start = run.start
        values = read_run(run, sources, another, bell=bell, timer=timer, count=lambda n: counts.update([n]))
        async with aclosing(values):
            async for position, _ in values:
                assert position == start
                got.append(position)
                start += 1
        if start < run.end:
            break
    await sources[0].close()
    return got, counts


delay_lists = st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.006]), max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pages_come_in_order_from_whoever_has_them(data: Any) -> None:
    pages = data.draw(st.integers(1, 60))
    held = data.draw(st.lists(st.integers(0, pages), min_size=1, max_size=3))
    delays = [data.draw(delay_lists) for _ in held]
    cuts = sorted(data.draw(st.sets(st.integers(1, pages), max_size=4)) | {0, pages})
    runs = [Run(b"tag", a, b) for a, b in pairwise(cuts)]
    got, _ = asyncio.run(merged(pages, held, delays, runs))
    assert got == list(range(max(held)))


def test_a_slow_first_holder_is_hedged_once_a_run() -> None:
    got, counts = asyncio.run(merged(8, [8, 8], [[0.2], []], [Run(b"t", 0, 8)]))
    assert got == list(range(8))
    assert counts == {"reads_hedged": 1, "pages_from_replica": 8}


def test_the_delay_follows_what_answers_take() -> None:
    timer = HedgeTimer(least_s=0.02, most_s=0.5)
    assert timer.delay_s == 0.5, "nothing is known yet"
    for _ in range(64):
        timer.answered(0.001)
    assert timer.delay_s == 0.02
    for _ in range(64):
        timer.answered(0.1)
    assert timer.delay_s == pytest.approx(0.15)
    for _ in range(128):
        timer.answered(9.0)
    assert timer.delay_s == 0.5


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0.0, 7), (0.0, 9), 7),  # in time: the second is never asked
        ((0.0, None), (0.0, 3), 3),  # failed
        ((0.05, 7), (0.0, 9), 9),  # late, and the second has all
        ((0.05, 7), (0.0, 3), 7),  # late, and the second has too little: worth waiting
        ((0.05, 7), (9.0, 9), 7),  # late, and still sooner
        ((0.05, None), (0.0, 3), 3),  # late, then failed
    ],
)
async def test_hedging_a_look_up(first: Any, second: Any, expected: int) -> None:
    asked = []

    async def answer(after_s: float, value: Any) -> Any:
        asked.append(value)
        await asyncio.sleep(after_s)
        return value

    began = time.monotonic()
    got = await hedged(
        answer(*first),
        lambda: answer(*second),
        enough=lambda value: value >= 9,
        after_s=0.01,
        count=lambda name: None,
    )
    assert got == expected
    assert time.monotonic() - began < 1.0
    assert len(asked) == (1 if first[0] == 0 and first[1] is not None else 2)


async def test_targets_name_stores(tmp_path: Path) -> None:
    kinds = {
        "127.0.0.1:1": StoreClient,
        "127.0.0.1:1, 127.0.0.1:2": ClusterClient,
        "membership://127.0.0.1:1": ClusterClient,
        f"file://{tmp_path}/members.json": ClusterClient,
    }
    for target, kind in kinds.items():
        store = connect(target)
        assert type(store) is kind
        await store.close()
        assert (await store.match(b"r" * 32, [b"k" * 32])).pages == 0
    for target in ("", "http://somewhere"):
        with pytest.raises(InvalidRequest, match="store"):
            connect(target)
