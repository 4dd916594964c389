"""A chain over several nodes: one round trip to look up, large ordered streams to read."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import aclosing
from typing import Any

import pytest
from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.connect import connect
from cedar.kvstore.errors import InvalidRequest, NotInMemory
from cedar.kvstore.members import MemberList
from cedar.kvstore.node import StoreNode

DIGEST = b"d" * 32


def slow_down(node: Any, delay_s: float) -> None:
    """Let a node's reads take longer."""
    tier = node.ssd
    read_into = tier.read_into

    def slow(*arguments: Any, wait: bool = True, **named: Any) -> Any:
        if not wait:
            raise NotInMemory
        time.sleep(delay_s)
        return read_into(*arguments, wait=wait, **named)

    tier.read_into = slow


async def test_a_chain_is_spread_and_found_in_one_round_trip_a_node(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(320)
    await fleet.put(client, keys)
    held = fleet.held_by(keys)
    assert sum(held.values()) == 320, "each page on one node"
    assert all(count >= 32 and count % 4 == 0 for count in held.values()), "in whole runs"
    before = {name: node.counters["store_match_requests"] for name, node in fleet.nodes.items()}
    match = await client.match(chains.root(), keys)
    assert match.pages == 320
    asked = [node.counters["store_match_requests"] - before[name] for name, node in fleet.nodes.items()]
    assert asked == [1, 1, 1]
    assert await fleet.read(client, keys) == 320
    assert [c.counters["fetches"] for c in client._clients.values()] == [1, 1, 1], "one stream a node"


async def test_one_run_is_one_request_to_one_node(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    salt = next(
        s for s in range(50) if fleet.owner(chains.keys(17, salt=s)[16]) is fleet.owner(chains.root())
    )
    keys = chains.keys(32, salt=salt)[16:]
    await fleet.put(client, keys)
    before = fleet.total("store_match_requests")
    assert (await client.match(chains.root(), keys)).pages == 16
    assert fleet.total("store_match_requests") - before == 1


async def test_the_first_page_comes_before_the_last_is_found(fleet: Any, chains: Any) -> None:
    for name in "ab":
        await fleet.add(name)
    client = fleet.client(copies=1)
    salt = next(
        s
        for s in range(99)
        if fleet.owner(chains.keys(1, salt=s)[0]) is not fleet.owner(chains.keys(32, salt=s)[31])
    )
    keys = chains.keys(32, salt=salt)
    await fleet.put(client, keys)
    slow_down(fleet.owner(keys[31]), 0.3)
    began = time.monotonic()
    times = []
    async with aclosing(client.get_pages(keys)) as pages:
        async for _ in pages:
            times.append(time.monotonic() - began)
    assert len(times) == 32
    assert times[0] < 0.25 < times[31]


async def test_a_hole_ends_the_prefix(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(200)
    await fleet.put(client, keys[:70])
    await fleet.put(client, keys[71:])
    assert (await client.match(chains.root(), keys)).pages == 70
    assert await fleet.read(client, keys) == 70
    assert await fleet.read(client, keys[71:]) == 129, "a part of a chain is read as well"
    assert await fleet.read(client, []) == 0


async def test_a_reader_may_leave_at_any_page(fleet: Any, chains: Any) -> None:
    for name in "ab":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(96)
    await fleet.put(client, keys)
    for stop in (1, 17, 40):
        async with aclosing(client.get_pages(keys)) as pages:
            async for index, _ in pages:
                if index == stop:
                    break
    await asyncio.sleep(0.05)
    assert all(not c._fetches and c.reads_in_flight == 0 for c in client._clients.values())
    for node in fleet.nodes.values():
        stats = await client._client(node.part.node_id, node.address).stats()
        assert stats["store_reads_in_flight"] == 0


async def test_a_hundred_readers_cost_one_fetch(fleet: Any, chains: Any) -> None:
    for name in "ab":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(64)
    await fleet.put(client, keys)
    before = fleet.total("store_pages_read")
    counts = await asyncio.gather(*(fleet.read(client, keys) for _ in range(100)))
    assert counts == [64] * 100
    assert fleet.total("store_pages_read") - before == 64
    assert sum(c.counters["fetches"] for c in client._clients.values()) == len(
        {fleet.owner(key).part.node_id for key in keys}
    )


async def test_a_slow_node_is_hedged(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name, copy_after_hits=0)
    client = fleet.client(hedge_least_s=0.02, hedge_most_s=0.1)
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    from_copy = fleet.second(keys[0])
    for _ in range(500):
        if all(from_copy.ssd.held(keys)):
            break
        await asyncio.sleep(0.02)
    slow_down(fleet.owner(keys[0]), 0.7)
    began = time.monotonic()
    assert await fleet.read(client, keys) == 16
    assert time.monotonic() - began < 0.6
    assert client.counters["reads_hedged"] == 1
    assert client.counters["pages_from_replica"] == 16


async def test_a_hot_run_is_read_from_both_its_nodes(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    second = fleet.second(keys[0])
    for _ in range(4):
        assert await fleet.read(client, keys) == 16
    for _ in range(500):
        if all(second.ssd.held(keys)):
            break
        await asyncio.sleep(0.02)
    for _ in range(24):
        assert await fleet.read(client, keys) == 16
    assert client.counters["reads_from_copy"] >= 4
    assert second.counters["store_pages_read"] >= 64


async def test_a_busy_node_says_when_to_come_back(fleet: Any, chains: Any) -> None:
    await fleet.add("a", max_writes=1, retry_after_s=0.25)
    client = fleet.client()
    keys = chains.keys(32)[16:]
    node = client._client("a", fleet.nodes["a"].address)
    release = asyncio.Event()
    with fleet.nodes["a"].service._writes.admit():
        counts = await client.put_pages(keys, [chains.value(key) for key in keys])
        assert (counts.refused, counts.reason, counts.retry_after_s) == (16, "busy", 0.25)
    release.set()
    assert not node.resting, "a busy node is not a dead one"
    await fleet.put(client, keys)


async def test_reads_of_a_busy_node_go_to_the_copy(fleet: Any, chains: Any) -> None:
    for name in "ab":
        await fleet.add(name, copy_after_hits=0, max_reads=1)
    client = fleet.client()
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    second = fleet.second(keys[0])
    for _ in range(500):
        if all(second.ssd.held(keys)):
            break
        await asyncio.sleep(0.02)
    with fleet.owner(keys[0]).service._reads.admit():
        assert await fleet.read(client, keys) == 16
    assert client.counters["reads_failed_over"] == 1


async def test_a_client_with_an_old_list_learns_the_new_one(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    old = fleet.list
    await fleet.add("b")
    await fleet.add("c")
    keys = chains.keys(160)
    writer = fleet.client(old)
    await fleet.put(writer, keys)
    assert writer.feed.current == fleet.list
    assert sum(c.counters["store_epoch_refused"] for c in writer._clients.values()) >= 1
    assert all(fleet.owner(key).ssd.held([key]) == [True] for key in keys), "nothing at the wrong node"
    for call in ("match", "read", "window"):
        client = fleet.client(old)
        if call == "match":
            assert (await client.match(chains.root(), keys)).pages == 160
        elif call == "read":
            assert await fleet.read(client, keys) == 160
        else:
            key = next(k for k in keys if fleet.owner(k) is not fleet.nodes["a"])
            assert await client.put_window(key, 7, DIGEST, b"record")
            assert await fleet.client(old).get_window(key, 7, DIGEST) == b"record"
        assert client.feed.current.epoch == fleet.list.epoch


@pytest.mark.parametrize("left", [[], ["a"]])
async def test_nodes_of_earlier_lists_tell_when_nobody_is_left_on_this_one(
    fleet: Any, chains: Any, left: list[str]
) -> None:
    """A client without a source of its own had nobody to hear of the new list from, for good."""
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(64)
    assert (await client.match(chains.root(), keys)).pages == 0
    client.feed.publish(fleet.list.without([name for name in "abc" if name not in left]))
    fleet.clients.remove(client)  # the fleet publishes to it no more
    await fleet.remove("a")
    fleet.publish(fleet.list.at_epoch(fleet.list.epoch + 1))
    await fleet.put(fleet.client(), keys)
    deadline_s = time.monotonic() + 15
    while client.feed.current != fleet.list:
        match = await client.match(chains.root(), keys)
        assert time.monotonic() < deadline_s, "it never learns of the list"
        assert left or match.pages == 64, "an empty list is asked about before the call itself"
        await asyncio.sleep(0.1)
    assert (await client.match(chains.root(), keys)).pages == 64
    assert client.counters["earlier_nodes_asked"] >= 2
    await client.close()


async def test_an_upload_that_is_refused_for_its_old_list_goes_to_the_new_owner(
    fleet: Any, chains: Any
) -> None:
    """The node ends the call while most of it is still to be written: gRPC may lose the status then."""
    await fleet.add("a")
    old = fleet.list
    await fleet.add("b")
    size = 200_000
    runs = (chains.keys(32, salt=salt)[16:] for salt in range(50))
    keys = next(run for run in runs if fleet.owner(run[0]) is fleet.nodes["b"])
    for _ in range(10):
        client = fleet.client(old)
        values = [chains.value(key, size) for key in keys]
        counts = await client.put_pages(keys, values, first_page=16, tenant=b"t")
        assert counts.refused == 0, counts
        assert client.feed.current == fleet.list
        assert all(fleet.nodes["b"].ssd.held(keys))
        assert not any(fleet.nodes["a"].ssd.held(keys))


async def test_a_node_behind_the_client_serves_all_the_same(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    client = fleet.client(fleet.list.at_epoch(99))
    keys = chains.keys(20)
    await fleet.put(client, keys)
    assert await fleet.read(client, keys) == 20


async def test_an_address_that_is_another_node_now(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    await fleet.add("b")
    wrong = MemberList(
        fleet.list.epoch,
        tuple(
            type(m)(m.node_id, fleet.nodes["b" if m.node_id == "a" else "a"].address, m.incarnation)
            for m in fleet.list.members
        ),
    )
    client = fleet.client(wrong)
    keys = chains.keys(64)
    counts = await client.put_pages(keys, [chains.value(key) for key in keys])
    assert counts.refused == 64
    assert fleet.total("store_puts_stored") == 0


async def test_nodes_that_never_change_need_no_service(tmp_path: Any, chains: Any, eventually: Any) -> None:
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    peers = tuple(f"127.0.0.1:{port}" for port in ports)
    nodes = []
    for port in ports:
        ssd = SsdConfig(directory=tmp_path / str(port), capacity_bytes=64 * MIB, reserve_bytes=MIB)
        config = NodeConfig(ssd=ssd, window=WindowConfig(budget_bytes=MIB), port=port)
        nodes.append(StoreNode(config, peers=PeerConfig(peers=peers, copy_after_hits=0)))
    store = connect(",".join(peers), fingerprint=chains.fingerprint)
    try:
        for node in nodes:
            await node.start()
        keys = chains.keys(64)
        assert (await store.put_pages(keys, [chains.value(key) for key in keys])).stored == 64
        await eventually(lambda: all(all(node.ssd.held(keys)) for node in nodes))
        await nodes[0].stop(0.1)
        assert (await store.match(chains.root(), keys)).pages == 64
    finally:
        await store.close()
        for node in nodes:
            await node.stop(0.1)


async def test_window_records_lie_with_their_page(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(40)
    await fleet.put(client, keys)
    root = chains.root()
    for page_key, tokens in ((keys[3], 130), (keys[39], 1290), (root, 9)):
        assert await client.put_window(page_key, tokens, DIGEST, b"%d" % tokens, tenant=b"t")
        assert await client.get_window(page_key, tokens, DIGEST) == b"%d" % tokens
        assert len(fleet.owner(page_key).windows) >= 1
    match = await client.match(root, keys)
    assert [w.tokens for w in match.windows][:2] == [1290, 130]
    short = await client.match(root, keys[:5])
    assert [w.tokens for w in short.windows] == [130, 9]
    assert [w.tokens for w in (await client.match(root, [])).windows] == [9]
    assert await client.get_window(keys[3], 131, DIGEST) is None


async def test_nothing_raises_when_all_are_gone(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    client = fleet.client(node=ClientConfig(match_timeout_s=0.3, stall_timeout_s=0.3))
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    await fleet.nodes.pop("a").stop(0.1)
    for _ in range(5):
        assert (await client.match(chains.root(), keys)).pages == 0
        assert await fleet.read(client, keys) == 0
    counts = await client.put_pages(keys, [chains.value(key) for key in keys])
    assert (counts.refused, counts.reason) == (16, "unavailable")
    assert await client.get_window(keys[0], 1, DIGEST) is None
    assert not await client.put_window(keys[0], 1, DIGEST, b"r")
    assert await client.stats() == {}
    empty = fleet.client(MemberList(0))
    assert (await empty.match(chains.root(), keys)).pages == 0
    assert (await empty.put_pages(keys, [chains.value(key) for key in keys])).refused == 16
    await empty.close()
    assert await fleet.read(empty, keys) == 0


async def test_callers_mistakes_raise(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    client = fleet.client()
    with pytest.raises(InvalidRequest):
        await client.match(b"short", [])
    with pytest.raises(InvalidRequest):
        await client.put_pages(chains.keys(2), [b""])
    with pytest.raises(InvalidRequest):
        await client.purge(b"")
