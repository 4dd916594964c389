"""What a simulated store must keep to, at every moment and in the end. A part of ``Simulation``."""

from __future__ import annotations

import asyncio

from cedar.kvstore.members import MemberList
from cedar.kvstore.placement import run_of
from simulated_hosts import Host
from simulated_load import CALL_LIMIT_S
from store_model import (
    Purge,
    Violation,
    value,
    version_of,
)

SETTLE_S = 150.0


class Promises:
    """Raises Violation."""

    # ---- promises that hold at every moment ----

    def committed(self, host: Host, key: bytes, stored: bytes) -> None:
        """A node stores a page: it must not be one that a purge it has carried out removed."""
        if host.node is None or key not in self.model.owners:
            return
        version = version_of(key, stored)
        for purge in self._carried_out(host, key):
            if self.model.older_than(key, version, purge):
                what = f"{key.hex()[:12]} version {version}"
                self._violations.append(f"{host.name} stores a page again that it had purged: {what}")

    def _carried_out(self, host: Host, key: bytes) -> list[Purge]:
        part = getattr(host.node, "part", None)
        if part is None:
            return []
        done = part.purges.carried_out(self.model.owners[key].domain)
        return [purge for purge in self.model.purges_of(key) if purge.purge_id in done]

    def _expect_not_purged(self, key: bytes, version: int) -> None:
        """A client was given a page: not one that every node has removed."""
        for purge in self.model.purges_of(key):
            everywhere = all(purge in self._carried_out(host, key) for host in self.hosts if host.up)
            old = self.loop.now_s - purge.end_s > 5.0
            if purge.purge_id and old and everywhere and self.model.older_than(key, version, purge):
                raise Violation(f"a client was given a purged page {key.hex()[:12]}")

    def _expect_no_failures(self) -> None:
        found = self._violations + self.network.failures + self.loop.failures
        for host in self.hosts:
            part = getattr(host.node, "part", None)
            for task in part._tasks if part is not None and host.up else ():
                if task.done():
                    found.append(f"a background task of {host.name} has ended: {task!r}")
        if found:
            raise Violation("; ".join(found[:5]))

    # ---- promises that hold in the end ----

    async def quiet(self) -> None:
        """Everything heals; then the store must come to rest, and hit again."""
        self.tell("quiet")
        if self.service is None:
            await self.start_service()
        for host in self.hosts:
            host.disk.full, host.disk.slow = False, 1.0
            if host.process is not None and not host.process.running:
                host.process.resume()
            if not host.up or host.draining:
                await self._start_again(host)
        await self._settled("after the faults")
        self._expect_no_failures()
        self._expect_purges_final()
        self._expect_nothing_lost()
        self._expect_pages_on_owners()
        await self._expect_no_movement()
        await self._expect_hits()
        await self._expect_copies()
        await self._expect_lists_equal()
        await self._expect_books()

    async def _settled(self, when: str) -> None:
        deadline_s = self.loop.now_s + SETTLE_S
        while (why := self._unsettled()) and self.loop.now_s < deadline_s:
            await asyncio.sleep(0.5)
        if why:
            raise Violation(f"{when} the store does not come to rest: {why}")
        await asyncio.sleep(6.0)  # purges are exchanged now and then

    def _unsettled(self) -> str:
        assert self.service is not None
        listed = self.service.membership.list
        names = {member.node_id for member in listed.members if member.state == "active"}
        if names != {host.name for host in self.hosts}:
            return f"listed are {sorted(names)}"
        for host in self.hosts:
            assert host.node is not None
            part = host.node.part
            if part.feed.current != listed:
                return f"{host.name} has list {part.feed.current}, not {listed}"
            if not part.rebalance.settled:
                return f"{host.name} is not settled"
            if part.replication.waiting:
                return f"{host.name} has copies waiting"
        return ""

    def _members(self) -> MemberList:
        assert self.service is not None
        return self.service.membership.list

    def _owner(self, key: bytes) -> Host:
        owner = self._members().owner(run_of(key))
        assert owner is not None
        return next(host for host in self.hosts if host.name == owner.node_id)

    def _intact(self, host: Host, key: bytes) -> bool:
        page = host.disk.pages.get(key)
        return page is not None and version_of_or_none(key, page.value) >= 0

    def _expect_purges_final(self) -> None:
        for host in self.hosts:
            for key, page in host.disk.pages.items():
                version = version_of_or_none(key, page.value)
                if version < 0:
                    continue
                for purge in self.model.purges_of(key):
                    if purge.purge_id and purge.keepers and self.model.older_than(key, version, purge):
                        raise Violation(
                            f"{host.name} holds {key.hex()[:12]} version {version} of tenant "
                            f"{purge.tenant.name}, purged at {purge.start_s - 1000:.3f} s"
                        )

    def _expect_nothing_lost(self) -> None:
        for key in self.model.writes:
            if self.model.must_exist(key) and not any(self._intact(host, key) for host in self.hosts):
                raise Violation(f"{key.hex()[:12]} was acknowledged and is nowhere")

    def _expect_pages_on_owners(self) -> None:
        for host in self.hosts:
            for key in host.disk.pages:
                owner = self._owner(key)
                if self._intact(host, key) and key not in owner.disk.pages and key not in self.model.lost:
                    raise Violation(f"{key.hex()[:12]} is on {host.name} and not on its owner {owner.name}")

    def _movement(self) -> float:
        names = ("store_pages_moved_in", "store_pages_copied_out", "store_pages_sent_to_peers")
        return sum(host.node.counters[name] for host in self.hosts for name in names if host.node is not None)

    async def _expect_no_movement(self) -> None:
        before = self._movement()
        await asyncio.sleep(15.0)
        if self._movement() != before:
            raise Violation(f"{self._movement() - before} pages moved though nothing happened")

    async def _expect_hits(self) -> None:
        """Every chain is hit as far as its pages are on their owners."""
        for number in range(len(self.clients)):
            for tenant in self.model.tenants:
                for chain in tenant.chains:
                    there = [self._intact(self._owner(key), key) for key in chain]
                    expected = there.index(False) if False in there else len(chain)
                    match = await self.clients[number].match(tenant.root, chain, tenant=tenant.domain)
                    read = await self.read(number, chain)
                    if match.pages < expected or read < expected:
                        raise Violation(
                            f"client{number}, {tenant.name}: {expected} of {len(chain)} pages are on their "
                            f"owners, matched {match.pages}, read {read}"
                        )

    async def _expect_copies(self) -> None:
        """What is read often now is on two nodes a little later."""
        tenant = self.model.tenants[0]
        chain = tenant.chains[0]
        for _ in range(6):
            await self.put(0, tenant, chain, await self.read(0, chain))
        deadline_s = self.loop.now_s + 20
        while self.loop.now_s < deadline_s:
            await asyncio.sleep(0.5)
            lacking = [
                key
                for key in chain
                if key not in self.model.lost
                for member in self._members().holders(run_of(key))[:2]
                if not any(host.name == member.node_id and self._intact(host, key) for host in self.hosts)
            ]
            if not lacking:
                return
        raise Violation(f"{len(lacking)} places of hot pages are empty")

    async def _expect_lists_equal(self) -> None:
        for number, client in enumerate(self.clients):
            if client.feed.current != self._members():
                raise Violation(f"client{number} has list {client.feed.current}, not {self._members()}")

    async def _expect_books(self) -> None:
        await asyncio.sleep(1.0)
        for host in self.hosts:
            node = host.node
            assert node is not None
            node.ssd.check_integrity()
            node.windows.check_integrity()
            if node.windows.promised_bytes:
                raise Violation(f"{host.name} has promised room to window records that never came")
            service = node.service
            for calls in (service._matches, service._reads, service._writes, service._window_calls):
                if calls.in_flight:
                    raise Violation(f"{host.name}: {calls.in_flight} {calls._kind} calls in flight")
            if node.part.read_through._keeping or node.part.read_through._tasks:
                raise Violation(f"{host.name}: pages that were read through are still being kept")
        old = [
            call.path
            for call in self.network.calls.values()
            if call.began_s < self.loop.now_s - CALL_LIMIT_S and not call.path.endswith("/Watch")
        ]
        if old:
            raise Violation(f"calls that never end: {old}")


def version_of_or_none(key: bytes, stored: bytes) -> int:
    """The version of a value, -1 when it is damaged."""
    try:
        version = version_of(key, stored)
    except Violation:
        return -1
    return version if stored == value(key, version) else -1
