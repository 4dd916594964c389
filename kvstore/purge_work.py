"""Purges on a node: carried out once begun, written down, heard from the others and told to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cedar.kvstore.errors import Refused
from cedar.kvstore.peers import Peers
from cedar.kvstore.purges import Purges
from cedar.v1 import store_peer_pb2

log = logging.getLogger(__name__)

Gone = tuple[int, int, int]
"""Pages, their bytes, and window records that a purge removed."""


class PurgeWork:
    """``forget``: removes all of a tenant. ``look_again``: old pages went where new ones may be missing."""

    def __init__(
        self,
        purges: Purges,
        peers: Peers,
        *,
        forget: Callable[[bytes], Awaitable[Gone]],
        look_again: Callable[[], None],
        count: Callable[[str, float], None],
        retry_s: float,
    ) -> None:
        self.purges = purges
        self._peers = peers
        self._forget = forget
        self._look_again = look_again
        self._count = count
        self._retry_s = retry_s
        self._one_at_a_time = asyncio.Lock()
        self._running: dict[asyncio.Task[Gone], None] = {}

    async def purge(self, tenant: bytes, purge_id: int) -> Gone:
        """Forget everything of a tenant: what went.

        Refused when the purge cannot be written down: nothing is left here, but a restart would not know of
        it. Once begun it goes on, whether the caller waits or not.
        """
        task = asyncio.get_running_loop().create_task(self._purge(tenant, purge_id))
        self._running[task] = None
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def learn(self, message: store_peer_pb2.Purges) -> None:
        """Carry out purges that a peer knows and this node does not. Refused, as of ``purge``.

        The tenant may have gone on meanwhile: its new pages were not taken while old ones were in their
        place.
        """
        for tenant, purge_id in list(self.purges.unknown(message)):
            pages, _, _ = await self.purge(tenant, purge_id)
            if pages:
                self._look_again()

    async def finish(self) -> None:
        """Complete what a stop or a failing disk cut short."""
        async with self._one_at_a_time:
            for tenant in self.purges.unfinished:
                await self._forget(tenant)
                self.purges.finish(tenant)
                self._save()

    async def meet(self) -> None:
        """Tell every peer what is known here, and learn what it knows."""
        mine = self.purges.to_proto()
        answers = await asyncio.gather(*(peer.exchange_purges(mine) for peer in self._peers.others()))
        for answer in answers:
            if answer is not None:
                try:
                    await self.learn(answer)
                except Refused as error:
                    log.warning("%s", error)

    async def stop(self) -> None:
        """End what is under way; the next start completes it."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _purge(self, tenant: bytes, purge_id: int) -> Gone:
        async with self._one_at_a_time:
            gone = 0, 0, 0
            if self.purges.begin(tenant, purge_id):
                self._save()
                gone = await self._forget(tenant)
                self.purges.finish(tenant)
                self._count("store_purges", 1)
                log.info("purged a tenant: %d pages, %d bytes, %d window records", *gone)
            if not self._save():
                raise Refused("the purge cannot be written down: disk", self._retry_s)
        return gone

    def _ended(self, task: asyncio.Task[Gone]) -> None:
        del self._running[task]
        if not task.cancelled():
            task.exception()  # the caller's, if there still is one

    def _save(self) -> bool:
        try:
            self.purges.save()
        except OSError as error:
            log.warning("purges not written down: %s", error)
            return False
        return True
