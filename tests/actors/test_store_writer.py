"""Write-behind: bounded, in batches, never in the way, always counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from cedar.actors.store_writer import PUT_PAGES, Receipt, StoreWriter
from cedar.kvstore.put import PutCounts

KEY = b"k" * 32


class Store:
    """Takes everything, slowly if told to, and remembers how it came."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.tenants: list[bytes] = []
        self.windows = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def put_pages(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int = 0, tenant: bytes = b""
    ) -> PutCounts:
        await self.gate.wait()
        if first_page == 99:
            raise RuntimeError("a bug of the client's")
        self.batches.append((first_page, len(keys)))
        self.tenants.append(tenant)
        return PutCounts(stored=len(keys))

    async def put_window(
        self, page_key: bytes, tokens: int, digest: bytes, record: bytes, *, tenant: bytes = b""
    ) -> bool:
        await self.gate.wait()
        self.windows += 1
        self.tenants.append(tenant)
        return True


@pytest.fixture
def counters() -> Counter[str]:
    return Counter()


def writer_to(store: Any, counters: Counter[str], budget: int = 1000) -> StoreWriter:
    writer = StoreWriter(budget, counters)
    writer.connect(store)
    return writer


async def test_consecutive_pages_of_one_request_go_together(counters: Counter[str]) -> None:
    store = Store()
    writer = writer_to(store, counters)
    one, two = Receipt(), Receipt()
    for index in (0, 1, 2, 4):
        writer.put_page(index, KEY, b"v", one)
    writer.put_page(5, KEY, b"v", two)
    writer.put_window(KEY, 9, KEY, b"record", one)
    await one.wait(5)
    await two.wait(5)
    assert store.batches == [(0, 3), (4, 1), (5, 1)]
    assert (one.stored, two.stored, one.window_stored) == (4, 1, True)
    await writer.close(1)
    assert counters["put_pages_stored"] == 5


async def test_everything_is_stored_for_its_tenant(counters: Counter[str]) -> None:
    store = Store()
    writer = writer_to(store, counters)
    one, two = Receipt(tenant=b"one"), Receipt(tenant=b"two")
    writer.put_page(0, KEY, b"v", one)
    writer.put_window(KEY, 9, KEY, b"record", two)
    writer.put_window(KEY, 9, KEY, b"record", one)
    for receipt in (one, two):
        await receipt.wait(5)
    assert store.tenants == [b"one", b"two", b"one"]
    await writer.close(1)


async def test_a_batch_is_bounded(counters: Counter[str]) -> None:
    store = Store()
    writer = writer_to(store, counters)
    receipt = Receipt()
    for index in range(PUT_PAGES + 3):
        writer.put_page(index, KEY, b"v", receipt)
    await receipt.wait(5)
    assert store.batches == [(0, PUT_PAGES), (PUT_PAGES, 3)]
    await writer.close(1)


async def test_what_does_not_fit_is_dropped_and_counted(counters: Counter[str]) -> None:
    store = Store()
    store.gate.clear()
    writer = writer_to(store, counters, budget=25)
    receipt = Receipt()
    for index in range(4):
        writer.put_page(index, KEY, bytes(10), receipt)
    assert (receipt.offered, receipt.dropped) == (4, 2)
    await receipt.wait(0.01)
    assert receipt.stored == 0, "the wait ends, whether the store answers or not"
    store.gate.set()
    await receipt.wait(5)
    assert receipt.stored == 2
    writer.put_page(4, KEY, bytes(10), receipt)
    await receipt.wait(5)
    assert receipt.stored == 3
    await writer.close(1)
    assert counters["put_pages_dropped"] == 2


async def test_a_failing_put_costs_only_itself(counters: Counter[str]) -> None:
    store = Store()
    writer = writer_to(store, counters)
    bad, good = Receipt(), Receipt()
    writer.put_page(99, KEY, b"v", bad)
    writer.put_page(0, KEY, b"v", good)
    await good.wait(5)
    await bad.wait(5)
    assert (bad.stored, good.stored, counters["put_errors"]) == (0, 1, 1)
    await writer.close(1)


async def test_closing_does_not_wait_for_a_dead_store(counters: Counter[str]) -> None:
    store = Store()
    store.gate.clear()
    writer = writer_to(store, counters)
    writer.put_page(0, KEY, b"v", Receipt())
    writer.put_window(KEY, 9, KEY, b"record", Receipt())
    await writer.close(0.05)
    assert counters["put_abandoned"] == 1
