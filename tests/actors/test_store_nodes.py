"""Workers on a store of two nodes, however it is named: hits from both, and a node that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.connect import Store, connect
from cedar.kvstore.members import Member, MemberList, to_json
from cedar.kvstore.membership_service import MembershipService
from cedar.kvstore.node import StoreNode

IDS = 300  # nine pages: three runs


class Nodes:
    """Two store nodes. ``target``: their name, as ``kind`` has it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._service = MembershipService()
        self.all: list[StoreNode] = []
        self.target = ""

    async def start(self) -> None:
        membership = await self._service.start()
        for name in ("a", "b"):
            ssd = SsdConfig(directory=self._folder / name, capacity_bytes=64 << 20)
            config = NodeConfig(ssd=ssd, window=WindowConfig(budget_bytes=16 << 20))
            alone = self._kind == "addresses"
            peers = PeerConfig(node_id=name, membership="" if alone else membership)
            self.all.append(StoreNode(config, peers=peers))
            await self.all[-1].start()
        while self._kind != "addresses" and any(len(n.part.feed.current.members) < 2 for n in self.all):
            await asyncio.sleep(0.01)
        members = tuple(Member(name, n.address) for name, n in zip("ab", self.all, strict=True))
        (self._folder / "members.json").write_text(to_json(MemberList(2, members)))
        self.target = {
            "addresses": ",".join(node.address for node in self.all),
            "membership": f"membership://{membership}",
            "file": f"file://{self._folder / 'members.json'}",
        }[self._kind]

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop(0) for node in self.all))
        await self._service.stop()

    def pages(self) -> list[float]:
        return [node.ssd.stats()["store_pages"] for node in self.all]


@asynccontextmanager
async def nodes(folder: Path, kind: str = "membership") -> AsyncIterator[Nodes]:
    made = Nodes(folder, kind)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def offer(cluster: Any, store: Store, ids: list[int]) -> dict[str, Any]:
    cluster.client = store
    found = await cluster.offer(ids)
    cluster.client = None
    return dict(found)


async def fill(cluster: Any, both: Nodes, prompt: Any) -> tuple[list[int], Any]:
    """A prompt with pages on both nodes, and its answer; where pages go differs, so a few are tried."""
    for seed in range(40, 48):
        before = both.pages()
        reply = await cluster.generate(cluster.request(prompt(seed, IDS), 4))
        assert reply.done.traffic.pages_stored == IDS // 32
        if all(now > was for now, was in zip(both.pages(), before, strict=True)):
            return prompt(seed, IDS), reply
    raise AssertionError("all runs of all prompts are on one node")


@pytest.mark.parametrize("kind", ["addresses", "membership", "file"])
async def test_a_second_turn_is_read_from_both_nodes(
    rig: Any, prompt: Any, tmp_path: Path, kind: str
) -> None:
    async with nodes(tmp_path, kind) as both, rig() as cluster:
        for worker in (cluster.prefill, cluster.decode):
            worker.set_store(both.target)
        ids, first = await fill(cluster, both, prompt)
        assert first.end.state_stored
        store = connect(both.target)
        longer = [*ids, *first.ids, *prompt(50, 9)]
        found = await offer(cluster, store, longer)
        await store.close()
        assert (found["hit_pages"], found["window"].tokens) == (9, IDS + 3)
        cluster.prefill.parts.engine.pages.drop_cached()
        read = [node.counters["store_pages_read"] for node in both.all]
        reply = await cluster.generate(cluster.request(longer, 3, **found))
        assert reply.sources.state_restored
        assert reply.sources.hit_store_tokens == 288
        assert all(n.counters["store_pages_read"] > was for n, was in zip(both.all, read, strict=True))


async def test_a_dead_node_is_a_shorter_hit(rig: Any, single: Any, prompt: Any, tmp_path: Path) -> None:
    async with nodes(tmp_path) as both, rig() as cluster:
        for worker in (cluster.prefill, cluster.decode):
            worker.set_store(both.target)
        ids, first = await fill(cluster, both, prompt)
        assert first.ids == single.cold(ids, 4)
        longer = [*ids, *prompt(50, 9)]
        await both.all[0].stop(0)
        cluster.prefill.parts.engine.pages.drop_cached()
        reply = await cluster.generate(cluster.request(longer, 4, hit_pages=9))
        hit = reply.sources.hit_store_tokens // 32
        assert hit < 9
        assert reply.ids == (single.replayed(longer, hit, 4) if hit else single.cold(longer, 4))


async def test_a_purge_removes_window_records_too(rig: Any, prompt: Any, tmp_path: Path) -> None:
    """Workers say whose a record is."""
    async with nodes(tmp_path) as both, rig() as cluster:
        cluster.decode.set_store(both.target)
        await cluster.generate(cluster.request(prompt(20, 75), 4))
        store = connect(both.target)
        assert isinstance(store, ClusterClient)
        report = await store.purge(cluster.tenant)
        await store.close()
        assert (report.windows, report.unreachable) == (1, ())
