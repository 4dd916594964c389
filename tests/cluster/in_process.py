"""One cluster in one process, without Ray: real workers, real gRPC, a real store, the real gateway."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.actors.decode_worker import DecodeWorker
from cedar.actors.encoder_worker import EncoderWorker
from cedar.actors.prefill_worker import PrefillWorker
from cedar.cluster.announcer import Announcer
from cedar.cluster.client import GenerationClient
from cedar.cluster.config import ClusterConfig
from cedar.cluster.config_load import load_config
from cedar.cluster.deployments import describe
from cedar.cluster.directory import Worker
from cedar.cluster.directory_client import LocalDirectory
from cedar.cluster.gateway import Gateway
from cedar.cluster.store_membership import StoreMembership
from cedar.cluster.tenants import Tenants
from cedar.cluster.worker_configs import (
    decode_config,
    encoder_config,
    peer_config,
    prefill_config,
    store_config,
)
from cedar.kvstore.node import StoreNode
from cedar.model import load_network
from cedar.model.network import Network
from cedar.v1 import generation_pb2 as pb

from .golden_preset import GOLDEN, GOLDEN_SETTINGS, PAGE_TOKENS

IMAGE = (GOLDEN / "image.png").read_bytes()
HOST = "127.0.0.1"


def local_config(*overrides: str) -> ClusterConfig:
    """The local preset with the golden checkpoint, on a free port, with short waits."""
    short = (
        "gateway.port=0",
        "directory.heartbeat_s=0.1",
        "directory.expire_after_s=1",
        "directory.poll_s=0.05",
    )
    return load_config("local-cpu", [*GOLDEN_SETTINGS, *short, *overrides])


@functools.cache
def network(path: str = str(GOLDEN), page_tokens: int = PAGE_TOKENS, drafting: bool = False) -> Network:
    """The workers of all stacks share one: its weights are read only."""
    return load_network(path, page_tokens=page_tokens, drafting=drafting)


class Stack:
    """Everything that runs; tests break parts of it."""

    def __init__(self, config: ClusterConfig, store_directory: Path) -> None:
        self.config = config
        self.directory = LocalDirectory(config.directory.expire_after_s)
        assert config.model.page_tokens is not None
        self.network = network(config.model.path, config.model.page_tokens, config.decode.drafting)
        self.encoder = EncoderWorker(encoder_config(config, HOST), network=self.network)
        self.prefills = [PrefillWorker(prefill_config(config, HOST), network=self.network)]
        self.decode = [DecodeWorker(decode_config(config, HOST), network=self.network) for _ in range(2)]
        self.membership = StoreMembership(config, str(store_directory), HOST)
        self._store_directory = store_directory
        self.stores: list[StoreNode] = []
        self.gateway = Gateway(config, self.directory, Tenants(b"t" * 32, keys={"key-a": "a", "key-b": "b"}))
        self.announcers: dict[str, Announcer] = {}
        self.address = ""

    @property
    def workers(self) -> list[Any]:
        return [self.encoder, *self.prefills, *self.decode]

    async def start(self) -> None:
        if self.config.store.nodes > 1:
            await self.membership.start()
            self.directory.state.store = self.membership.target
        for index in range(self.config.store.nodes):
            self.stores.append(await self.start_store(index))
        await self.stores_listed()
        for worker in self.workers:
            await self.start_worker(worker)
        self.address = await self.gateway.start()

    async def start_store(self, index: int) -> StoreNode:
        folder = str(self._store_directory / f"node-{index}")
        node = StoreNode(
            store_config(self.config, folder, HOST, index=index),
            peers=peer_config(self.config, self.membership.target),
        )
        await node.start()
        await self.announce(lambda: Worker(stage="store", address=node.address, incarnation=1), None)
        return node

    async def stores_listed(self) -> None:
        """Every node knows every other."""
        if self.config.store.nodes > 1:
            while any(len(node.part.feed.current.members) < len(self.stores) for node in self.stores):
                await asyncio.sleep(0.01)

    @property
    def store(self) -> StoreNode:
        """The only one."""
        (node,) = self.stores
        return node

    async def kill_store(self, index: int) -> None:
        """No goodbye to anyone, and the port is dead."""
        node = self.stores.pop(index)
        announcer = self.announcers.pop(node.address)
        task, announcer._task = announcer._task, None
        assert task is not None
        task.cancel()
        agent = node.part._agent
        if agent is not None and agent._task is not None:  # it says goodbye only while its task lives
            agent._task.cancel()
            await asyncio.wait([agent._task])
            agent._task = None
            await agent._channel.close(None)
        await node.stop(grace_s=0)

    async def start_worker(self, worker: Any) -> None:
        await worker.start()
        moved = worker.set_store if worker.stage != "encoder" else None
        await self.announce(lambda: describe(worker.status(), worker.address), moved)

    async def add_prefill(self) -> None:
        self.prefills.append(PrefillWorker(prefill_config(self.config, HOST), network=self.network))
        await self.start_worker(self.prefills[-1])
        while len(self.gateway.fleet.view.stage("prefill")) < len(self.prefills):
            await asyncio.sleep(0.01)

    async def announce(self, record: Any, moved: Any) -> None:
        announcer = Announcer(self.directory, record, self.config.directory.heartbeat_s, moved)
        await announcer.announce()
        announcer.start()
        self.announcers[record().address] = announcer

    async def kill(self, worker: Any) -> None:
        """As a crash looks from outside: no goodbye, and the port is dead."""
        announcer = self.announcers.pop(worker.address)
        task, announcer._task = announcer._task, None
        assert task is not None
        task.cancel()
        await worker.stop(drain_s=0)

    def decoding(self) -> Any:
        """The Decode worker that has the one request."""
        (busy,) = [worker for worker in self.decode if worker.status().active]
        return busy

    async def kill_decoding(self) -> None:
        worker = self.decoding()
        await self.kill(worker)
        self.decode.remove(worker)

    def forget_features(self) -> int:
        """As if every image's features had expired. How many there were."""
        features = self.encoder.features
        count = len(features)
        for content_hash in list(features._entries):
            features._drop(content_hash)
        return count

    async def stop(self) -> None:
        await self.gateway.stop(drain_s=0)
        for announcer in self.announcers.values():
            await announcer.stop()
        for worker in self.workers:
            await worker.stop(drain_s=0)
        for node in self.stores:
            await node.stop(grace_s=0)
        await self.membership.stop()

    def check_idle(self) -> None:
        """Nothing is held anywhere."""
        for worker in self.workers:
            worker.assert_idle()
        service = self.gateway.service
        assert len(service.active) == 0
        service.admission.check_integrity()
        assert service.admission.active == 0
        assert not self.gateway.fleet.in_flight
        assert not +service.waiting


@asynccontextmanager
async def running(config: ClusterConfig, store_directory: Path) -> AsyncIterator[Stack]:
    stack = Stack(config, store_directory)
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()


async def idle(stack: Stack, within_s: float = 5.0) -> None:
    """Wait until nothing is held anywhere; fails with the books of whoever still holds something."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            stack.check_idle()
            return
        except Exception:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.02)


async def collect(client: GenerationClient, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in client.generate(request)]


def tokens_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    return [r.delta.token.id for r in responses if r.HasField("delta") and r.delta.HasField("token")]


def text_of(responses: Sequence[pb.GenerateResponse]) -> str:
    return "".join(r.delta.text for r in responses if r.HasField("delta"))


def finished_of(responses: Sequence[pb.GenerateResponse]) -> pb.Finished:
    ends = [r.finished for r in responses if r.HasField("finished")]
    assert len(ends) == 1
    assert responses[-1].HasField("finished")
    return ends[0]


def status_of(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[str, str]:
    return error.value.code().name, error.value.details() or ""
