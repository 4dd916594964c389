"""What befalls a simulated store. A part of ``Simulation``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from simulated_hosts import SERVICE, Host


class Faults:
    """Faults, and how each is undone."""

    async def _chaos(self, stop: asyncio.Event) -> None:
        end_s = self.loop.now_s + self.chaos_s
        while self.loop.now_s < end_s:
            await asyncio.sleep(self.rng.expovariate(0.7))
            self._expect_no_failures()
            for due in [entry for entry in self._undo if entry[0] <= self.loop.now_s]:
                self._undo.remove(due)
                await self._do(due[1], due[2])
            if not self.calm:
                await self._fault()
        stop.set()
        for _, name, undo in self._undo:
            await self._do(name, undo)
        self._undo.clear()
        self.network.heal()
        for number in self.isolated:
            self.network.sever(SERVICE, f"client{number}")
            self.network.sever(f"client{number}", SERVICE)

    async def _do(self, name: str, action: Callable[[], Any]) -> None:
        self.tell(name)
        done = action()
        if isinstance(done, Coroutine):
            await done

    def _later(self, within_s: float, name: str, undo: Callable[[], Any]) -> None:
        self._undo.append((self.loop.now_s + self.rng.uniform(0.2, within_s), name, undo))

    async def _fault(self) -> None:
        kinds = [
            (4, self._cut), (3, self._bad_weather), (4, self._crash), (2, self._pause), (2, self._slow_node),
            (3, self._damage), (2, self._full_disk), (1, self._step_clock), (2, self._service_dies),
            (2, self._drain), (1, self._restart_politely), (1, self._wipe), (1, self._isolate),
            (1, self._slow_disk),
        ]  # fmt: skip
        kinds = [(weight, kind) for weight, kind in kinds if not self.only or kind.__name__ in self.only]
        weights = [weight for weight, _ in kinds]
        _, fault = self.rng.choices(kinds, weights)[0]
        self.counts[fault.__name__] += 1
        await fault()

    def _host(self) -> Host | None:
        up = [host for host in self.hosts if host.up and host.process.running]
        return self.rng.choice(up) if up else None

    async def _cut(self) -> None:
        ends = [host.name for host in self.hosts] + [SERVICE] + [p.name for p in self.client_processes]
        source, target = self.rng.sample(ends, 2)
        both = self.rng.random() < 0.5
        self.tell(f"cut {source} {'<->' if both else '->'} {target}")
        pairs = [(source, target), (target, source)][: 2 if both else 1]
        for pair in pairs:
            self.network.sever(*pair)

        def mend() -> None:
            for pair in pairs:
                self.network.mend(*pair)

        self._later(12.0, f"mend {source} {target}", mend)

    async def _bad_weather(self) -> None:
        rng, weather = self.rng, self.network.weather
        weather.delay_s = rng.choice([0.002, 0.02, 0.1])
        weather.lost = rng.choice([0.0, 0.002, 0.02])
        weather.duplicated = rng.choice([0.0, 0.05, 0.3])
        weather.damaged = rng.choice([0.0, 0.01, 0.1])
        self.tell(str(weather))

    async def _crash(self) -> None:
        host = self._host()
        if host is not None:
            self.tell(f"kill {host.name}")
            host.kill()
            self._later(10.0, f"start {host.name}", host.start)

    async def _pause(self) -> None:
        host = self._host()
        if host is not None and host.process is not None:
            process = host.process
            self.tell(f"pause {host.name}")
            process.pause()

            def resume() -> None:
                if not process.killed:
                    process.resume()

            self._later(6.0, f"resume {host.name}", resume)

    async def _slow_node(self) -> None:
        host = self.rng.choice(self.hosts)
        self.network.slow[host.name] = self.rng.choice([10.0, 100.0])
        self.tell(f"slow node {host.name}")
        self._later(10.0, f"{host.name} is quick again", lambda: self.network.slow.pop(host.name, None))

    async def _slow_disk(self) -> None:
        host = self.rng.choice(self.hosts)
        host.disk.slow = self.rng.choice([20.0, 200.0])
        self.tell(f"slow disk {host.name}")
        self._later(10.0, f"{host.name}'s disk is quick again", lambda: setattr(host.disk, "slow", 1.0))

    async def _damage(self) -> None:
        host = self.rng.choice(self.hosts)
        keys = list(host.disk.pages)
        for key in self.rng.sample(keys, min(len(keys), self.rng.randint(1, 6))):
            host.disk.damage(key, self.rng.randrange(10_000))
            self.model.lost[key] = self.loop.now_s
        self.tell(f"damage pages of {host.name}")

    async def _full_disk(self) -> None:
        host = self.rng.choice(self.hosts)
        host.disk.full = True
        self.tell(f"full disk {host.name}")
        self._later(10.0, f"room on {host.name}", lambda: setattr(host.disk, "full", False))

    async def _step_clock(self) -> None:
        clock = self.rng.choice(
            [host.clock for host in self.hosts] + self.client_clocks + [self.service_clock]
        )
        clock.step_s += self.rng.choice([-86_400.0, -3600.0, -5.0, 5.0, 3600.0, 86_400.0])
        self.tell(f"step a clock to {clock.step_s}")

    async def _service_dies(self) -> None:
        if self.service is None:
            return
        forget = self.rng.random() < 0.5
        self.tell(f"kill the membership service{' and its file' if forget else ''}")
        self.kill_service()
        self._later(8.0, "start the membership service", lambda: self.start_service(forget=forget))

    async def _drain(self) -> None:
        host = self._host()
        if host is None or host.draining or sum(other.up for other in self.hosts) < 3:
            return
        host.draining = True
        self.tell(f"drain {host.name}")
        node, process = host.node, host.process
        assert node is not None
        assert process is not None

        async def drain() -> None:
            done = await node.drain(8.0)
            self.tell(f"{host.name} drained: {done}")
            await node.stop(0.1)

        process.spawn(drain())
        self._later(15.0, f"start {host.name} again", lambda: self._start_again(host))

    async def _restart_politely(self) -> None:
        host = self._host()
        if host is not None and host.node is not None and host.process is not None:
            self.tell(f"restart {host.name}")
            await asyncio.wait([host.process.spawn(host.node.stop(0.2))], timeout=15)
            await self._start_again(host)

    async def _start_again(self, host: Host) -> None:
        host.kill()
        await host.start()

    async def _wipe(self) -> None:
        """A node's disk is replaced by an empty one."""
        host = self._host()
        if host is not None:
            self.tell(f"wipe {host.name}")
            host.kill()
            for key in host.disk.pages:
                self.model.lost[key] = self.loop.now_s
            for purge in self.model.purges:
                purge.keepers.discard(host.name)
            host.disk.pages.clear()
            host.disk.texts.clear()
            self._later(5.0, f"start {host.name} with an empty disk", host.start)

    async def _isolate(self) -> None:
        """A client never hears of the membership service again: nodes must tell it of new lists."""
        if not self.isolated and self.clients[0].feed.current.members:
            number = 0
            self.isolated.add(number)
            self.tell(f"client{number} is cut from the membership service for good")
            self.network.sever(SERVICE, f"client{number}")
            self.network.sever(f"client{number}", SERVICE)
