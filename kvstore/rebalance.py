"""Brings a node the pages that are its own under a new member list: it pulls them from whoever holds them.

Each node looks after its own: when the list changes it asks every other node for the pages that now belong
here, takes those it lacks, last used first, within a bandwidth limit, and is then *settled* under that list.
A node that did not answer, or pages for which there was no room here, are asked for again. Until it is
settled, what it lacks is read through (``read_through``). The old copies are not deleted: nobody asks for
them any more, and they go as the coldest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import MemberList
from cedar.kvstore.pace import Pace
from cedar.kvstore.peers import CopiedPage, Peer, Peers
from cedar.kvstore.placement import run_of
from cedar.kvstore.put import PutCounts

log = logging.getLogger(__name__)
PAGES_AT_ONCE: Final = 16
MAX_DOUBLINGS: Final = 5
"""Of the pause before a round that was not complete is repeated."""


class Rebalance:
    """Follows the list. ``held``: which of these pages are here. ``keep``: store pages of another node."""

    def __init__(
        self,
        node_id: str,
        feed: MemberFeed,
        peers: Peers,
        config: PeerConfig,
        *,
        held: Callable[[Sequence[bytes]], list[bool]],
        keep: Callable[[Sequence[CopiedPage]], Awaitable[PutCounts]],
        count: Callable[[str, float], None],
    ) -> None:
        self._node_id = node_id
        self._feed = feed
        self._peers = peers
        self._config = config
        self._held = held
        self._keep = keep
        self._count = count
        self._pace = Pace(config.move_bytes_per_s)
        self._again = asyncio.Event()
        self.settled_epoch = 0

    @property
    def settled(self) -> bool:
        """Whether everything that belongs here under the current list has arrived."""
        return self.settled_epoch >= self._feed.current.epoch

    async def run(self) -> None:
        """Settle under each new list; runs until cancelled."""
        attempts = 0
        while True:
            members = await self._next()
            self._again.clear()
            try:
                settled = await self._settle(members)
            except Exception:
                log.exception("rebalance failed, will try again")
                settled = False
            if self._again.is_set():
                attempts = 0
                continue
            if settled:
                self.settled_epoch = members.epoch
                log.info("settled under epoch %d", members.epoch)
            if settled or self._feed.current.epoch != members.epoch:
                attempts = 0
                continue
            try:
                async with asyncio.timeout(self._config.retry_s * 2 ** min(attempts, MAX_DOUBLINGS)):
                    await self._feed.newer(members.epoch)
                attempts = 0
            except TimeoutError:
                attempts += 1

    def look_again(self) -> None:
        """Pages that were here are gone, and others may hold newer ones: settle once more under this list."""
        self.settled_epoch = 0
        self._again.set()

    async def _next(self) -> MemberList:
        """The list, once this node is not settled under it, or was told to look again."""
        while self.settled and not self._again.is_set():
            waits = [asyncio.ensure_future(self._feed.newer(self.settled_epoch))]
            waits.append(asyncio.ensure_future(self._again.wait()))  # type: ignore[arg-type]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in waits:
                    waiting.cancel()
        return self._feed.current

    async def _settle(self, members: MemberList) -> bool:
        """Pull from everyone; False when not all of it came, or the list has changed meanwhile."""
        me = members.find(self._node_id)
        if me is None or me.state != "active":
            return True
        complete = True
        for peer in self._peers.others():
            try:
                async for keys in peer.list_pages(self._node_id, members.epoch):
                    complete &= await self._pull(peer, keys)
                    if self._feed.current.epoch != members.epoch:
                        return False
            except ConnectionError as error:
                log.info("epoch %d: %s", members.epoch, error)
                complete = False
        return complete

    async def _pull(self, peer: Peer, keys: Sequence[bytes]) -> bool:
        """Take those of a peer's pages that are lacking here; whether all that it has came and were kept."""
        runs: dict[bytes, list[bytes]] = {}  # a listing is by age, and mixes the runs
        for key, held in zip(keys, self._held(keys), strict=True):
            if not held:
                runs.setdefault(run_of(key), []).append(key)
        complete = True
        for wanted in runs.values():
            while wanted:
                portion = wanted[:PAGES_AT_ONCE]
                fetched = await peer.fetch(portion)
                if not fetched.answered:
                    complete = False
                # What follows a page that is gone may be there, but what follows a failure is for the next
                # round.
                done = len(fetched.pages) + (1 if len(fetched.pages) < len(portion) else 0)
                wanted = wanted[done if fetched.answered else len(wanted) :]
                if fetched.pages:
                    await self._pace.take(sum(len(page.value) for page in fetched.pages))
                    counts = await self._keep(fetched.pages)
                    complete = complete and not counts.refused
                    self._count("store_pages_moved_in", counts.stored + counts.present + counts.conflicts)
        return complete
