"""A node's side of the membership: joins, renews its lease, joins again when it was dropped, leaves.

None of it is on a request's way. While the service is away the node goes on serving under the last list: its
pages are immutable and named by content, so a write to a node that is no longer the owner is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from cedar.kvstore.member_feed import SERVICE, ServiceFeed
from cedar.kvstore.members import from_proto, to_proto
from cedar.kvstore.membership import RENEWALS_A_LEASE
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.transport import Transport
from cedar.v1 import membership_pb2 as pb

log = logging.getLogger(__name__)
_FAILURES = (grpc.RpcError, grpc.aio.UsageError, TimeoutError)


class MembershipAgent:
    """Keeps one node listed. ``settled_epoch`` says which list's pages it has all received."""

    def __init__(
        self,
        service_address: str,
        feed: ServiceFeed,
        *,
        node_id: str,
        address: str,
        incarnation: int,
        weight: float,
        settled_epoch: Callable[[], int],
        transport: Transport,
        call_timeout_s: float = 2.0,
    ) -> None:
        self._service_address = service_address
        self._feed = feed
        self._node_id = node_id
        self._address = address
        self._incarnation = incarnation
        self._weight = weight
        self._settled_epoch = settled_epoch
        self._maker = transport.channels()
        self._timeout_s = call_timeout_s
        self._lease_s = 1.0
        self._draining = False
        self._released = asyncio.Event()
        self.unsettled = 0
        """While draining: how many nodes have not yet received what is theirs now, as was last heard."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join in the background."""
        self._channel = self._maker.open(self._service_address)
        self._stub = ServiceStub(self._channel, SERVICE)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def drain(self, timeout_s: float) -> bool:
        """Stop being written to, and wait for the others to receive this node's pages; whether they have.

        While the service is away, or has forgotten, it is told again: nobody takes over what nobody is told
        of.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._leave(drain=True)
                except _FAILURES as error:
                    log.info("membership service: %s", error)
                await self._released.wait()
        except TimeoutError:
            log.warning("the others had not received everything in %.0f s", timeout_s)
            return False
        return True

    async def stop(self) -> None:
        """Leave the list and end."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        try:
            await self._leave(drain=False)
        except _FAILURES:
            log.info("the membership service is away: it will see the lease run out")
        await self._channel.close(None)

    async def _leave(self, *, drain: bool) -> None:
        request = pb.LeaveRequest(node_id=self._node_id, incarnation=self._incarnation, drain=drain)
        response = await self._stub.Leave(request, timeout=self._timeout_s)
        self._feed.publish(from_proto(response.list))

    async def _run(self) -> None:
        listed = False
        while True:
            pause_s = self._lease_s / RENEWALS_A_LEASE
            try:
                if listed:
                    if self._draining:
                        await self._leave(drain=True)
                    listed = await self._renew()
                else:
                    listed, pause_s = await self._join()
            except _FAILURES as error:
                code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
                log.info("membership service: %s", code)
            await asyncio.sleep(pause_s)

    async def _join(self) -> tuple[bool, float]:
        request = pb.JoinRequest(
            node_id=self._node_id,
            address=self._address,
            incarnation=self._incarnation,
            weight=self._weight,
            known=to_proto(self._feed.current),
            draining=self._draining,
        )
        response = await self._stub.Join(request, timeout=self._timeout_s)
        self._lease_s = response.lease_s or self._lease_s
        self._feed.publish(from_proto(response.list))
        if response.refused:
            log.warning("not listed for %.1f s: %s", response.retry_after_s, response.refused)
            return False, min(max(response.retry_after_s, 0.05), self._lease_s)
        return True, self._lease_s / RENEWALS_A_LEASE

    async def _renew(self) -> bool:
        request = pb.RenewRequest(
            node_id=self._node_id,
            incarnation=self._incarnation,
            settled_epoch=self._settled_epoch(),
            epoch=self._feed.current.epoch,
        )
        response = await self._stub.Renew(request, timeout=self._timeout_s)
        self.unsettled = response.unsettled
        if response.released and self._draining:
            self._released.set()
        return bool(response.known)
