"""Several store nodes: inside the test, on loopback ports, or as processes that can be stopped and killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import ClusterClientConfig, PeerConfig
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.header import HEADER_BYTES
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import Member, MemberList
from cedar.kvstore.node import StoreNode

TENANT = b"tenant"


async def until(holds: Callable[[], Any], *, within_s: float = 15.0) -> None:
    """Wait for something to become true."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.02)


class Fleet:
    """Nodes in this process; the member list is published by hand."""

    def __init__(self, directory: Path, chains: Any) -> None:
        self.directory = directory
        self.chains = chains
        self.nodes: dict[str, StoreNode] = {}
        self.list = MemberList(0)
        self.clients: list[ClusterClient] = []

    async def add(self, name: str, *, listed: bool = True, weight: float = 1.0, **changes: Any) -> StoreNode:
        """Start a node (again, with the data it had) and list it."""
        ssd = {
            "directory": self.directory / name,
            "capacity_bytes": 256 * MIB,
            "reserve_bytes": MIB,
            "commit_wait_s": 0.001,
        } | changes.pop("ssd", {})
        window = {"budget_bytes": 8 * MIB} | changes.pop("window", {})
        node_keys = NodeConfig.__dataclass_fields__.keys()
        node = {key: changes.pop(key) for key in list(changes) if key in node_keys}
        peers = {"retry_s": 0.1, "node_id": name, "weight": weight} | changes
        feed = MemberFeed(self.list)
        store = StoreNode(
            NodeConfig(ssd=SsdConfig(**ssd), window=WindowConfig(**window), **node),
            peers=PeerConfig(**peers),
            feed=feed,
        )
        await store.start()
        self.nodes[name] = store
        if listed:
            epoch = self.list.epoch + 1
            self.publish(
                self.list.with_member(Member(name, store.address, epoch, weight, joined_epoch=epoch))
            )
        return store

    def publish(self, members: MemberList, *, to_clients: bool = True) -> None:
        self.list = members
        for node in self.nodes.values():
            node.part.feed.publish(members)
        for client in self.clients if to_clients else []:
            client.feed.publish(members)

    async def remove(self, name: str) -> None:
        """Stop a node and take it off the list."""
        await self.nodes.pop(name).stop(0.1)
        self.publish(self.list.without([name]))

    def client(self, members: MemberList | None = None, **changes: Any) -> ClusterClient:
        patient = ClientConfig(match_timeout_s=2.0, stall_timeout_s=2.0)
        config = {"node": patient, "hedge_least_s": 1.0, "hedge_most_s": 1.0} | changes
        client = ClusterClient(
            MemberFeed(members or self.list),
            fingerprint=self.chains.fingerprint,
            config=ClusterClientConfig(**config),
            rng=random.Random(1),
        )
        self.clients.append(client)
        return client

    async def put(self, client: ClusterClient, keys: list[bytes], *, size: int = 3392) -> None:
        values = [self.chains.value(key, size) for key in keys]
        counts = await client.put_pages(keys, values, tenant=TENANT)
        assert counts.stored + counts.present == len(keys), counts

    async def read(self, client: ClusterClient, keys: list[bytes], *, size: int = 3392) -> int:
        """How many leading pages come; each is what was put under its key, in order."""
        count = 0
        async with aclosing(client.get_pages(keys)) as pages:
            async for index, value in pages:
                assert index == count
                assert bytes(value[HEADER_BYTES:]) == self.chains.payload(keys[index], size)
                count += 1
        return count

    async def settle(self) -> None:
        await until(lambda: all(node.part.rebalance.settled for node in self.nodes.values()))

    def owner(self, key: bytes) -> StoreNode:
        owner = self.list.owner(key[:4])
        assert owner is not None
        return self.nodes[owner.node_id]

    def second(self, key: bytes) -> StoreNode:
        return self.nodes[self.list.holders(key[:4])[1].node_id]

    def held_by(self, keys: list[bytes]) -> dict[str, int]:
        return {name: sum(node.ssd.held(keys)) for name, node in self.nodes.items()}

    def total(self, counter: str) -> float:
        return sum(node.counters[counter] for node in self.nodes.values())

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for node in self.nodes.values():
            node.ssd.check_integrity()
            node.windows.check_integrity()
            await node.stop(0.1)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture
async def fleet(tmp_path: Path, chains: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, chains)
    yield fleet
    await fleet.close()


@dataclass
class Process:
    """A program of the store, started as users start it."""

    process: subprocess.Popen[str]
    started: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return str(self.started["address"])

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Programs:
    """Starts programs; the fixture ends all of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: list[Process] = []

    def launch(self, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        return self._start([*prefix, sys.executable, "-m", *arguments])

    def script(self, path: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        return self._start([*prefix, sys.executable, str(path), *arguments])

    def _start(self, command: list[str]) -> Process:
        log = (self.directory / "log").open("a")
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
        )
        log.close()
        program = Process(process)
        self.running.append(program)
        return program

    async def ready(self, *programs: Process) -> None:
        for program in programs:
            assert program.process.stdout is not None
            line = await asyncio.to_thread(program.process.stdout.readline)
            assert line, (self.directory / "log").read_text()[-2000:]
            program.started = json.loads(line)

    def service(self, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        return self.launch("cedar.kvstore.membership_service", "--lease-s", "1.2", *arguments, prefix=prefix)

    def node(self, name: str, service: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        return self.launch(
            "cedar.kvstore.node", "--directory", str(self.directory / name), "--node-id", name,
            "--capacity-gib", "0.25", "--reserve-mib", "1", "--window-mib", "8", "--grace-s", "0.3",
            "--membership", service,
            *arguments, prefix=prefix,
        )  # fmt: skip


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path)
    yield programs
    for program in reversed(programs.running):  # nodes before the service that they say goodbye to
        program.stop()
