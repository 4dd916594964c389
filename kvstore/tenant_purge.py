"""Tell every node to forget a tenant, and say which of them did."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from cedar.kvstore.clock import Clock, SystemClock
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import Member
from cedar.kvstore.purges import new_purge_id
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.transport import GrpcTransport, Transport
from cedar.v1 import store_peer_pb2

PEER_SERVICE: Final = store_peer_pb2.DESCRIPTOR.services_by_name["StorePeer"]


@dataclass(frozen=True)
class PurgeReport:
    """What a purge removed, replicas counted each, and the nodes that did not answer (they will catch up)."""

    pages: int = 0
    bytes: int = 0
    windows: int = 0
    unreachable: tuple[str, ...] = ()


async def purge_everywhere(
    members: Sequence[Member],
    tenant: bytes,
    *,
    timeout_s: float,
    transport: Transport | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> PurgeReport:
    """Purge on all nodes at the same time. ``tenant``: its domain, never empty."""
    if not tenant:
        raise InvalidRequest("tenant", tenant, "must not be empty")
    purge_id = new_purge_id((clock or SystemClock()).wall_s(), rng or random.SystemRandom())
    request = store_peer_pb2.PurgeRequest(tenant=tenant, purge_id=purge_id)
    maker = (transport or GrpcTransport()).channels()

    async def purge(member: Member) -> store_peer_pb2.PurgeResponse | None:
        async with maker.open(member.address) as channel:
            try:
                answer: store_peer_pb2.PurgeResponse = await ServiceStub(channel, PEER_SERVICE).Purge(
                    request, timeout=timeout_s
                )
            except grpc.RpcError:
                return None
            return answer

    answers = await asyncio.gather(*map(purge, members))
    done = [answer for answer in answers if answer is not None]
    return PurgeReport(
        sum(int(answer.pages) for answer in done),
        sum(int(answer.bytes) for answer in done),
        sum(int(answer.windows) for answer in done),
        tuple(m.node_id for m, answer in zip(members, answers, strict=True) if answer is None),
    )
