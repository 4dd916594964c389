"""Who is a member: what the holder of the list decides. Pure; time is an argument.

| event                                               | decision                                        |
|-----------------------------------------------------|-------------------------------------------------|
| a node joins, new or back                           | listed under the next epoch                      |
| ... over ``flap_joins`` times in ``flap_window_s``  | held out for ``hold_s``; its data stays with it  |
| ... with the name of a node that lives elsewhere    | refused: one of the two is a duplicate           |
| ... again, same address and process                 | nothing changes                                  |
| its lease runs out                                  | dropped under the next epoch                     |
| more than half of the leases run out at once        | nobody is dropped: the fault is on this side      |
| this holder itself was stopped for a while          | the leases run on by as long                     |
| a node drains                                       | listed as draining until the others have settled |
| a joining node knows a newer list                   | that list is taken over, every lease starts anew |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import Member, MemberList

RENEWALS_A_LEASE: Final = 4


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """Times of the membership."""

    lease_s: float = 10.0
    flap_joins: int = 3
    flap_window_s: float = 600.0
    hold_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("lease_s", "flap_joins", "flap_window_s", "hold_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(name, getattr(self, name), "must be above 0")


@dataclass(frozen=True)
class Refusal:
    """Why a node is not listed, and when to ask again."""

    reason: str
    retry_after_s: float


@dataclass
class _Life:
    lease_until_s: float = 0.0
    settled_epoch: int = 0
    joins_s: deque[float] = field(default_factory=deque)
    held_until_s: float = float("-inf")


class Membership:
    """The list and the leases under it. One caller at a time."""

    def __init__(self, config: MembershipConfig, known: MemberList | None = None, *, now_s: float) -> None:
        self.config = config
        self.list = known or MemberList(0)
        self._lives: dict[str, _Life] = {}
        self._checked_s = now_s
        self._lease_all(now_s)

    def join(
        self,
        node_id: str,
        address: str,
        incarnation: int,
        weight: float,
        now_s: float,
        known: MemberList | None = None,
    ) -> Refusal | None:
        """List a node; None when it is listed (see ``list``)."""
        if known is not None and known.epoch > self.list.epoch:
            self.list = known
            self._lease_all(now_s)
        life = self._lives.setdefault(node_id, _Life())
        current = self.list.find(node_id)
        if current is not None and current.address != address and life.lease_until_s > now_s:
            return Refusal(
                f"{node_id} lives at {current.address}; a second node of that name is refused",
                life.lease_until_s - now_s,
            )
        if now_s < life.held_until_s:
            return Refusal("flapping", life.held_until_s - now_s)
        life.lease_until_s = now_s + self.config.lease_s
        same = current is not None and (current.address, current.incarnation) == (address, incarnation)
        if same and current is not None and current.state == "active" and current.weight == weight:
            return None
        if not same:
            life.joins_s.append(now_s)
            while life.joins_s and life.joins_s[0] <= now_s - self.config.flap_window_s:
                life.joins_s.popleft()
            if len(life.joins_s) > self.config.flap_joins:
                life.held_until_s = now_s + self.config.hold_s
                life.joins_s.clear()
                if current is not None:
                    self.list = self.list.without([node_id])
                return Refusal("flapping", self.config.hold_s)
        life.settled_epoch = 0
        epoch = self.list.epoch + 1
        self.list = self.list.with_member(
            Member(node_id, address, incarnation, weight, "active", joined_epoch=epoch)
        )
        return None

    def renew(self, node_id: str, incarnation: int, settled_epoch: int, now_s: float) -> bool:
        """Extend a lease; False when the node is not (or no longer) listed and must join again."""
        member = self.list.find(node_id)
        if member is None or member.incarnation != incarnation:
            return False
        life = self._lives[node_id]
        life.lease_until_s = now_s + self.config.lease_s
        life.settled_epoch = max(life.settled_epoch, settled_epoch)
        return True

    def leave(self, node_id: str, incarnation: int, *, drain: bool) -> None:
        """A node goes; one that drains stays readable until it is released."""
        member = self.list.find(node_id)
        if member is None or member.incarnation != incarnation:
            return
        if not drain:
            self.list = self.list.without([node_id])
        elif member.state != "draining":
            self.list = self.list.with_member(replace(member, state="draining"))

    def released(self, node_id: str) -> bool:
        """Whether a draining node may go: every active node has received what it owns now."""
        member = self.list.find(node_id)
        if member is None:
            return True
        others = [m.node_id for m in self.list.members if m.state == "active"]
        return member.state == "draining" and all(
            self._lives[name].settled_epoch >= self.list.epoch for name in others
        )

    def expire(self, now_s: float) -> list[str]:
        """Drop nodes whose lease has run out; their names. To be called several times a lease."""
        gap_s = now_s - self._checked_s
        self._checked_s = now_s
        if gap_s > self.config.lease_s / 2:  # this process was stopped, and could not hear them
            for life in self._lives.values():
                life.lease_until_s += gap_s
        gone = [m.node_id for m in self.list.members if self._lives[m.node_id].lease_until_s <= now_s]
        if not gone or len(gone) * 2 > len(self.list.members):
            return []
        self.list = self.list.without(gone)
        return gone

    def _lease_all(self, now_s: float) -> None:
        for member in self.list.members:
            life = self._lives.setdefault(member.node_id, _Life())
            life.lease_until_s = now_s + self.config.lease_s
