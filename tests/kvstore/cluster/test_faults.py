"""Real processes on loopback ports: cut off, killed, flapping, duplicated, back with old data."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import ClusterClientConfig
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.header import HEADER_BYTES
from cedar.kvstore.member_feed import FileFeed, ServiceFeed
from cedar.kvstore.members import Member, MemberList, to_json

CALL_S = 0.5
CONFIG = ClusterClientConfig(
    node=ClientConfig(
        match_timeout_s=CALL_S,
        stall_timeout_s=CALL_S,
        put_timeout_s=2.0,
        stats_timeout_s=CALL_S,
        breaker_max_open_s=1.0,
    )
)


class Store:
    """A running store of several processes, and what is in it."""

    def __init__(self, client: ClusterClient, chains: Any) -> None:
        self.client = client
        self.chains = chains
        self.slowest_s = 0.0

    async def put(self, keys: list[bytes]) -> None:
        counts = await self.client.put_pages(keys, [self.chains.value(key) for key in keys], tenant=b"t")
        assert counts.stored + counts.present == len(keys), counts

    async def read(self, keys: list[bytes]) -> int:
        """Leading pages that come; wrong bytes fail, and so does a call that outlives its deadlines."""
        began = time.monotonic()
        count = 0
        async with aclosing(self.client.get_pages(keys)) as pages:
            async for index, value in pages:
                assert index == count
                assert bytes(value[HEADER_BYTES:]) == self.chains.payload(keys[index])
                count += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return count

    def told(self) -> str:
        """What the client has counted, for a failure's message."""
        counters = {name[0]: dict(node.counters) for name, node in self.client._clients.items()}
        return f"epoch {self.client.feed.current.epoch}, {dict(self.client.counters)}, {counters}"

    async def members(self, *names: str, within_s: float = 15.0) -> None:
        deadline_s = time.monotonic() + within_s
        while sorted(m.node_id for m in self.client.feed.current.members) != sorted(names):
            assert time.monotonic() < deadline_s, self.client.feed.current
            await asyncio.sleep(0.05)


@asynccontextmanager
async def store_of(address: str, chains: Any) -> AsyncIterator[Store]:
    client = ClusterClient(ServiceFeed(address), fingerprint=chains.fingerprint, config=CONFIG)
    try:
        yield Store(client, chains)
    finally:
        await client.close()


