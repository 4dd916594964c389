"""Nodes come and go: pages move in the background, and reads hit all the while."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cedar.kvstore.members import Member

CRAWL = 1000  # bytes a second: nothing moves by itself while the test looks


async def test_reads_hit_while_pages_are_still_elsewhere(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    await fleet.add("b")
    client = fleet.client()
    keys = chains.keys(320)
    await fleet.put(client, keys)
    await fleet.settle()
    c = await fleet.add("c", move_bytes_per_s=CRAWL)
    mine = [key for key in keys if fleet.owner(key) is c]
    assert len(mine) >= 32
    assert (await client.match(chains.root(), keys)).pages == 320
    assert await fleet.read(client, keys) == 320
    assert c.counters["store_pages_read_through"] >= len(mine) - 64
    assert not c.part.rebalance.settled
    await c.part.read_through.close()
    assert all(c.ssd.held(mine)), "copied on hit"
    before = c.counters["store_pages_read_through"]
    assert await fleet.read(client, keys) == 320
    assert c.counters["store_pages_read_through"] == before, "fetched once"


async def test_pages_move_to_the_new_owner_within_the_limit(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    client = fleet.client()
    keys = chains.keys(320)
    await fleet.put(client, keys)
    rate = 1 << 20
    began = time.monotonic()
    b = await fleet.add("b", move_bytes_per_s=rate)
    await fleet.settle()
    took_s = time.monotonic() - began
    mine = [key for key in keys if fleet.owner(key) is b]
    assert all(b.ssd.held(mine))
    assert sum(b.ssd.held(keys)) == len(mine), "nothing that is not its own"
    assert b.counters["store_pages_moved_in"] == len(mine)
    moved_bytes = len(mine) * 3488
    assert took_s > (moved_bytes - 0.25 * rate - 16 * 3488) / rate - 0.1
    assert await fleet.read(client, keys) == 320
    assert b.counters["store_pages_read_through"] == 0


async def test_what_moves_keeps_its_age_and_place(fleet: Any, chains: Any) -> None:
    a = await fleet.add("a")
    client = fleet.client()
    keys = chains.keys(160)
    await fleet.put(client, keys)
    for key in keys:
        a.ssd._index.get(key).used_s -= 500
    b = await fleet.add("b")
    await fleet.settle()
    moved = [key for key in keys if fleet.owner(key) is b]
    assert moved
    for key in moved:
        page_index, tenant, idle_s = b.ssd.facts(key)
        assert (page_index, tenant) == (keys.index(key), b"tenant")
        assert 499 <= idle_s < 520


async def test_a_draining_node_hands_over_and_may_go(fleet: Any, chains: Any, eventually: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(320)
    await fleet.put(client, keys)
    await fleet.settle()
    a = fleet.list.find("a")
    fleet.publish(fleet.list.with_member(Member("a", a.address, a.incarnation, 1.0, "draining", 1)))
    assert await fleet.read(client, keys) == 320, "reads hit at once"
    more = chains.keys(64, salt=7)
    await fleet.put(client, more)
    assert sum(fleet.nodes["a"].ssd.held(more)) == 0, "no writes any more"
    await fleet.settle()
    await fleet.remove("a")
    assert (await client.match(chains.root(), keys)).pages == 320
    assert await fleet.read(client, keys) == 320
    assert await fleet.read(client, more) == 64


async def test_join_and_leave_under_load(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    await fleet.add("b")
    client = fleet.client()
    keys = [chains.keys(48, salt=salt) for salt in range(6)]
    for chain in keys:
        await fleet.put(client, chain)
    stop = asyncio.Event()
    hits: list[int] = []

    async def load(worker: int) -> None:
        while not stop.is_set():
            for chain in keys[worker::2]:
                hits.append(await fleet.read(client, chain))
                await asyncio.sleep(0.005)

    workers = [asyncio.create_task(load(i)) for i in range(2)]
    await fleet.add("c", move_bytes_per_s=200_000)
    await asyncio.sleep(0.3)
    await fleet.add("d", move_bytes_per_s=200_000)
    await asyncio.sleep(0.3)
    await fleet.settle()
    b = fleet.list.find("b")
    fleet.publish(fleet.list.with_member(Member("b", b.address, b.incarnation, 1.0, "draining", 2)))
    await fleet.settle()
    await fleet.remove("b")
    await asyncio.sleep(0.2)
    stop.set()
    await asyncio.gather(*workers)
    assert len(hits) > 30
    short = [count for count in hits if count < 48]
    assert len(short) <= 1, f"{len(short)} of {len(hits)} reads came short: {short}"


async def test_many_clients_of_a_new_owner_cost_the_old_one_a_single_fetch(fleet: Any, chains: Any) -> None:
    a = await fleet.add("a")
    writer = fleet.client()
    salts = range(30)
    chains_of = [chains.keys(32, salt=salt)[16:] for salt in salts]
    for keys in chains_of:
        await fleet.put(writer, keys)
    b = await fleet.add("b", move_bytes_per_s=CRAWL)
    keys = next(k for k in chains_of if fleet.owner(k[0]) is b and not b.ssd.held(k)[0])  # moved last
    sent = a.counters["store_pages_sent_to_peers"]
    clients = [fleet.client() for _ in range(20)]
    counts = await asyncio.gather(*(fleet.read(client, keys) for client in clients for _ in range(5)))
    assert counts == [16] * 100
    moved_meanwhile = b.counters["store_pages_moved_in"] + 16  # one portion may wait for its bandwidth
    assert a.counters["store_pages_sent_to_peers"] - sent <= 16 + moved_meanwhile, {
        k: v for k, v in b.counters.snapshot().items() if v and ("peer" in k or "_in" in k or "through" in k)
    }
    assert b.counters["store_pages_read_through"] >= 16


async def test_window_records_follow_by_being_asked_for(fleet: Any, chains: Any) -> None:
    await fleet.add("a")
    client = fleet.client()
    keys = chains.keys(160)
    await fleet.put(client, keys)
    for number, key in enumerate(keys):
        assert await client.put_window(key, number + 1, b"d" * 32, b"r%d" % number, tenant=b"t")
    b = await fleet.add("b", move_bytes_per_s=CRAWL)
    number = next(i for i, key in enumerate(keys) if fleet.owner(key) is b and not b.ssd.held([key])[0])
    match = await client.match(chains.root(), keys[: number + 1])
    assert number + 1 in [w.tokens for w in match.windows]
    assert await client.get_window(keys[number], number + 1, b"d" * 32) == b"r%d" % number
    assert len(b.windows) == 1
    assert next(iter(b.windows._held.values())).tenant == b"t"


async def test_a_node_comes_back_with_old_data(fleet: Any, chains: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    old, new = chains.keys(160), chains.keys(160, salt=3)
    await fleet.put(client, old)
    await fleet.settle()
    node_b_had = [key for key in old if fleet.owner(key) is fleet.nodes["b"]]
    await fleet.remove("b")
    lost = len(old) - sum(map(any, zip(*(n.ssd.held(old) for n in fleet.nodes.values()), strict=True)))
    assert lost == len(node_b_had)
    await fleet.put(client, new)
    await fleet.settle()
    b = await fleet.add("b", move_bytes_per_s=CRAWL)
    assert all(b.ssd.held(node_b_had))
    assert await fleet.read(client, old) == 160, "its old pages count again"
    assert await fleet.read(client, new) == 160, "what it missed is read through"


async def test_a_dead_member_does_not_stop_the_others_settling(
    fleet: Any, chains: Any, eventually: Any
) -> None:
    for name in "abc":
        await fleet.add(name)
    await fleet.settle()
    await fleet.nodes.pop("b").stop(0.1)
    d = await fleet.add("d")
    await asyncio.sleep(0.3)
    assert not d.part.rebalance.settled, "it cannot know what b holds"
    fleet.publish(fleet.list.without(["b"]))
    await fleet.settle()
