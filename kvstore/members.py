"""The list of store nodes, and who holds a run under it. Pure.

| question                          | answer                                                              |
|-----------------------------------|---------------------------------------------------------------------|
| who owns a run                    | the active node that ranks first (a draining one if none is active)  |
| who has the copy                  | the active nodes that rank next                                      |
| who may have owned it before      | draining nodes that rank above the owner, then each node below it   |
|                                   | that joined before every node above it                               |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.placement import Placement
from cedar.v1 import membership_pb2

MAX_NODE_ID: Final = 128
State = Literal["active", "draining"]
_STATES: Final[dict[int, State]] = {
    membership_pb2.MEMBER_STATE_ACTIVE: "active",
    membership_pb2.MEMBER_STATE_DRAINING: "draining",
}


@dataclass(frozen=True)
class Member:
    """One node. ``weight``: its share of pages relative to the others. ``joined_epoch``: since which list."""

    node_id: str
    address: str
    incarnation: int = 0
    weight: float = 1.0
    state: State = "active"
    joined_epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.node_id) <= MAX_NODE_ID:
            raise InvalidRequest("node_id", self.node_id, f"1 to {MAX_NODE_ID} characters")
        if not 0 < self.weight < float("inf"):
            raise InvalidRequest("weight", self.weight, "above 0 and finite")


@dataclass(frozen=True)
class MemberList:
    """The nodes at one epoch; a higher epoch replaces a lower one.

    ``copies``: nodes that hold what is hit often, the same for everyone who goes by the list; 0: not said,
    then everyone goes by its own configuration.
    """

    epoch: int
    members: tuple[Member, ...] = field(default=())
    copies: int = 0

    def __post_init__(self) -> None:
        if len(self._by_id) != len(self.members):
            raise InvalidRequest("members", [m.node_id for m in self.members], "node ids must differ")
        if self.copies < 0:
            raise InvalidRequest("copies", self.copies, "0 or more")

    def find(self, node_id: str) -> Member | None:
        """The member of this name."""
        return self._by_id.get(node_id)

    def holders(self, tag: bytes) -> list[Member]:
        """Active nodes in the order in which they should hold a run: the owner first."""
        placement = self._active if len(self._active) else self._all
        return [self._by_id[name] for name in placement.ranked(tag)]

    def owner(self, tag: bytes) -> Member | None:
        """The node that a run is written to."""
        placement = self._active if len(self._active) else self._all
        return self._by_id[placement.ranked(tag)[0]] if len(placement) else None

    def share(self, node_id: str) -> float:
        """The part of all pages that a node owns, 0 to 1."""
        total = sum(m.weight for m in self.members if m.state == "active")
        member = self.find(node_id)
        return member.weight / total if member is not None and member.state == "active" else 0.0

    def earlier_owners(self, tag: bytes, node_id: str) -> list[Member]:
        """Who may hold what the owner ``node_id`` lacks, the most likely first; [] if it is not the owner."""
        owner = self.owner(tag)
        if owner is None or owner.node_id != node_id:
            return []
        ranked = [self._by_id[name] for name in self._all.ranked(tag)]
        place = next(i for i, member in enumerate(ranked) if member.node_id == node_id)
        found = [member for member in ranked[:place] if member.state == "draining"]
        oldest = owner.joined_epoch
        for member in ranked[place + 1 :]:
            if member.joined_epoch < oldest:
                found.append(member)
                oldest = member.joined_epoch
        return found

    def with_member(self, member: Member) -> MemberList:
        """The next list, with this member in it (instead of one of the same name)."""
        others = [m for m in self.members if m.node_id != member.node_id]
        return replace(self, epoch=self.epoch + 1, members=(*others, member))

    def without(self, node_ids: Iterable[str]) -> MemberList:
        """The next list, without these."""
        gone = set(node_ids)
        left = tuple(m for m in self.members if m.node_id not in gone)
        return replace(self, epoch=self.epoch + 1, members=left)

    def at_epoch(self, epoch: int) -> MemberList:
        """The same members under another epoch."""
        return replace(self, epoch=epoch)

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {member.node_id: member for member in self.members}

    @cached_property
    def _all(self) -> Placement:
        return Placement({m.node_id: m.weight for m in self.members})

    @cached_property
    def _active(self) -> Placement:
        return Placement({m.node_id: m.weight for m in self.members if m.state == "active"})


def to_proto(members: MemberList) -> membership_pb2.MemberList:
    """As a message."""
    states = {state: number for number, state in _STATES.items()}
    return membership_pb2.MemberList(
        epoch=members.epoch,
        copies=members.copies,
        members=[
            membership_pb2.Member(
                node_id=m.node_id,
                address=m.address,
                incarnation=m.incarnation,
                weight=m.weight,
                state=states[m.state],  # type: ignore[arg-type]
                joined_epoch=m.joined_epoch,
            )
            for m in members.members
        ],
    )


def from_proto(message: membership_pb2.MemberList) -> MemberList:
    """From a message. InvalidRequest when it is not a list of members."""
    return MemberList(
        int(message.epoch),
        tuple(
            Member(
                m.node_id,
                m.address,
                m.incarnation,
                m.weight,
                _STATES.get(m.state, "draining"),
                m.joined_epoch,
            )
            for m in message.members
        ),
        int(message.copies),
    )


def to_json(members: MemberList) -> str:
    """As text, for a file that people read and write too."""
    rows = [
        {
            "node_id": m.node_id,
            "address": m.address,
            "incarnation": m.incarnation,
            "weight": m.weight,
            "state": m.state,
            "joined_epoch": m.joined_epoch,
        }
        for m in members.members
    ]
    said = {"copies": members.copies} if members.copies else {}
    return json.dumps({"epoch": members.epoch, **said, "members": rows}, indent=2)


def from_json(text: str) -> MemberList:
    """From text: ``epoch``, maybe ``copies``; of each of ``members`` ``node_id``, ``address``, maybe more."""
    try:
        data: Any = json.loads(text)
        members = tuple(Member(**row) for row in data["members"])
        return MemberList(int(data["epoch"]), members, int(data.get("copies", 0)))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest("member list", text[:80], f"not a member list: {error}") from None


def fixed_list(addresses: Sequence[str], *, copies: int = 0) -> MemberList:
    """A list that never changes, of nodes named by their addresses."""
    return MemberList(0, tuple(Member(address, address) for address in addresses), copies)
