"""Every request between clients and nodes says under which member list it was sent, and to whom.

A node that knows a newer list, or is not the node that was meant, answers FAILED_PRECONDITION and encloses
the list it knows; the caller takes it over and asks again. A request without an epoch is not checked: that
is a client of one node, which knows no list.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import MemberList, from_proto, to_proto
from cedar.v1 import membership_pb2
from google.protobuf.message import DecodeError

EPOCH: Final = "cedar-epoch"
NODE: Final = "cedar-node"
MEMBERS: Final = "cedar-members-bin"
MAX_ENCLOSED_BYTES: Final = 6 << 10
"""A longer list is not enclosed: gRPC bounds metadata, and the caller's own feed will bring it."""

Metadata = tuple[tuple[str, str], ...]


def request_metadata(members: MemberList, node_id: str) -> Metadata:
    """What a request to this node says. Lists that never change (epoch 0) need no check."""
    if members.epoch == 0:
        return ()
    return ((EPOCH, str(members.epoch)), (NODE, node_id))


async def expect_epoch(context: Any, node_id: str, feed: MemberFeed) -> None:
    """End the call unless it is meant for this node under this list or a newer one."""
    said = {name: value for name, value in context.invocation_metadata() or () if name in (EPOCH, NODE)}
    if EPOCH not in said:
        return
    members = feed.current
    meant = said.get(NODE, node_id)
    try:
        epoch = int(said[EPOCH])
    except ValueError:
        raise InvalidRequest(EPOCH, said[EPOCH], "a number") from None
    if meant == node_id and epoch >= members.epoch:
        return
    enclosed = to_proto(members).SerializeToString()
    trailing = ((MEMBERS, enclosed),) if len(enclosed) <= MAX_ENCLOSED_BYTES else ()
    why = f"epoch {epoch} is over, this is {members.epoch}" if meant == node_id else f"this is node {node_id}"
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why, trailing)


def enclosed_list(metadata: Any) -> MemberList | None:
    """The list that a node sent back with a refusal."""
    for name, value in metadata or ():
        if name == MEMBERS:
            try:
                return from_proto(membership_pb2.MemberList.FromString(value))
            except (DecodeError, InvalidRequest):
                return None
    return None
