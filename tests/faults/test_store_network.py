"""Connections that are cut, stalled, corrupted or delayed between a client and its store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.node import StoreNode
from cedar.kvstore.rpc import ServiceStub, service_descriptor, transport_options
from cedar.v1 import store_pb2

from .store_child import FINGERPRINT, ROOT, keys_of, value_of
from .store_proxy import Fault, Proxy, proxy_to

PAGES = 40
CALL_S = 0.6
HASTY = ClientConfig(
    match_timeout_s=CALL_S, stall_timeout_s=CALL_S, put_timeout_s=1.5, window_timeout_s=CALL_S,
    stats_timeout_s=CALL_S, breaker_open_s=0.05, breaker_max_open_s=0.1,
)  # fmt: skip
LONGEST_S = 1.5 + 1.0  # the longest deadline of a call here, and a second
RECORD = b"window" * 20_000


@asynccontextmanager
async def store(directory: Path) -> AsyncIterator[tuple[StoreNode, Proxy, StoreClient]]:
    """A node with one chain and one window record, reached through a proxy."""
    node = StoreNode(
        NodeConfig(
            ssd=SsdConfig(directory=directory, capacity_bytes=256 * MIB, reserve_bytes=MIB),
            window=WindowConfig(budget_bytes=8 * MIB),
        )
    )
    address = await node.start()
    try:
        direct = StoreClient(address)
        keys = keys_of(0, PAGES)
        assert (await direct.put_pages(keys, [value_of(key) for key in keys])).stored == PAGES
        assert await direct.put_window(keys[0], 33, keys[1], RECORD)
        await direct.close()
        async with proxy_to(address) as proxy:
            client = StoreClient(proxy.address, fingerprint=FINGERPRINT, config=HASTY)
            try:
                yield node, proxy, client
            finally:
                await client.close()
        node.ssd.check_integrity(deep=True)
        node.windows.check_integrity()
    finally:
        await node.stop(0.2)


async def read(client: StoreClient, salt: int = 0) -> int:
    """Leading pages that come, each of them right."""
    keys = keys_of(salt, PAGES)
    found = 0
    async with aclosing(client.get_pages(keys)) as pages:
        async for index, value in pages:
            assert index == found
            assert bytes(value) == value_of(keys[index])
            found += 1
    return found


async def everything(client: StoreClient, salt: int) -> tuple[int, int, bytes | None, bool]:
    """One of each call: nothing raises, nothing outlives its deadline, nothing is wrong."""
    keys = keys_of(0, PAGES)
    began_s = time.monotonic()
    matched = (await client.match(ROOT, keys)).pages
    assert time.monotonic() - began_s < LONGEST_S
    began_s = time.monotonic()
    pages = await read(client)
    assert time.monotonic() - began_s < LONGEST_S
    began_s = time.monotonic()
    window = await client.get_window(keys[0], 33, keys[1])
    assert time.monotonic() - began_s < LONGEST_S
    new = keys_of(salt, 4)
    began_s = time.monotonic()
    counts = await client.put_pages(new, [value_of(key) for key in new])
    assert counts.stored + counts.present + counts.refused == 4
    assert time.monotonic() - began_s < LONGEST_S
    assert window in (None, RECORD)
    return matched, pages, window, counts.stored + counts.present == 4


async def heals(client: StoreClient) -> None:
    """Within half a minute all is as before."""
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        if (await everything(client, 5000)) == (PAGES, PAGES, RECORD, True):
            return
        await asyncio.sleep(0.1)
    pytest.fail("the store is not used again")


@pytest.mark.parametrize("kind", ["reset", "close", "stall"])
async def test_connections_cut_at_random_places(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    async with store(tmp_path / "node") as (_, proxy, client):
        for number in range(4 if kind == "stall" else 12):
            proxy.fault = Fault(kind, after=rng.choice((0, 9, 200, 20_000, 200_000, 400_000)))
            await everything(client, 100 + number)
        assert proxy.hits
        proxy.fault = Fault()
        await heals(client)


async def test_flipped_bits_are_never_a_page(tmp_path: Path) -> None:
    """TCP's checksum is weak, and memory in between has none."""
    rng = random.Random(6)
    async with store(tmp_path / "node") as (_, proxy, client):
        short = 0
        for number in range(40):
            proxy.fault = Fault("flip", after=rng.randrange(400, 480_000))  # counted on each connection anew
            other = StoreClient(proxy.address, fingerprint=FINGERPRINT, config=HASTY)
            matched, pages, window, _ = await everything(other, 100 + number)
            short += pages < PAGES or window is None or matched < PAGES
            await other.close()
        assert proxy.hits > 20
        assert short > 10, f"only {short} of {proxy.hits} were noticed"
        proxy.fault = Fault()
        await heals(client)


async def test_a_slow_network_is_a_miss_in_time(tmp_path: Path) -> None:
    async with store(tmp_path / "node") as (_, proxy, client):
        proxy.fault = Fault(delay_s=0.02)
        assert (await everything(client, 100))[0] == PAGES, "slow, but within the deadlines"
        proxy.fault = Fault(delay_s=2.0)
        assert (await everything(client, 101))[0] == 0
        proxy.fault = Fault()
        await heals(client)


async def test_a_half_open_connection_ends_by_its_deadline(tmp_path: Path) -> None:
    """One direction is lost: the store hears nothing, the client sees an open connection."""
    async with store(tmp_path / "node") as (node, proxy, client):
        assert await read(client) == PAGES
        proxy.fault = Fault(deaf=True)
        assert (await everything(client, 100)) == (0, 0, None, False)
        proxy.fault = Fault()
        await heals(client)
        for _ in range(100):
            if not node.service._reads.in_flight and not node.service._writes.in_flight:
                break
            await asyncio.sleep(0.05)
        assert node.service._reads.in_flight == node.service._writes.in_flight == 0


async def test_keepalive_finds_a_dead_peer(tmp_path: Path) -> None:
    """A call without a deadline of its own, over a connection that went silent, is UNAVAILABLE in time."""
    async with store(tmp_path / "node") as (_, proxy, _client):
        options = transport_options(max_message_bytes=32 * MIB, keepalive_s=1.0, keepalive_timeout_s=0.5)
        async with grpc.aio.insecure_channel(proxy.address, options=options.channel) as channel:
            stub = ServiceStub(channel, service_descriptor("cedar.v1.Store"))
            proxy.fault = Fault("stall", after=300_000)
            began_s = time.monotonic()
            call = stub.GetPages(store_pb2.GetPagesRequest(page_keys=b"".join(keys_of(0, PAGES))), timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began_s < 1.0 + 0.5 + 2.0
