"""A whole store in one thread of virtual time: nodes, clients, the membership service, and what befalls them.

``Simulation(seed).run()`` is one history: some time of load and faults (*chaos*), then everything is healed
(*quiet*) and has ``SETTLE_S`` to come to rest. What may never happen raises ``Violation`` at once; what must
be true in the end is checked by ``quiet``. Everything random comes from the seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import ClusterClientConfig
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.member_feed import ServiceFeed
from cedar.kvstore.membership import MembershipConfig
from cedar.kvstore.membership_service import MembershipService
from memory_pages import Disk, DiskText
from simulated_faults import Faults
from simulated_hosts import SERVICE, Host, HostClock
from simulated_load import Load
from simulated_network import Network, SimulatedTransport
from store_model import (
    FINGERPRINT,
    Model,
    Violation,
    make_tenant,
)
from store_promises import Promises
from virtual_loop import Deadlock, Process, VirtualLoop

LEASE_S = 3.0
NODE_CLIENT = ClientConfig(put_timeout_s=3.0)
MEMBERSHIP = MembershipConfig(lease_s=LEASE_S, flap_joins=4, flap_window_s=30.0, hold_s=10.0, copies=2)


class Simulation(Load, Faults, Promises):
    """``chaos_s``: how long the faults last. ``only``: kinds of faults, empty: all. ``calm``: none at all.

    ``purges``: the part of the load's operations that are purges.
    """

    def __init__(
        self,
        seed: int,
        *,
        chaos_s: float = 25.0,
        calm: bool = False,
        only: Sequence[str] = (),
        purges: float = 0.02,
    ) -> None:
        self.seed = seed
        self.only = only
        self.purge_chance = purges
        self.chaos_s = chaos_s
        self.calm = calm
        self.loop = VirtualLoop()
        self.rng = self.random("schedule")
        self.network = Network(self.loop, self.random("network"))
        self.processes: list[Process] = []
        self.hosts = [Host(self, name) for name in "abcde"[: self.rng.randint(3, 5)]]
        tenants = [
            make_tenant("one", [(0, 24), (6, 20), (17, 40)]),
            make_tenant("two", [(0, 9), (3, 30)]),
            make_tenant("three", [(0, 3), (0, 18)]),
        ]
        self.model = Model(tenants)
        self.clients: list[ClusterClient] = []
        self.isolated: set[int] = set()  # clients that hear nothing of the membership service any more
        self.service: MembershipService | None = None
        self.service_process: Process | None = None
        self.service_clock = HostClock(self.loop)
        self.service_disk = Disk()
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self._undo: list[tuple[float, str, Callable[[], Any]]] = []
        self._violations: list[str] = []

    # ---- running ----

    def run(self) -> Simulation:
        """The whole history. Violation, with the seed and what happened, when a promise is broken."""
        return self.play(self._faults_and_load)

    def play(self, script: Callable[[], Coroutine[Any, Any, None]]) -> Simulation:
        """A history that someone wrote: what ``script`` does, between a start and ``quiet``."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._history(script))
            self._expect_no_failures()
        except (Violation, Deadlock) as error:
            told = "\n".join(self.story[-60:])
            raise Violation(f"seed {self.seed} at {self.loop.now_s - 1000:.3f} s: {error}\n{told}") from error
        finally:
            self._close()
        return self

    def random(self, what: str) -> random.Random:
        """A stream of random numbers of its own."""
        return random.Random(f"{self.seed} {what}")

    def process(self, name: str) -> Process:
        process = Process(self.loop, name)
        self.processes.append(process)
        return process

    def tell(self, what: str) -> None:
        self.story.append(f"{self.loop.now_s - 1000:9.3f}  {what}")

    async def _history(self, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
        keeping = self.loop.create_task(self.network.keep_alive())
        await self.start_service()
        for host in self.hosts:
            await host.start()
        self.clients = [self._client(number) for number in range(self.rng.randint(2, 3))]
        await self._settled("at the start")
        await script()
        await self.quiet()
        keeping.cancel()

    async def _faults_and_load(self) -> None:
        stop = asyncio.Event()
        load = [
            self.client_processes[number].spawn(self._load(number, stop))
            for number in range(len(self.clients))
        ]
        await self._chaos(stop)
        await asyncio.wait(load)
        for task in load:
            task.result()
        await asyncio.sleep(5.0)  # calls that arrive a second time

    def _client(self, number: int) -> ClusterClient:
        if number == 0:
            self.client_processes: list[Process] = []
            self.client_clocks: list[HostClock] = []
        process = self.process(f"client{number}")
        clock = HostClock(self.loop)
        self.client_processes.append(process)
        self.client_clocks.append(clock)
        transport = SimulatedTransport(self.network, process.name, process)
        made: list[ClusterClient] = []

        async def make() -> None:
            made.append(
                ClusterClient(
                    ServiceFeed(f"{SERVICE}:1", transport=transport),
                    fingerprint=FINGERPRINT,
                    config=ClusterClientConfig(node=NODE_CLIENT, purge_timeout_s=5.0),
                    transport=transport,
                    clock=clock,
                    rng=self.random(process.name),
                )
            )

        with suppress(StopIteration):
            make().send(None)
        return made[0]

    async def start_service(self, *, forget: bool = False) -> None:
        if forget:
            self.service_disk.texts.clear()
        self.service_process = process = self.process(SERVICE)
        self.service = service = MembershipService(
            MEMBERSHIP,
            host=SERVICE,
            port=1,
            state_file=DiskText(self.service_disk, "members.json"),
            clock=self.service_clock,
            transport=SimulatedTransport(self.network, SERVICE, process),
            rng=self.random(f"membership {len(self.processes)}"),
        )
        await process.spawn(service.start())

    def kill_service(self) -> None:
        if self.service_process is not None:
            self.service_process.kill()
        self.service = self.service_process = None
        self.network.drop(SERVICE)

    def _close(self) -> None:
        """Let everything that was stopped in the middle of something come to its end, unheard."""
        self.network.closed = True
        self.loop.steps = 0
        for host in self.hosts:
            host.disk.on_commit = lambda key, stored: None
        for process in self.processes:
            process.resume()
        for _ in range(5):
            tasks = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
            if not tasks:
                break
            for task in sorted(tasks, key=hash):
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=30))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        self.loop.close()
