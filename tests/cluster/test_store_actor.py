"""What a store node's process does besides serving: joins the list, hands over, follows the list. No Ray."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cedar.cluster.directory_client import LocalDirectory
from cedar.cluster.store_actor import StoreActor
from cedar.cluster.store_membership import StoreMembership
from cedar.kvstore.connect import connect
from cedar.kvstore.header import seal_value

from .in_process import HOST, local_config

CONFIG = local_config("store.nodes=2", "store.lease_s=1")
KEYS = [bytes([run]) * 16 + bytes([page]) * 16 for run in range(12) for page in range(2)]


class Store:
    """Two actors, the directory that they announce themselves to, and the list of nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = LocalDirectory(expire_after_s=1)
        self.membership = StoreMembership(CONFIG, str(folder), HOST)
        self.actors: list[StoreActor] = []

    async def start(self) -> None:
        await self.membership.start()
        starting = [
            asyncio.to_thread(StoreActor, CONFIG, str(self.folder / name), i) for i, name in enumerate("ab")
        ]
        await asyncio.sleep(0.2)
        assert not self.directory.state.view().workers, "they wait for the list"
        self.directory.state.store = self.membership.target
        self.actors = await asyncio.gather(*starting)

    async def stop(self) -> None:
        for actor in self.actors:
            await asyncio.to_thread(actor.stop)
        await self.membership.stop()

    def listed(self) -> int:
        service = self.membership._service
        assert service is not None
        return len([m for m in service.membership.list.members if m.state == "active"])


@pytest_asyncio.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    made = Store(tmp_path)
    monkeypatch.setattr("cedar.cluster.store_actor.RayDirectory", lambda namespace: made.directory)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def value(key: bytes) -> bytes:
    return seal_value(bytes(1000), fingerprint=bytes(32), page_key=key, tokens=32)


async def put_all(target: str) -> None:
    client = connect(target)
    counts = await client.put_pages(KEYS, [value(key) for key in KEYS])
    assert (counts.stored, counts.refused) == (len(KEYS), 0)
    await client.close()


def pages(actor: StoreActor) -> float:
    return actor._node.ssd.stats()["store_pages"]


async def test_actors_are_announced_once_they_are_listed(store: Store) -> None:
    assert store.listed() == 2
    view = store.directory.state.view()
    assert sorted(w.address for w in view.stage("store")) == sorted(actor.ready() for actor in store.actors)
    assert view.store_target == store.membership.target


async def test_a_node_that_drains_hands_its_pages_over(store: Store) -> None:
    await put_all(store.membership.target)
    first, second = store.actors
    assert pages(first)
    assert pages(second)
    await asyncio.to_thread(first.stop, 10.0)
    assert pages(second) == len(KEYS)
    assert store.listed() == 1
    assert [w.address for w in store.directory.state.view().workers] == [second.ready()]


async def test_nodes_follow_a_list_that_moves(store: Store) -> None:
    await put_all(store.membership.target)
    before = store.membership.target, [pages(actor) for actor in store.actors]
    await store.membership.stop()
    (store.folder / "membership.port").unlink()
    store.directory.reachable = False  # it is restarted, and knows the new place then
    await store.membership.start()
    assert store.membership.target != before[0]
    store.directory.restart()
    store.directory.state.store = store.membership.target
    store.directory.reachable = True
    async with asyncio.timeout(20):
        while store.listed() < 2 or any(actor._target != store.membership.target for actor in store.actors):
            await asyncio.sleep(0.05)
        while len(store.directory.state.view().stage("store")) < 2:
            await asyncio.sleep(0.05)
    assert [pages(actor) for actor in store.actors] == before[1]
