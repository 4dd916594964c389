"""The store of several nodes as its users see it: the same calls as ``StoreClient``, placed by key.

Every page names its run, every run has its holders (``members``), so each call goes straight to the nodes
that matter, to all of them at once: a look-up of a whole chain is one round trip, however many nodes hold it.
A node that is dead, slow or busy is passed over for the next holder, and what nobody gives is a miss.
When a node answers that the member list is another, it is taken over and the call is made once more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from cedar.kvstore.client import Match
from cedar.kvstore.cluster_config import ClusterClientConfig
from cedar.kvstore.config import MIB
from cedar.kvstore.epochs import request_metadata
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.hedge import HedgeTimer, hedged
from cedar.kvstore.keys import KEY_BYTES
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import MemberList
from cedar.kvstore.node_client import NodeClient
from cedar.kvstore.ordered_read import PageSource, read_run
from cedar.kvstore.placement import Run, by_holder, run_of, runs_of
from cedar.kvstore.put import PutCounts
from cedar.kvstore.tenant_purge import PurgeReport, purge_everywhere
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.window_tier import WindowName

log = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""How often a call is planned when the member list changes under it."""

PUTS_AT_ONCE: Final = 8
_REMEMBERED_COPIES: Final = 16_384
_ELSEWHERE: Final = ("unavailable", "timeout", "busy")


@dataclass
class _Plan:
    """Who is asked for what, under one list."""

    members: MemberList
    holders: Callable[[bytes], list[NodeClient]]


