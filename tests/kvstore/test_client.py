from __future__ import annotations

import asyncio
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from cedar.kvstore.breaker import Breaker
from cedar.kvstore.client import Match, StoreClient
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.frames import FrameKind, encode_frame, record_checksum
from cedar.kvstore.header import seal_value
from cedar.kvstore.node import SERVICE
from cedar.kvstore.rpc import server_options, service_handler
from cedar.kvstore.shared_fetch import FellBehind, SharedFetch
from cedar.kvstore.stall_watch import StallWatch
from cedar.v1 import store_pb2

K = b"k" * 32
QUICK = ClientConfig(
    match_timeout_s=0.15, stall_timeout_s=0.15, put_timeout_s=0.2, window_timeout_s=0.15, stats_timeout_s=0.15
)


class FakeStore:
    """A store that does what the test says; by default everything it can do wrong is done right."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.messages: Callable[[Any], list[bytes]] = lambda request: []
        self.between_s = 0.0
        self.put_answer = store_pb2.PutPagesResponse()
        self.match_answer = store_pb2.MatchResponse()
        self.calls = 0

    async def MatchPrefix(self, request: Any, context: Any) -> Any:
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        return self.match_answer

    async def GetPages(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.calls += 1
        for message in self.messages(request):
            await asyncio.sleep(self.between_s)
            yield message

    GetWindow = GetPages

    async def PutPages(self, request_iterator: Any, context: Any) -> Any:
        self.calls += 1
        async for _ in request_iterator:
            pass
        await asyncio.sleep(self.delay_s)
        return self.put_answer

    async def PutWindow(self, request_iterator: Any, context: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        return store_pb2.PutWindowResponse(stored=True)

    async def Stats(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        return store_pb2.StatsResponse()


@asynccontextmanager
async def serving(store: FakeStore) -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((service_handler(SERVICE, store),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def collect(client: StoreClient, keys: list[bytes]) -> list[bytes]:
    got = []
    async for index, value in client.get_pages(keys):
        assert index == len(got)
        got.append(bytes(value))
    return got


def frame(keys: list[bytes], values: list[bytes], **fields: Any) -> bytes:
    meta = {"page_keys": b"".join(keys), "value_bytes": len(values[0])} | fields
    return encode_frame(FrameKind.PAGES, store_pb2.StoredMeta(**meta), *values)


async def expect_nothing(client: StoreClient, chains: Any) -> None:
    keys = chains.keys(3)
    assert await client.match(chains.root(), keys) == Match()
    assert await collect(client, keys) == []
    counts = await client.put_pages(keys, [chains.value(key) for key in keys])
    assert (counts.stored, counts.refused) == (0, 3)
    assert counts.reason in ("unavailable", "timeout")
    assert await client.get_window(K, 5, K) is None
    assert not await client.put_window(K, 5, K, b"record")
    assert await client.stats() == {}


async def test_a_dead_store_is_a_miss(chains: Any):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = StoreClient(f"127.0.0.1:{unused.getsockname()[1]}", config=QUICK)
        started = time.monotonic()
        await expect_nothing(client, chains)
        assert time.monotonic() - started < 2
        await client.close()


async def test_a_store_that_accepts_and_says_nothing_is_a_miss(chains: Any):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = StoreClient(f"127.0.0.1:{silent.getsockname()[1]}", config=QUICK)
        started = time.monotonic()
        await expect_nothing(client, chains)
        assert time.monotonic() - started < 3
        await client.close()


async def test_a_slow_store_is_a_miss_within_the_deadline(chains: Any):
    store = FakeStore()
    store.delay_s = store.between_s = 30
    store.messages = lambda request: [b"never"]
    async with serving(store) as address:
        client = StoreClient(address, config=QUICK)
        started = time.monotonic()
        await expect_nothing(client, chains)
        assert time.monotonic() - started < 2.5
        calls = store.calls
        assert await client.match(chains.root(), chains.keys(1)) == Match()
        assert store.calls == calls  # left alone for a while
        assert client.counters["calls_skipped"] > 0
        await client.close()


async def test_a_stream_that_stalls_gives_what_came(chains: Any):
    keys = chains.keys(4)
    store = FakeStore()
    store.messages = lambda request: [frame(keys[:2], [chains.value(key) for key in keys[:2]]), b"late"]

    async def stall(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield store.messages(request)[0]
        await asyncio.sleep(30)

    store.GetPages = stall  # type: ignore[method-assign]
    async with serving(store) as address:
        client = StoreClient(address, config=QUICK)
        assert await collect(client, keys) == [chains.value(key) for key in keys[:2]]
        await client.close()


async def test_a_lying_store_is_a_miss_from_the_lie_on(chains: Any):
    keys = chains.keys(4)
    values = [chains.value(key) for key in keys]
    good = frame(keys[:1], values[:1])
    flipped = bytearray(values[1])
    flipped[200] ^= 1
    foreign = seal_value(b"x" * 3392, fingerprint=b"?" * 32, page_key=keys[1], tokens=32)
    lies = {
        "a flipped bit": frame(keys[1:2], [bytes(flipped)]),
        "another page under this key": frame(keys[1:2], values[2:3]),
        "another page altogether": frame(keys[2:3], values[2:3]),
        "another model": frame(keys[1:2], [foreign]),
        "no frame": b"hello",
        "another kind": encode_frame(FrameKind.WINDOW, b""),
        "garbage meta": encode_frame(FrameKind.PAGES, b"\xff\xff"),
        "sizes that do not add up": frame(keys[1:2], values[1:2], value_bytes=7),
        "a huge size": frame(keys[1:2], values[1:2], value_bytes=2**31),
        "no keys": frame([], values[1:2]),
        "half a key": frame([keys[1][:16]], values[1:2]),
        "more pages than were asked for": frame([*keys[1:], K], [*values[1:], values[1]]),
    }
    store = FakeStore()
    config = ClientConfig(breaker_failures=1000)
    async with serving(store) as address:
        client = StoreClient(address, fingerprint=chains.fingerprint, config=config)
        for lie, message in lies.items():
            store.messages = lambda request, message=message: [good, message]  # type: ignore[misc]
            assert await collect(client, keys) == values[:1], lie
        assert client.counters["store_lied"] == len(lies)
        store.messages = lambda request: [good, frame(keys[1:3], [values[1], bytes(flipped)])]
        assert await collect(client, keys) == values[:2], "what stands before a lie in its frame is good"
        store.messages = lambda request: [good, frame(keys[1:], values[1:]), b"and more"]
        assert await collect(client, keys) == values
        await client.close()


async def test_lies_about_windows_and_counts(chains: Any):
    record = b"record" * 100

    def window(piece: bytes, **fields: Any) -> bytes:
        meta = {
            "page_key": K,
            "tokens": 5,
            "digest": K,
            "total_bytes": len(record),
            "checksum": record_checksum(record),
        } | fields
        return encode_frame(FrameKind.WINDOW, store_pb2.WindowMeta(**meta), piece)

    lies = [
        [],
        [b"hello"],
        [window(record[:-1])],
        [window(record[:-1] + b"?")],
        [window(record, tokens=6)],
        [window(record, digest=b"d" * 32)],
        [window(record, checksum=b"c")],
        [window(record, total_bytes=2**50)],
        [window(record, offset=9)],
        [encode_frame(FrameKind.WINDOW, b"\xff")],
    ]
    store = FakeStore()
    async with serving(store) as address:
        client = StoreClient(address, config=ClientConfig(breaker_failures=1000))
        for messages in lies:
            store.messages = lambda request, messages=messages: messages  # type: ignore[misc]
            assert await client.get_window(K, 5, K) is None
        store.messages = lambda request: [window(record[:50]), window(record[50:], offset=50)]
        assert await client.get_window(K, 5, K) == record
        keys = chains.keys(2)
        store.match_answer = store_pb2.MatchResponse(
            pages=2**31, windows=[store_pb2.WindowRecord(page_key=b"short", tokens=1, digest=K)]
        )
        assert await client.match(chains.root(), keys) == Match(pages=2)
        store.put_answer = store_pb2.PutPagesResponse(stored=9)
        counts = await client.put_pages(keys, [chains.value(key) for key in keys])
        assert (counts.stored, counts.refused, counts.reason) == (0, 2, "invalid")
        await client.close()


async def test_a_store_that_comes_back_is_used_again(running_node: Any, chains: Any):
    keys = chains.keys(3)
    values = [chains.value(key) for key in keys]
    async with running_node() as node:
        client = StoreClient(node.address, config=ClientConfig(breaker_open_s=0.05, breaker_max_open_s=0.1))
        assert (await client.put_pages(keys, values)).stored == 3
        port = int(node.address.rsplit(":", 1)[1])
        await node.stop(0)
        for _ in range(5):
            assert await client.match(chains.root(), keys) == Match()
    async with running_node(port=port):
        deadline = time.monotonic() + 10
        while (await client.match(chains.root(), keys)).pages != 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert await collect(client, keys) == values
        await client.close()


async def test_one_hundred_equal_fetches_cost_one(running_node: Any, chains: Any):
    keys = chains.keys(50)
    values = [chains.value(key) for key in keys]
    async with running_node() as node:
        client = StoreClient(node.address)
        await client.put_pages(keys, values)
        results = await asyncio.gather(*(collect(client, keys) for _ in range(100)))
        assert all(result == values for result in results)
        assert client.counters["fetches"] == 1
        assert client.counters["fetches_joined"] == 99
        assert node.counters["store_pages_read"] == 50
        assert not client._fetches
        await client.close()


async def test_a_reader_that_leaves_does_not_disturb_the_others(running_node: Any, chains: Any):
    keys = chains.keys(400)
    async with running_node() as node:
        client = StoreClient(node.address)
        await client.put_pages(keys, [chains.value(key) for key in keys])

        async def glance() -> None:
            pages = client.get_pages(keys)
            await anext(pages)
            await pages.aclose()

        whole, *_ = await asyncio.gather(collect(client, keys), glance(), glance())
        assert len(whole) == 400
        await glance()  # the last reader to leave ends the fetch
        assert not client._fetches
        await client.close()


async def test_closing_ends_everything(running_node: Any, chains: Any):
    keys = chains.keys(300)
    async with running_node() as node:
        client = StoreClient(node.address)
        await client.put_pages(keys, [chains.value(key) for key in keys])
        pages = client.get_pages(keys)
        await anext(pages)
        await client.close()
        rest = [index async for index, _ in pages]
        assert len(rest) < 300
        assert await client.match(chains.root(), keys) == Match()
        assert (await client.put_pages(keys[:1], [chains.value(keys[0])])).refused == 1
        await client.close()


async def test_cancelling_the_caller_cancels_the_caller(chains: Any):
    store = FakeStore()
    store.delay_s = 30
    async with serving(store) as address:
        client = StoreClient(address, config=ClientConfig(match_timeout_s=20))
        task = asyncio.create_task(client.match(chains.root(), chains.keys(1)))
        while store.calls == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()


async def test_a_channel_closed_under_a_call_is_a_miss(chains: Any):
    store = FakeStore()
    store.delay_s = 30
    async with serving(store) as address:
        client = StoreClient(address, config=ClientConfig(match_timeout_s=20))
        task = asyncio.create_task(client.match(chains.root(), chains.keys(1)))
        while store.calls == 0:
            await asyncio.sleep(0.001)
        await client.close()
        assert await task == Match()


async def test_the_callers_own_mistakes_are_said(chains: Any):
    client = StoreClient("127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="key"):
        await client.match(b"short", [])
    with pytest.raises(InvalidRequest, match="key"):
        await collect(client, [b"short"])
    with pytest.raises(InvalidRequest, match="one for each of 1 keys"):
        await client.put_pages([K], [])
    assert (await client.put_pages([], [])).refused == 0
    assert await collect(client, []) == []
    await client.close()


# ---- the parts ----


async def test_a_fetch_waits_for_its_fastest_reader_and_leaves_the_slowest():
    produced = 0

    async def source() -> Any:
        nonlocal produced
        for _ in range(50):
            produced += 2
            yield [memoryview(bytes(100)), memoryview(bytes(100))]

    fetch = SharedFetch(source(), ahead_bytes=500, keep_bytes=1000, join_bytes=1000, on_end=lambda _: None)
    slow, fast = fetch.read(), fetch.read()
    assert await anext(slow)
    for _ in range(20):
        await asyncio.sleep(0)
    assert produced <= 8  # ahead of the fastest by 500 bytes
    assert fetch.joinable
    count = 0
    async for index, _ in fast:
        assert index == count
        count += 1
    assert count == 100
    assert not fetch.joinable
    with pytest.raises(FellBehind):
        await anext(slow)


async def test_a_fetch_forgets_what_all_its_readers_have_had():
    kept: list[weakref.ref[Page]] = []

    class Page(bytearray):
        pass

    async def source() -> Any:
        for number in range(100):
            page = Page(bytes([number]) * 100)
            kept.append(weakref.ref(page))
            yield [memoryview(page)]

    def alive() -> list[int]:
        return [number for number, page in enumerate(kept) if page() is not None]

    fetch = SharedFetch(source(), ahead_bytes=300, keep_bytes=10_000, join_bytes=1000, on_end=lambda _: None)
    first, second = fetch.read(), fetch.read()
    for number in range(6):
        assert bytes((await anext(first))[1]) == bytes([number]) * 100
    assert fetch.joinable  # 1,000 bytes are kept for whoever comes
    late = fetch.read()
    assert (await anext(late))[0] == (await anext(second))[0] == 0
    for number in range(6, 90):
        assert (await anext(first))[0] == number
    assert alive()[0] <= 1  # for the two slow ones
    for number in range(1, 85):
        assert (await anext(second))[0] == (await anext(late))[0] == number
    assert (await anext(first))[0] == 90
    await asyncio.sleep(0.01)
    assert alive()[0] >= 80  # not even of its first page is anything left
    assert not fetch.joinable
    assert [index async for index, _ in late] == list(range(85, 100))
    for reader in (first, second):
        await reader.aclose()


async def test_a_watch_limits_each_message_and_not_what_is_done_with_it():
    with StallWatch(0.05) as watch:
        for _ in range(4):
            assert await watch.within(asyncio.sleep(0.03, "in time")) == "in time"
            await asyncio.sleep(0.06)
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s"):
            await watch.within(asyncio.sleep(5))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.06)  # nothing is left that would cancel this task


class StillClock:
    """An event loop whose time stands still between two timers, as a simulation's does."""

    def __init__(self, now_s: float) -> None:
        self.now_s = self.when_s = now_s

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, callback: Any) -> None:
        self.when_s = when_s

    def call_later(self, delay_s: float, callback: Any) -> None:
        self.when_s = self.now_s + delay_s


