"""Brings a node the pages that are its own under a new member list: it pulls them from whoever holds them.

Each node looks after its own: when the list changes it asks every other node for the pages that now belong
here, takes those it lacks, last used first, within a bandwidth limit, and is then *settled* under that list.
Until it is, what it lacks is read through (``read_through``). The old copies are not deleted: nobody asks for
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
from cedar.kvstore.placement import runs_of

log = logging.getLogger(__name__)
PAGES_AT_ONCE: Final = 16


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
        keep: Callable[[Sequence[CopiedPage]], Awaitable[int]],
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
        self.settled_epoch = 0

    @property
    def settled(self) -> bool:
        """Whether everything that belongs here under the current list has arrived."""
        return self.settled_epoch >= self._feed.current.epoch

    async def run(self) -> None:
        """Settle under each new list; runs until cancelled."""
        while True:
            members = await self._feed.newer(self.settled_epoch)
            try:
                settled = await self._settle(members)
            except Exception:
                log.exception("rebalance failed, will try again")
                settled = False
            if settled:
                self.settled_epoch = members.epoch
                log.info("settled under epoch %d", members.epoch)
            elif self._feed.current.epoch == members.epoch:
                await asyncio.sleep(self._config.retry_s)

    async def _settle(self, members: MemberList) -> bool:
        """Pull from everyone; False when someone did not answer or the list has changed meanwhile."""
        me = members.find(self._node_id)
        if me is None or me.state != "active":
            return True
        complete = True
        for peer in self._peers.others():
            try:
                async for keys in peer.list_pages(self._node_id, members.epoch):
                    await self._pull(peer, keys)
                    if self._feed.current.epoch != members.epoch:
                        return False
            except ConnectionError as error:
                log.info("epoch %d: %s", members.epoch, error)
                complete = False
        return complete

    async def _pull(self, peer: Peer, keys: Sequence[bytes]) -> None:
        missing = [key for key, held in zip(keys, self._held(keys), strict=True) if not held]
        for run in runs_of(missing):
            for start in range(run.start, run.end, PAGES_AT_ONCE):
                wanted = missing[start : min(start + PAGES_AT_ONCE, run.end)]
                pages = await peer.fetch(wanted)
                if not pages:
                    continue
                await self._pace.take(sum(len(page.value) for page in pages))
                self._count("store_pages_moved_in", await self._keep(pages))