async def start(programs: Any, *names: str, arguments: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    service = programs.service()
    await programs.ready(service)
    nodes = {name: programs.node(name, service.address, *arguments) for name in names}
    await programs.ready(*nodes.values())
    return service, nodes


async def test_a_node_is_cut_off_killed_and_comes_back_with_old_data(programs: Any, chains: Any) -> None:
    service, nodes = await start(programs, "a", "b", "c", arguments=("--copy-after-hits", "0"))
    async with store_of(service.address, chains) as store:
        await store.client.match(chains.root(), [])
        await store.members("a", "b", "c")
        keys = chains.keys(160)
        await store.put(keys)
        for _ in range(100):
            stats = await store.client.stats()
            if stats["store_pages"] == 320:
                break
            await asyncio.sleep(0.1)
        assert stats["store_pages"] == 320, "two copies of each"

        nodes["b"].send(signal.SIGSTOP)  # cut off: it neither answers nor closes anything
        counts = [await store.read(keys) for _ in range(3)]
        assert counts == [160] * 3
        assert store.slowest_s < 6 * CALL_S
        await store.members("a", "c")
        assert await store.read(keys) == 160, store.told()
        during = chains.keys(64, salt=1)
        await store.put(during)

        nodes["b"].send(signal.SIGCONT)  # it finds its lease gone and joins again
        await store.members("a", "b", "c")
        assert await store.read(keys) == 160
        assert await store.read(during) == 64

        nodes["b"].kill()
        assert await store.read(keys) == 160
        await store.members("a", "c")
        late = chains.keys(64, salt=2)
        await store.put(late)
        again = programs.node("b", service.address, "--copy-after-hits", "0")
        await programs.ready(again)
        await store.members("a", "b", "c")
        for chain in (keys, during, late):
            assert await store.read(chain) == len(chain)
        stats = await store.client.node_stats()
        assert stats["b"]["store_pages"] > 0, "with the pages it had"


async def test_the_list_freezes_when_its_holder_dies(programs: Any, chains: Any, tmp_path: Path) -> None:
    service = programs.service("--state", str(tmp_path / "members.json"))
    await programs.ready(service)
    nodes = {name: programs.node(name, service.address) for name in "ab"}
    await programs.ready(*nodes.values())
    async with store_of(service.address, chains) as store:
        await store.client.match(chains.root(), [])
        await store.members("a", "b")
        keys, more = chains.keys(64), chains.keys(64, salt=1)
        await store.put(keys)
        service.kill()
        await asyncio.sleep(2.0)  # longer than a lease
        await store.put(more)
        assert await store.read(keys) == 64
        assert await store.read(more) == 64
        assert len(store.client.feed.current.members) == 2
        epoch = store.client.feed.current.epoch
        port = service.address.rsplit(":", 1)[1]
        again = programs.service("--port", port)  # without its file: it learns from the nodes
        await programs.ready(again)
        nodes["c"] = programs.node("c", service.address)
        await programs.ready(nodes["c"])
        await store.members("a", "b", "c")
        assert store.client.feed.current.epoch > epoch
        assert await store.read(keys) == 64


async def test_a_flapping_node_is_held_out_and_nobody_suffers(programs: Any, chains: Any) -> None:
    service = programs.service("--flap-joins", "2", "--hold-s", "60")
    await programs.ready(service)
    nodes = {name: programs.node(name, service.address) for name in "ab"}
    await programs.ready(*nodes.values())
    async with store_of(service.address, chains) as store:
        await store.client.match(chains.root(), [])
        await store.members("a", "b")
        keys = chains.keys(64)
        mine = [key for key in keys if store.client.feed.current.owner(key[:4]).node_id == "a"]
        await store.put(keys)
        hits = []
        for _ in range(4):
            nodes["b"].send(signal.SIGSTOP)
            await store.members("a", within_s=10)
            hits.append(await store.read(mine))
            nodes["b"].send(signal.SIGCONT)
            try:
                await store.members("a", "b", within_s=2.5)
            except AssertionError:
                break
            hits.append(await store.read(keys))
        else:
            pytest.fail("it was let in every time")
        epoch = store.client.feed.current.epoch
        await asyncio.sleep(1.5)
        assert store.client.feed.current.epoch == epoch, "no more moves"
        assert all(count in (len(mine), 64) for count in hits)


async def test_a_duplicate_of_a_node_is_refused(programs: Any, chains: Any, tmp_path: Path) -> None:
    """A copy of its disk was started elsewhere: the same name, another address."""
    service, _ = await start(programs, "a")
    async with store_of(service.address, chains) as store:
        await store.client.match(chains.root(), [])
        await store.members("a")
        keys = chains.keys(32)
        await store.put(keys)
        twin = programs.node("a2", service.address, "--node-id", "a")
        await programs.ready(twin)
        await asyncio.sleep(1.0)
        (member,) = store.client.feed.current.members
        assert member.address != twin.address
        assert await store.read(keys) == 32
        assert "a second node of that name is refused" in (tmp_path / "log").read_text()


async def test_a_node_drains_and_leaves(programs: Any, chains: Any) -> None:
    service, nodes = await start(programs, "a", "b", "c")
    async with store_of(service.address, chains) as store:
        await store.client.match(chains.root(), [])
        await store.members("a", "b", "c")
        keys = chains.keys(160)
        await store.put(keys)
        nodes["c"].send(signal.SIGUSR1)
        counts = []
        while nodes["c"].process.poll() is None:
            counts.append(await store.read(keys))
            await asyncio.sleep(0.05)
        assert nodes["c"].process.returncode == 0
        await store.members("a", "b")
        counts.append(await store.read(keys))
        assert counts.count(160) >= len(counts) - 1, counts


async def test_a_file_may_hold_the_list(tmp_path: Path, fleet: Any, chains: Any) -> None:
    """No service at all: whoever runs the nodes writes the file."""
    path = tmp_path / "members.json"
    nodes = [await fleet.add(name, listed=False) for name in "ab"]
    listed = [Member(name, node.address, joined_epoch=1) for name, node in zip("ab", nodes, strict=True)]
    path.write_text(to_json(MemberList(1, (listed[0],))))
    client = ClusterClient(FileFeed(path, poll_s=0.05), fingerprint=chains.fingerprint, config=CONFIG)
    store = Store(client, chains)
    keys = chains.keys(64)
    await store.put(keys)
    assert all(nodes[0].ssd.held(keys))
    path.write_text("{ half a fi")
    await asyncio.sleep(0.2)
    assert await store.read(keys) == 64
    path.write_text(to_json(MemberList(2, tuple(listed))))
    await store.members("a", "b")
    await store.put(chains.keys(64, salt=2))
    assert sum(nodes[1].ssd.held(chains.keys(64, salt=2))) > 0
    await client.close()


async def test_a_node_that_flaps_under_load_costs_no_hits_on_what_is_copied(
    programs: Any, chains: Any
) -> None:
    """Shorter than its lease, so that the list stays and every stop is met by the clients alone."""
    service, nodes = await start(programs, "a", "b", "c", arguments=("--copy-after-hits", "0"))
    async with store_of(service.address, chains) as store:
        await store.client.match(chains.root(), [])
        await store.members("a", "b", "c")
        all_keys = [chains.keys(48, salt=salt) for salt in range(3)]
        for keys in all_keys:
            await store.put(keys)
        for _ in range(100):
            if (await store.client.stats())["store_pages"] >= 2 * 3 * 48:
                break
            await asyncio.sleep(0.05)
        hits = []
        for turn in range(6):
            nodes["c"].send(signal.SIGSTOP if turn % 2 == 0 else signal.SIGCONT)
            until_s = time.monotonic() + 0.6
            while time.monotonic() < until_s:
                hits.append(await store.read(all_keys[len(hits) % 3]))
                await asyncio.sleep(0.02)
        assert sum(hits) >= 0.9 * 48 * len(hits), hits
        assert store.slowest_s < 8 * CALL_S