async def test_a_watch_is_not_kept_awake_by_what_rounding_leaves():
    for number in range(1000):
        watch = StallWatch(0.3)
        watch._loop = clock = StillClock(number * 0.7301)  # type: ignore[assignment]
        watch._task = task = asyncio.create_task(asyncio.sleep(5))
        watch._since_s = clock.now_s
        watch._look()
        clock.now_s = clock.when_s
        watch._look()
        assert task.cancelling() == 1, f"still waiting at {clock.now_s!r}"


async def test_a_watch_leaves_the_cancelling_of_its_task_alone():
    async def wait() -> None:
        with StallWatch(0.05) as watch:
            await watch.within(asyncio.sleep(5))

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_goes_on_by_itself_after_falling_behind(running_node: Any, chains: Any):
    keys = chains.keys(900)
    values = [chains.value(key) for key in keys]
    async with running_node() as node:
        config = ClientConfig(lag_bytes=20_000, read_ahead_bytes=10_000)
        client = StoreClient(node.address, config=config)
        await client.put_pages(keys, values)
        slow = client.get_pages(keys)
        got = [bytes((await anext(slow))[1])]
        assert await collect(client, keys) == values
        got += [bytes(value) async for _, value in slow]
        assert got == values
        assert client.counters["fetches_restarted"] == 1
        await client.close()


def test_the_breaker_opens_longer_each_time_and_closes_at_once():
    breaker = Breaker(failures=3, open_s=1, max_open_s=4)
    for now in (0, 1):
        breaker.failed(now)
        assert breaker.allows(now)
    breaker.failed(2)
    assert not breaker.allows(2.9)
    assert breaker.allows(3)
    breaker.failed(3)  # the probe
    assert not breaker.allows(4.9)
    assert breaker.allows(5)
    breaker.failed(5)
    breaker.failed(9)
    assert not breaker.allows(12.9)  # never more than the longest pause
    assert breaker.allows(13)
    breaker.succeeded()
    breaker.failed(14)
    assert breaker.allows(14)