class ClusterClient:
    """Client of all nodes that ``feed`` lists; belongs to one event loop. Same calls as ``StoreClient``."""

    def __init__(
        self,
        feed: MemberFeed,
        *,
        fingerprint: bytes | None = None,
        config: ClusterClientConfig | None = None,
        tls: TlsConfig | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.feed = feed
        self.config = config or ClusterClientConfig()
        self.counters: Counter[str] = Counter()
        self._fingerprint = fingerprint
        self._tls = tls
        self._rng = rng or random.Random()
        self._clients: dict[tuple[str, str], NodeClient] = {}
        self._copied: OrderedDict[bytes, int] = OrderedDict()  # run: under which list it is on two nodes
        self._timer = HedgeTimer(least_s=self.config.hedge_least_s, most_s=self.config.hedge_most_s)
        self._match_timer = HedgeTimer(least_s=self.config.hedge_least_s, most_s=self.config.hedge_most_s)
        self._closing: set[asyncio.Task[None]] = set()
        self._started: asyncio.Task[None] | None = None
        self._closed = False

    # ---- the calls of a StoreClient ----

    async def match(self, root: bytes, keys: Sequence[bytes]) -> Match:
        """How much of the chain the store holds, and the window records at it; one round trip."""
        _expect_keys((root, *keys))
        match = Match()
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            match = await self._match(plan, root, keys)
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
            async with aclosing(self._read(plan, keys, position)) as values:
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

    async def get_window(self, page_key: bytes, tokens: int, digest: bytes) -> bytes | None:
        """A window record, verified; None when it is gone or does not arrive whole and in time."""
        _expect_keys((page_key, digest))
        for _ in range(ATTEMPTS):
            plan = await self._plan()
            for node in plan.holders(run_of(page_key))[:1]:
                record = await node.get_window(page_key, tokens, digest)
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
        if self._started is not None:
            self._started.cancel()
            await asyncio.wait([self._started])
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

        A node that was away learns of it from the others when it is back, before it serves again.
        """
        await self._plan()
        return await purge_everywhere(
            self.feed.current.members, tenant, timeout_s=self.config.purge_timeout_s, tls=self._tls
        )

    # ---- inside ----

    async def _match(self, plan: _Plan, root: bytes, keys: Sequence[bytes]) -> Match:
        windows: set[WindowName] = set()

        async def ask(node: NodeClient, positions: Sequence[int]) -> int | None:
            """The first of these pages that the node lacks; None when it does not answer."""
            began_s = time.monotonic()
            whole = len(positions) == len(keys)
            match = await node.try_match(root, keys if whole else [keys[p] for p in positions])
            if match is None:
                return None
            self._match_timer.answered(time.monotonic() - began_s)
            windows.update(match.windows)
            return positions[match.pages] if match.pages < len(positions) else len(keys)

        async def first_missing(positions: Sequence[int], level: int) -> int:
            if level == 0 and len(plan.members.members) == 1:
                return await ask_group(plan.holders(run_of(root))[0], positions, 0)
            groups = by_holder(runs_of(keys, positions), lambda tag: _at(plan.holders(tag), level))
            if sum(map(len, groups.values())) < len(positions):
                return positions[0]
            return min(await asyncio.gather(*(ask_group(n, p, level) for n, p in groups.items())))

        async def ask_group(node: NodeClient, positions: Sequence[int], level: int) -> int:
            if level + 1 >= min(self.config.copies, len(plan.members.members)):
                answer = await ask(node, positions)
                return positions[0] if answer is None else answer
            return await hedged(
                ask(node, positions),
                lambda: first_missing(positions, level + 1),
                enough=lambda missing: missing > positions[-1],
                after_s=self._match_timer.delay_s,
                count=self._count,
            )

        async def ask_root() -> int:
            """Records at the root belong to prompts shorter than a page: of use to short prompts alone."""
            for node in plan.holders(run_of(root))[:1]:
                if not keys or node not in plan.holders(run_of(keys[0]))[:1]:
                    await ask(node, [])
            return 0

        pages = 0
        if keys:
            others = [ask_root()] if run_of(keys[-1]) == run_of(keys[0]) else []
            pages, *_ = await asyncio.gather(first_missing(range(len(keys)), 0), *others)
        else:
            await ask_root()
        at = {root, *keys[:pages]}
        known = sorted((w for w in windows if w.page_key in at), key=lambda w: -w.tokens)
        return Match(pages, tuple(known))

    async def _read(
        self, plan: _Plan, keys: Sequence[bytes], start: int
    ) -> AsyncGenerator[tuple[int, memoryview], None]:
        bell = asyncio.Event()
        runs = runs_of(keys, range(start, len(keys)))
        order = {run.tag: self._read_order(plan, run.tag) for run in runs}

        def open_stream(node: NodeClient, positions: Sequence[int]) -> PageSource:
            return PageSource(node.read([keys[p] for p in positions]), positions, bell)

        groups = by_holder(runs, lambda tag: _at(order[tag], 0))
        streams = {node: open_stream(node, positions) for node, positions in groups.items()}
        slow: set[NodeClient] = set()
        try:
            for run in runs:
                first = _at(order[run.tag], 0)
                if first is None:
                    return
                if streams[first].ended and not first.resting:
                    # It ended at a page of an earlier run, which says nothing of this one.
                    await streams[first].close()
                    streams[first] = open_stream(first, [p for p in groups[first] if p >= run.start])
                further = _Further(order[run.tag][1 : self.config.copies], open_stream)
                pages = read_run(
                    run,
                    [streams[first]],
                    further.open,
                    bell=bell,
                    timer=self._timer,
                    count=self._count,
                    patient=first not in slow,
                )
                position = run.start
                async with aclosing(pages):
                    async for position, value in pages:
                        yield position, value
                        position += 1
                if further.opened:
                    slow.add(first)
                if position < run.end:
                    return
        finally:
            for source in streams.values():
                await source.close()

    async def _put(
        self, plan: _Plan, keys: Sequence[bytes], values: Sequence[bytes], first_page: int, tenant: bytes
    ) -> PutCounts:
        async def put(start: int, end: int) -> PutCounts:
            counts = PutCounts(refused=end - start, reason="unavailable")
            for number, node in enumerate(plan.holders(run_of(keys[start]))[: self.config.copies]):
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

    def _read_order(self, plan: _Plan, tag: bytes) -> list[NodeClient]:
        """Holders in the order to ask. A run known to be on two nodes is read from the less busy one."""
        holders = plan.holders(tag)
        if len(holders) > 1 and self._copied.get(tag) == plan.members.epoch and self.config.copies > 1:
            first, second = holders[:2]
            busier = first.reads_in_flight - second.reads_in_flight
            if not second.resting and (busier > 0 or (busier == 0 and self._rng.random() < 0.5)):
                self.counters["reads_from_copy"] += 1
                return [second, first, *holders[2:]]
        return holders

    async def _plan(self) -> _Plan:
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(self.feed.start())
        await asyncio.wait([self._started])
        members = self.feed.current
        if self._closed:
            members = MemberList(members.epoch)
        self._let_go(members)

        def holders(tag: bytes) -> list[NodeClient]:
            if not members.members:
                return []
            found = [
                self._client(m.node_id, m.address) for m in members.holders(tag)[: self.config.copies + 1]
            ]
            return sorted(found, key=lambda client: client.resting)  # stable: those that answer, in rank

        return _Plan(members, holders)

    def _client(self, node_id: str, address: str) -> NodeClient:
        client = self._clients.get((node_id, address))
        if client is None:
            nodes = max(len(self.feed.current.members), 1)
            ahead = max(self.config.read_ahead_bytes // nodes, 2 * MIB)
            client = self._clients[node_id, address] = NodeClient(
                address,
                fingerprint=self._fingerprint,
                config=replace(self.config.node, read_ahead_bytes=ahead),
                metadata=lambda: request_metadata(self.feed.current, node_id),
                on_list=self.feed.publish,
                on_copied=self._learn_copy,
                tls=self._tls,
            )
        return client

    def _let_go(self, members: MemberList) -> None:
        """Close connections to nodes that are listed no more; running streams end as misses."""
        listed = {(m.node_id, m.address) for m in members.members}
        for name in [name for name in self._clients if name not in listed]:
            client = self._clients.pop(name)
            self.counters.update({f"gone_{n}": v for n, v in client.counters.items()})
            task = asyncio.get_running_loop().create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _learn_copy(self, tag_hex: str) -> None:
        try:
            self._copied[bytes.fromhex(tag_hex)] = self.feed.current.epoch
        except ValueError:
            return
        if len(self._copied) > _REMEMBERED_COPIES:
            self._copied.popitem(last=False)

    def _count(self, name: str) -> None:
        self.counters[name] += 1


class _Further:
    """The holders of a run that are still to be asked."""

    def __init__(
        self,
        nodes: Sequence[NodeClient],
        open_stream: Callable[[NodeClient, Sequence[int]], PageSource],
    ) -> None:
        self._nodes = list(nodes)
        self._open_stream = open_stream
        self.opened = False

    def open(self, position: int, end: int) -> PageSource | None:
        """The next one's stream of pages ``[position, end)``; None when there is none."""
        if not self._nodes:
            return None
        self.opened = True
        return self._open_stream(self._nodes.pop(0), range(position, end))


def _at(nodes: Sequence[NodeClient], level: int) -> NodeClient | None:
    return nodes[level] if level < len(nodes) else None


def _expect_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InvalidRequest("key", f"{len(key)} bytes", f"must be {KEY_BYTES} bytes")
