"""Finds pages that belong here but are still elsewhere: at the run's earlier owner, or on its copy.

Only the owner of a run looks elsewhere, one hop: the node asked answers from what it holds itself. Earlier
owners are asked only until this node is settled under the list (``rebalance``); the holder of a copy is asked
when a page that was here has gone bad. What comes is stored here, so it is fetched once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile

from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import Member
from cedar.kvstore.peers import CopiedPage, CopiedWindow, Held, Peers
from cedar.kvstore.placement import run_of
from cedar.kvstore.put import PutCounts
from cedar.kvstore.rebalance import Rebalance
from cedar.kvstore.replication import Replication
from cedar.kvstore.window_tier import WindowName


class ReadThrough:
    """Used by the service for what the node's own tiers lack.

    ``current``: whether no purge known here is newer than what its sender knew. ``lost``: see ``SsdTier``.
    """

    def __init__(
        self,
        node_id: str,
        feed: MemberFeed,
        peers: Peers,
        rebalance: Rebalance,
        replication: Replication,
        *,
        keep: Callable[[Sequence[CopiedPage]], Awaitable[PutCounts]],
        current: Callable[[CopiedPage | CopiedWindow], bool],
        lost: Callable[[bytes], bool],
        count: Callable[[str, float], None],
    ) -> None:
        self._node_id = node_id
        self._feed = feed
        self._peers = peers
        self._rebalance = rebalance
        self._replication = replication
        self._keep = keep
        self._current = current
        self._lost = lost
        self._count = count
        self._fetching: dict[tuple[str, bytes], asyncio.Task[list[CopiedPage]]] = {}
        self._keeping: dict[bytes, CopiedPage] = {}  # fetched, and not yet stored
        self._tasks: set[asyncio.Task[None]] = set()

    def sources(self, key: bytes) -> list[Member]:
        """Who may hold a page that is not here; usually nobody, at the cost of a few comparisons."""
        tag = run_of(key)
        found: list[Member] = []
        if not self._rebalance.settled:
            found += self._feed.current.earlier_owners(tag, self._node_id)
        copy = self._replication.copied(key)
        if copy is None and self._lost(key):
            copy = self._replication.second_holder(tag)
        if copy is not None and copy not in found:
            found.append(copy)
        return found

    async def held(self, root: bytes, keys: Sequence[bytes], own: list[bool]) -> tuple[int, set[WindowName]]:
        """How many leading ``keys`` are here (``own``) or can be had, and the others' window records."""
        lacking = [i for i, here in enumerate(own) if not here]
        groups: dict[Member, list[int]] = {}
        for position in lacking:
            for member in self.sources(keys[position]):
                groups.setdefault(member, []).append(position)
        windows: set[WindowName] = set()
        if groups:
            self._count("store_matches_read_through", 1)
            asked = [
                self._peers.of(member).held(root, [keys[p] for p in positions])
                for member, positions in groups.items()
            ]
            answers: list[Held | None] = await asyncio.gather(*asked)
            for positions, answer in zip(groups.values(), answers, strict=True):
                if answer is not None:
                    windows.update(answer.windows)
                    for position, here in zip(positions, answer.held, strict=True):
                        own[position] = own[position] or here
        return next((i for i, here in enumerate(own) if not here), len(own)), windows

    async def fetch(self, keys: Sequence[bytes]) -> list[CopiedPage]:
        """Leading pages of ``keys``, all of one run; stored here in the background."""
        arrived = list(takewhile(lambda page: page is not None, map(self._keeping.get, keys)))
        if arrived:
            return [page for page in arrived if page is not None]
        for member in self.sources(keys[0]):
            name = (member.node_id, b"".join(keys))
            running = self._fetching.get(name)
            if running is None:
                running = asyncio.get_running_loop().create_task(self._bring(name, member, keys))
                self._fetching[name] = running
            else:
                self._count("store_peer_fetches_joined", 1)
            pages = await asyncio.shield(running)
            if pages:
                self._count("store_pages_read_through", len(pages))
                return pages
        return []

    async def _bring(
        self, name: tuple[str, bytes], member: Member, keys: Sequence[bytes]
    ) -> list[CopiedPage]:
        """Fetch pages and have them kept. At any moment either this runs or they are known to be here."""
        try:
            fetched = await self._peers.of(member).fetch(keys)
            pages = list(takewhile(self._current, fetched.pages))
            self._keep_later(pages)
            return pages
        finally:
            del self._fetching[name]

    async def window(self, name: WindowName, limit_bytes: int) -> CopiedWindow | None:
        """A window record at an earlier owner of its page."""
        if self._rebalance.settled:
            return None
        for member in self._feed.current.earlier_owners(run_of(name.page_key), self._node_id):
            found = await self._peers.of(member).fetch_window(name, limit_bytes)
            if found is not None and self._current(found):
                return found
        return None

    def forget(self, tenant: bytes) -> None:
        """Pages of a tenant that are on their way into the store are not given any more."""
        for key in [key for key, page in self._keeping.items() if page.tenant in (tenant, b"")]:
            del self._keeping[key]

    async def close(self) -> None:
        """Wait for what is being stored."""
        while self._fetching:
            await asyncio.wait(list(self._fetching.values()))
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _keep_later(self, pages: Sequence[CopiedPage]) -> None:
        fresh = [page for page in pages if page.key not in self._keeping]
        if not fresh:
            return

        async def keep() -> None:
            try:
                await self._keep(fresh)
            finally:
                for page in fresh:
                    self._keeping.pop(page.key, None)

        self._keeping.update((page.key, page) for page in fresh)
        task = asyncio.get_running_loop().create_task(keep())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
