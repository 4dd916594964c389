"""Runs that are hit often live on two nodes, and a value that went bad is read from the other."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from cedar.kvstore.keys import chain_keys


async def on_two(fleet: Any, keys: list[bytes], eventually: Any) -> None:
    await eventually(lambda: all(all(fleet.second(key).ssd.held([key])) for key in keys))


async def test_three_hits_make_a_copy(fleet: Any, chains: Any, eventually: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    hot, cold = chains.keys(48), chains.keys(48, salt=1)
    await fleet.put(client, hot)
    await fleet.put(client, cold)
    for _ in range(2):
        assert await fleet.read(client, hot) == 48
        assert await fleet.read(client, cold) == 48
    assert sum(fleet.held_by(hot).values()) == 48
    assert await fleet.read(client, hot) == 48
    await on_two(fleet, hot, eventually)
    assert sum(fleet.held_by(hot).values()) == 96
    assert sum(fleet.held_by(cold).values()) == 48
    page_index, tenant, _ = fleet.second(hot[20]).ssd.facts(hot[20])
    assert (page_index, tenant) == (20, b"tenant")


async def test_chains_that_part_after_a_hot_beginning(fleet: Any, chains: Any, eventually: Any) -> None:
    """The common pages get copies and are read from both nodes; what follows lies spread, and is found."""
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    common = list(range(2 * 32))
    talks = [
        chain_keys(chains.root(), [*common, *range(1000 * n, 1000 * n + 10 * 32)], [], 32)
        for n in range(1, 25)
    ]
    assert len({keys[1] for keys in talks}) == 1
    for keys in talks:
        await fleet.put(client, keys)
    spread = [sum(fleet.owner(keys[8]) is node for keys in talks) for node in fleet.nodes.values()]
    assert min(spread) >= 2
    for keys in talks[:4]:
        assert await fleet.read(client, keys) == 12
    await on_two(fleet, talks[0][:2], eventually)
    assert await fleet.read(client, talks[0]) == 12  # and hears of the copies
    before = client.counters.copy()
    for keys in talks:
        assert await fleet.read(client, keys) == 12
    assert client.counters["reads_from_copy"] - before["reads_from_copy"] >= 4
    assert client.counters["reads_failed_over"] == 0


async def test_a_dead_owner_costs_nothing_for_hot_chains(fleet: Any, chains: Any, eventually: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(96)
    await fleet.put(client, keys)
    for _ in range(3):
        await fleet.read(client, keys)
    await on_two(fleet, keys, eventually)
    name = fleet.list.owner(keys[0][:4]).node_id
    await fleet.nodes.pop(name).stop(0.1)
    assert (await client.match(chains.root(), keys)).pages == 96, "before anyone knows that it is dead"
    assert await fleet.read(client, keys) == 96
    fleet.publish(fleet.list.without([name]))
    assert await fleet.read(client, keys) == 96
    for _ in range(3):
        await fleet.read(client, keys)
    await on_two(fleet, keys, eventually)


async def test_growing_hot_chains_and_new_second_holders(fleet: Any, chains: Any, eventually: Any) -> None:
    await fleet.add("a")
    await fleet.add("b")
    client = fleet.client()
    keys = chains.keys(32)
    await fleet.put(client, keys[:20])
    for _ in range(3):
        await fleet.read(client, keys[:20])
    await on_two(fleet, keys[:20], eventually)
    await fleet.put(client, keys[20:])
    assert sum(fleet.held_by(keys).values()) == 20 + 32, "what is new has not been hit yet"
    for _ in range(3):
        await fleet.read(client, keys)
    await on_two(fleet, keys, eventually)
    for name in "cd":
        await fleet.add(name)
    await fleet.settle()
    for _ in range(3):
        await fleet.read(client, keys)
    await on_two(fleet, keys, eventually)


async def test_copies_keep_to_their_bandwidth(fleet: Any, chains: Any, eventually: Any) -> None:
    rate = 400_000
    for name in "ab":
        await fleet.add(name, copy_after_hits=0, copy_bytes_per_s=rate)
    client = fleet.client()
    keys = chains.keys(160)
    began = time.monotonic()
    await fleet.put(client, keys)
    acknowledged_s = time.monotonic() - began
    await on_two(fleet, keys, eventually)
    by_owner = max(sum(fleet.owner(key) is node for key in keys) for node in fleet.nodes.values())
    assert time.monotonic() - began > (by_owner - 32) * 3488 / rate - 0.25 - 0.1
    assert acknowledged_s < 0.7, "a put does not wait for copies"


async def test_what_the_owner_could_not_take_reaches_it_later(
    fleet: Any, chains: Any, eventually: Any
) -> None:
    for name in "abc":
        await fleet.add(name, max_writes=1)
    client = fleet.client()
    keys = chains.keys(32)[16:]
    owner, second = fleet.owner(keys[0]), fleet.second(keys[0])
    with owner.service._writes.admit():
        await fleet.put(client, keys)
        assert client.counters["puts_failed_over"] == 1
        assert all(second.ssd.held(keys))
    await eventually(lambda: all(owner.ssd.held(keys)))
    page_index, tenant, _ = owner.ssd.facts(keys[4])
    assert (page_index, tenant) == (4, b"tenant")
    assert await fleet.read(client, keys) == 16


async def test_one_copy_only_when_so_configured(fleet: Any, chains: Any) -> None:
    for name in "ab":
        await fleet.add(name, copies=1, copy_after_hits=0)
    client = fleet.client()
    keys = chains.keys(32)
    await fleet.put(client, keys)
    for _ in range(4):
        await fleet.read(client, keys)
    assert sum(fleet.held_by(keys).values()) == 32
    assert fleet.total("store_pages_copied_out") == 0


async def test_a_damaged_value_is_read_from_the_copy(fleet: Any, chains: Any, eventually: Any) -> None:
    for name in "abc":
        await fleet.add(name)
    client = fleet.client()
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    for _ in range(3):
        await fleet.read(client, keys)
    await on_two(fleet, keys, eventually)
    owner = fleet.owner(keys[0])
    entry = owner.ssd._index.get(keys[7])
    with (entry.segment.path / "values.dat").open("r+b") as file:
        file.seek(entry.offset + 500)
        file.write(b"\xff\x00\xff")
    assert owner.ssd.get(keys[7]) is None, "found bad, quarantined"
    assert owner.ssd.held(keys).count(False) == 1
    assert (await client.match(chains.root(), keys)).pages == 16
    client._copies._copied.clear()
    assert await fleet.read(client, keys) == 16
    await owner.part.read_through.close()
    assert all(owner.ssd.held(keys)), "and repaired"
    assert owner.counters["store_values_corrupt"] == 1


async def test_damage_after_a_restart_is_still_repaired(fleet: Any, chains: Any, eventually: Any) -> None:
    """The owner has forgotten which runs it copied; that a page was lost it reads from its own rows."""
    for name in "ab":
        await fleet.add(name, copy_after_hits=0)
    client = fleet.client()
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    await on_two(fleet, keys, eventually)
    owner = fleet.owner(keys[0])
    name = owner.part.node_id
    entry = owner.ssd._index.get(keys[3])
    with (entry.segment.path / "values.dat").open("r+b") as file:
        file.seek(entry.offset + 500)
        file.write(b"\xff\x00\xff")
    assert owner.ssd.get(keys[3]) is None
    await fleet.nodes.pop(name).stop(0.1)
    await fleet.add(name, copy_after_hits=100, listed=False)
    member = fleet.list.find(name)
    fleet.publish(
        fleet.list.with_member(
            type(member)(name, fleet.nodes[name].address, 9, joined_epoch=fleet.list.epoch + 1)
        )
    )
    await fleet.settle()
    assert await fleet.read(client, keys) == 16


async def test_the_list_says_how_many_copies(fleet: Any, chains: Any, eventually: Any) -> None:
    """Nodes and clients that were configured otherwise go by it."""
    for name in "abc":
        await fleet.add(name, copies=1)
    fleet.publish(replace(fleet.list, epoch=fleet.list.epoch + 1, copies=3))
    client = fleet.client(copies=1)
    keys = chains.keys(32)[16:]
    await fleet.put(client, keys)
    for _ in range(3):
        assert await fleet.read(client, keys) == 16
    await eventually(lambda: sum(fleet.held_by(keys).values()) == 48)
    holders = fleet.list.holders(keys[0][:4])
    for member in holders[:2]:
        await fleet.nodes[member.node_id].stop(0.1)
    assert await fleet.read(client, keys) == 16, "from the third"
