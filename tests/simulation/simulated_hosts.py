"""A machine with a store node: its disk and clock stay, its process comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.environment import Environment
from cedar.kvstore.node import StoreNode
from memory_pages import Disk, DiskText, InlineReaders, MemoryPages
from simulated_network import SimulatedTransport

if TYPE_CHECKING:
    from simulated_cluster import Simulation
from virtual_loop import Process, VirtualLoop

EPOCH_S = 1_800_000_000.0
SERVICE = "members"


class HostClock:
    """The clock of one host: its wall can be stepped."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.step_s = 0.0

    def wall_s(self) -> float:
        return EPOCH_S + self._loop.now_s + self.step_s

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def boot_id(self) -> str:
        return "simulated"


class Host:
    """A machine with a store node: its disk and clock stay, its process comes and goes."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.clock = HostClock(simulation.loop)
        self.disk = Disk()
        self.disk.on_commit = lambda key, stored: simulation.committed(self, key, stored)
        self.process: Process | None = None
        self.node: StoreNode | None = None
        self.starts = 0
        self.draining = False

    @property
    def up(self) -> bool:
        return self.node is not None and self.node.running and self.process is not None

    async def start(self) -> None:
        """Start a process with what is on the disk, unless one runs."""
        if self.up:
            return
        self.kill()
        simulation, self.starts = self.simulation, self.starts + 1
        loop, rng = simulation.loop, simulation.random(f"{self.name} {self.starts}")
        self.draining = False

        def later(function: Callable[[], None]) -> None:
            loop.call_later(self.disk.slow * rng.uniform(0.0001, 0.004), function)

        def open_pages(config: SsdConfig, clock: Any, counters: Any) -> MemoryPages:
            return MemoryPages(config, clock, counters, self.disk, later, cold=lambda: rng.random() < 0.3)

        self.process = process = simulation.process(self.name)
        environment = Environment(
            clock=self.clock,
            transport=SimulatedTransport(simulation.network, self.name, process),
            open_pages=open_pages,
            readers=lambda count: InlineReaders(later),
            state_file=lambda path: DiskText(self.disk, path.name),
            rng=rng,
        )
        node = StoreNode(
            NodeConfig(
                ssd=SsdConfig(directory=Path("/simulated") / self.name, queue_bytes=16_000),
                window=WindowConfig(budget_bytes=1 << 20),
                host=self.name,
                port=1,
                max_reads=16,
                put_wait_s=0.5,
            ),
            peers=PeerConfig(
                node_id=self.name,
                membership=f"{SERVICE}:1",
                move_bytes_per_s=100_000,
                copy_bytes_per_s=100_000,
                retry_s=0.5,
                purge_sync_s=5.0,
            ),
            environment=environment,
        )
        self.node = node
        await asyncio.wait([process.spawn(node.start())], timeout=10)

    def kill(self) -> None:
        """The process is gone in the middle of everything."""
        if self.process is not None:
            self.process.kill()
        self.node = self.process = None
        self.simulation.network.drop(self.name)
