"""The store of several nodes as its users see it: the same calls as ``StoreClient``, placed by key.

Every page names its run, every run has its holders (``members``), so each call goes straight to the nodes
that matter, to all of them at once: a look-up of a whole chain is one round trip, however many nodes hold it.
A node that is dead, slow or busy is passed over for the next holder, and what nobody gives is a miss.
When a node answers that the member list is another, it is taken over and the call is made once more. When
nobody on the list is left to answer, nodes of earlier lists are asked for a newer one (``earlier_nodes``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from cedar.kvstore.chain_match import match_chain
from cedar.kvstore.chain_plan import Plan
from cedar.kvstore.chain_read import KnownCopies, read_chain
from cedar.kvstore.client import Match
from cedar.kvstore.clock import Clock, SystemClock
from cedar.kvstore.cluster_config import ClusterClientConfig
from cedar.kvstore.config import MIB
from cedar.kvstore.earlier_nodes import EarlierNodes
from cedar.kvstore.epochs import request_metadata
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.hedge import HedgeTimer
from cedar.kvstore.keys import KEY_BYTES
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import Member, MemberList
from cedar.kvstore.node_client import NodeClient
from cedar.kvstore.placement import Run, run_of, runs_of
from cedar.kvstore.put import PutCounts
from cedar.kvstore.tenant_purge import PurgeReport, purge_everywhere
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.transport import GrpcTransport, Transport

log = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""How often a call is planned when the member list changes under it."""

PUTS_AT_ONCE: Final = 8
_ELSEWHERE: Final = ("unavailable", "timeout", "busy")


