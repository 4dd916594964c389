"""What the clients of a simulation do, each answer checked. A part of ``Simulation``."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

from cedar.kvstore.placement import run_of
from simulated_hosts import Host
from store_model import (
    GHOST_S,
    PAGE_TOKENS,
    Purge,
    Tenant,
    Violation,
    value,
)

CALL_LIMIT_S = 40.0
"""No call of a client takes longer, whatever happens: attempts x levels x time-outs."""

SOON_S = 0.02
"""A network as slow as this in one direction is no fault: calls wait for many times as long."""


class Load:
    """Requests of clients and purges of operators."""

    async def _load(self, number: int, stop: asyncio.Event) -> None:
        rng = self.random(f"load {number}")
        while not stop.is_set():
            await asyncio.sleep(rng.expovariate(4.0))
            tenant = rng.choice(self.model.tenants)
            if rng.random() < self.purge_chance and not self.calm:
                await self.purge(number, tenant)
            else:
                await self.request(number, tenant, rng.choice(tenant.chains), rng)

    async def request(self, number: int, tenant: Tenant, chain: list[bytes], rng: random.Random) -> int:
        """What a worker does with a prompt: look up, read what is there, put what was not; pages read."""
        client = self.clients[number]
        keys = chain[: rng.randint(1, len(chain))]
        began_s = self.loop.now_s
        reached = self._in_reach(number, keys)
        there = [self._intact(self._owner_for(number, key), key) for key in keys[:reached]]
        self.counts["pages_in_reach"] += reached
        self.counts["hits_in_reach"] += there.index(False) if False in there else reached
        match = await client.match(tenant.root, keys, tenant=tenant.domain)
        self._ended("match", began_s)
        if not 0 <= match.pages <= len(keys):
            raise Violation(f"match says {match.pages} of {len(keys)} pages")
        read = await self.read(number, keys[: match.pages])
        for name in match.windows[:1]:
            record = await client.get_window(name.page_key, name.tokens, name.digest, tenant=tenant.domain)
            if record is not None:
                self._check_window(tenant, name.page_key, record)
        self.counts["pages_asked"] += len(keys)
        self.counts["pages_read"] += read
        kept = await self.put(number, tenant, keys, read)
        self.counts["pages_served"] += read + kept
        if rng.random() < 0.3:
            record = keys[-1] + tenant.version.to_bytes(4, "big") + b"window"
            tokens = len(keys) * PAGE_TOKENS
            await client.put_window(keys[-1], tokens, b"d" * 32, record, tenant=tenant.domain)
        return read

    def _in_reach(self, number: int, keys: list[bytes]) -> int:
        """How many leading pages no fault stands before: their owners, by the client's list, answer."""
        network, client = self.network, f"client{number}"
        if network.weather.lost or network.weather.damaged or network.weather.delay_s > SOON_S:
            return 0
        for count, key in enumerate(keys):
            host = self._owner_for(number, key)
            if host is None or not host.up or not host.process.running:
                return count
            if host.name in network.slow or host.disk.slow > 1 or host.disk.full or host.draining:
                return count
            if (client, host.name) in network.cut or (host.name, client) in network.cut:
                return count
        return len(keys)

    def _owner_for(self, number: int, key: bytes) -> Host | None:
        """The owner of a page by the list that this client has."""
        owner = self.clients[number].feed.current.owner(run_of(key))
        return next((host for host in self.hosts if owner is not None and host.name == owner.node_id), None)

    async def read(self, number: int, keys: list[bytes]) -> int:
        """Leading pages that come, each checked."""
        count = 0
        began_s = self.loop.now_s
        async with aclosing(self.clients[number].get_pages(keys)) as pages:
            async for index, stored in pages:
                if index != count:
                    raise Violation(f"page {index} came in the place of {count}")
                version = self.model.check_read(keys[index], stored)
                self._expect_not_purged(keys[index], version)
                count += 1
        self._ended("get_pages", began_s)
        return count

    async def put(self, number: int, tenant: Tenant, keys: list[bytes], start: int) -> int:
        """Put the pages from ``start`` on; how many are kept."""
        if start == len(keys):
            return 0
        began_s, version = self.loop.now_s, tenant.version
        wanted = keys[start:]
        writes = [self.model.write(key, version, began_s) for key in wanted]
        values = [value(key, version) for key in wanted]
        counts = await self.clients[number].put_pages(wanted, values, first_page=start, tenant=tenant.domain)
        self._ended("put_pages", began_s)
        kept = counts.stored + counts.present + counts.conflicts
        if kept + counts.refused != len(wanted):
            raise Violation(f"{len(wanted)} pages put, answered {counts}")
        for write in writes:
            write.acknowledged = not counts.refused
            # Refused as a whole or in part: some of it, or a ghost of it, may be stored yet.
            write.end_s = self.loop.now_s + (GHOST_S if counts.refused else 3.5)
        self.counts["pages_put"] += kept
        self.counts["pages_refused"] += counts.refused
        return int(kept)

    async def purge(self, number: int, tenant: Tenant) -> None:
        """Order a purge; pages written from now on are of the next version."""
        if tenant.purging:
            return
        tenant.purging = True
        tenant.version += 1
        known = {name for host in self.hosts if host.up for name in host.node.part.purges.of(tenant.domain)}
        purge = Purge(tenant, self.loop.now_s)
        self.model.purges.append(purge)
        client = self.clients[number]
        asked = {member.node_id for member in client.feed.current.members}
        report = await client.purge(tenant.domain)
        purge.end_s = self.loop.now_s
        purge.keepers = asked - set(report.unreachable)
        names = {name for host in self.hosts if host.up for name in host.node.part.purges.of(tenant.domain)}
        fresh = names - known - {other.purge_id for other in self.model.purges}
        purge.purge_id = fresh.pop() if len(fresh) == 1 else 0
        self.tell(f"client{number} purged {tenant.name}: {report}")
        self.counts["purges"] += 1
        tenant.purging = False

    def _ended(self, what: str, began_s: float) -> None:
        if self.loop.now_s - began_s > CALL_LIMIT_S:
            raise Violation(f"{what} took {self.loop.now_s - began_s:.1f} s")

    def _check_window(self, tenant: Tenant, page_key: bytes, record: bytes) -> None:
        if record[:32] != page_key or record[36:] != b"window":
            raise Violation("a window record of another place")