class ClusterClient:
    """Client of all nodes that ``feed`` lists; belongs to one event loop. Same calls as ``StoreClient``."""

    def __init__(
        self,
        feed: MemberFeed,
        *,
        fingerprint: bytes | None = None,
        config: ClusterClientConfig | None = None,
        tls: TlsConfig | None = None,
        transport: Transport | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.feed = feed
        self.config = config or ClusterClientConfig()
        self.counters: Counter[str] = Counter()
        self._fingerprint = fingerprint
        self._transport = transport or GrpcTransport(tls)
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._clients: dict[tuple[str, str], NodeClient] = {}
        self._copies = KnownCopies(self._rng, self._count)
        self._timer = HedgeTimer(least_s=self.config.hedge_least_s, most_s=self.config.hedge_most_s)
        self._match_timer = HedgeTimer(least_s=self.config.hedge_least_s, most_s=self.config.hedge_most_s)
        self._closing: set[asyncio.Task[None]] = set()
        self._earlier = EarlierNodes()
        self._asking: asyncio.Task[None] | None = None
        self._started: asyncio.Task[None] | None = None
        self._closed = False

    # ---- the calls of a StoreClient ----

    async def match(self, root: bytes, keys: Sequence[bytes], *, tenant: bytes = b"") -> Match:
        """How much of the chain the store holds, and the window records at it; one round trip."""
        _expect_keys((root, *keys))
        match = Match()
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            match = await match_chain(
                plan, root, keys, tenant=tenant, timer=self._match_timer, count=self._count
            )
            if plan.members.epoch == self.feed.current.epoch:
                break
        return match

    async def get_pages(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[int, memoryview], None]:
        """(index, value) of leading pages, in order, each a verified sealed value; see ``StoreClient``.

        All nodes that hold some of them send at the same time; the first page is given as soon as it is here.
        """
        _expect_keys(keys)
        position = 0
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            reached = position
            pages = read_chain(
                plan, keys, position, copies=self._copies, timer=self._timer, count=self._count
            )
            async with aclosing(pages) as values:
                async for index, value in values:
                    reached = index + 1
                    self.counters["pages_received"] += 1
                    yield index, value
            position = reached
            if position == len(keys) or plan.members.epoch == self.feed.current.epoch or self._closed:
                return

    async def put_pages(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int = 0, tenant: bytes = b""
    ) -> PutCounts:
        """Store sealed values of consecutive pages; answers when they are durable on their owners."""
        if len(keys) != len(values):
            raise InvalidRequest("values", len(values), f"one for each of {len(keys)} keys")
        _expect_keys(keys)
        counts = PutCounts()
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            counts = await self._put(plan, keys, values, first_page, tenant)
            if not counts.refused or plan.members.epoch == self.feed.current.epoch:
                break
        return counts

    async def get_window(
        self, page_key: bytes, tokens: int, digest: bytes, *, tenant: bytes = b""
    ) -> bytes | None:
        """A window record, verified; None when it is gone or does not arrive whole and in time."""
        _expect_keys((page_key, digest))
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            for node in plan.holders(run_of(page_key))[:1]:
                record = await node.get_window(page_key, tokens, digest, tenant=tenant)
                if record is not None:
                    return record
            if plan.members.epoch == self.feed.current.epoch:
                break
        return None

    async def put_window(
        self, page_key: bytes, tokens: int, digest: bytes, record: bytes, *, tenant: bytes = b""
    ) -> bool:
        """File a window record; whether the store keeps it."""
        _expect_keys((page_key, digest))
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            for node in plan.holders(run_of(page_key))[:1]:
                if await node.put_window(page_key, tokens, digest, record, tenant=tenant):
                    return True
            if plan.members.epoch == self.feed.current.epoch:
                break
        return False

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of all nodes that answer, added up."""
        total: Counter[str] = Counter()
        for values in (await self.node_stats()).values():
            total.update(values)
        return dict(total)

    async def close(self) -> None:
        """End running fetches and close every connection; from now on everything is a miss."""
        self._closed = True
        for task in (self._started, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self.feed.stop()
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        while self._closing:
            await asyncio.wait(list(self._closing))

    # ---- of a cluster alone ----

    async def node_stats(self) -> dict[str, dict[str, float]]:
        """Counters and gauges by node; {} for a node that does not answer."""
        plan = await self._plan()
        members = plan.members.members
        answers = await asyncio.gather(*(self._client(m.node_id, m.address).stats() for m in members))
        return {member.node_id: answer for member, answer in zip(members, answers, strict=True)}

    async def purge(self, tenant: bytes) -> PurgeReport:
        """Remove everything of a tenant from every node and tier; who could not be reached is reported.

        A node that was away learns of it from the others when it is back, before it serves again. While the
        list is empty it goes to the nodes that were listed before: with nobody told, nobody could learn.
        """
        await self._plan()
        return await purge_everywhere(
            self.feed.current.members or self._earlier.known,
            tenant,
            timeout_s=self.config.purge_timeout_s,
            transport=self._transport,
            clock=self._clock,
            rng=self._rng,
        )

    # ---- inside ----

    async def _put(
        self, plan: Plan, keys: Sequence[bytes], values: Sequence[bytes], first_page: int, tenant: bytes
    ) -> PutCounts:
        async def put(start: int, end: int) -> PutCounts:
            counts = PutCounts(refused=end - start, reason="unavailable")
            for number, node in enumerate(plan.holders(run_of(keys[start]))[: plan.copies]):
                if number:
                    self.counters["puts_failed_over"] += 1
                counts = await node.put_pages(
                    keys[start:end], values[start:end], first_page=first_page + start, tenant=tenant
                )
                if not (counts.refused and counts.reason in _ELSEWHERE):
                    break
            return counts

        at_once = asyncio.Semaphore(PUTS_AT_ONCE)

        async def put_run(run: Run) -> PutCounts:
            async with at_once:
                return await put(run.start, run.end)

        total = PutCounts()
        for counts in await asyncio.gather(*map(put_run, runs_of(keys))):
            total.add(counts)
        return total

    async def _plan(self) -> Plan:
        members = MemberList(self.feed.current.epoch)
        if not self._closed:
            if self._started is None:
                self._started = asyncio.get_running_loop().create_task(self.feed.start())
            if not self._started.done():
                await asyncio.wait([self._started], timeout=self.config.node.match_timeout_s)
            await self._look_for_a_list()
            members = self.feed.current
        self._let_go(members)
        copies = members.copies or self.config.copies

        def holders(tag: bytes) -> list[NodeClient]:
            if not members.members:
                return []
            found = [self._client(m.node_id, m.address) for m in members.holders(tag)[: copies + 1]]
            return sorted(found, key=lambda client: client.resting)  # stable: those that answer, in rank

        return Plan(members, holders, copies)

    async def _look_for_a_list(self) -> None:
        """Ask nodes of earlier lists if nobody on this one answers; wait for them only if it is empty."""
        members = self.feed.current
        self._earlier.listed(members)
        if self._closed or any(not self._is_resting(member) for member in members.members):
            return
        if self._asking is None or self._asking.done():
            loop = asyncio.get_running_loop()
            if nodes := self._earlier.to_ask(members, loop.time()):
                self._asking = loop.create_task(self._ask_for_a_list(nodes))
        if self._asking is not None and not self._asking.done() and not members.members:
            await asyncio.wait([self._asking], timeout=self.config.node.match_timeout_s)

    async def _ask_for_a_list(self, nodes: Sequence[Member]) -> None:
        """Ask each something small: who knows a newer list refuses, and encloses it."""
        self.counters["earlier_nodes_asked"] += len(nodes)
        clients = [self._node_client(member.node_id, member.address) for member in nodes]
        try:
            await asyncio.gather(*(client.match(bytes(KEY_BYTES), []) for client in clients))
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    def _is_resting(self, member: Member) -> bool:
        client = self._clients.get((member.node_id, member.address))
        return client is not None and client.resting

    def _client(self, node_id: str, address: str) -> NodeClient:
        client = self._clients.get((node_id, address))
        if client is None:
            client = self._clients[node_id, address] = self._node_client(node_id, address)
        return client

    def _node_client(self, node_id: str, address: str) -> NodeClient:
        nodes = max(len(self.feed.current.members), 1)
        ahead = max(self.config.read_ahead_bytes // nodes, 2 * MIB)
        return NodeClient(
            address,
            fingerprint=self._fingerprint,
            config=replace(self.config.node, read_ahead_bytes=ahead),
            metadata=lambda: request_metadata(self.feed.current, node_id),
            on_list=self.feed.publish,
            on_copied=lambda page: self._copies.learn(page, self.feed.current.epoch),
            transport=self._transport,
        )

    def _let_go(self, members: MemberList) -> None:
        """Close connections to nodes that are listed no more; running streams end as misses."""
        listed = {(m.node_id, m.address) for m in members.members}
        for name in [name for name in self._clients if name not in listed]:
            client = self._clients.pop(name)
            self.counters.update({f"gone_{n}": v for n, v in client.counters.items()})
            task = asyncio.get_running_loop().create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _count(self, name: str) -> None:
        self.counters[name] += 1


def _expect_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InvalidRequest("key", f"{len(key)} bytes", f"must be {KEY_BYTES} bytes")
