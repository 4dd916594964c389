"""Who is a member: what the holder of the list decides. Pure; time is an argument.

| event                                               | decision                                        |
|-----------------------------------------------------|-------------------------------------------------|
| a node joins, new or back                           | listed under the next epoch                      |
| ... over ``flap_joins`` times in ``flap_window_s``  | held out for ``hold_s``; its data stays with it  |
| ... with the name of a node that lives elsewhere    | refused: one of the two is a duplicate           |
| ... again, same address and process                 | nothing changes                                  |
| its lease runs out                                  | dropped under the next epoch                     |
| more than half of the leases run out at once        | nobody is dropped: the fault may be on this side  |
| ... and stay out for ``GRACE_LEASES`` more, while   | dropped: who hears one node could hear the others |
|     another node is heard                           |                                                  |
| this holder itself was stopped for a while          | the leases run on by as long                     |
| a node drains                                       | listed as draining until the others have settled |
| a joining node knows a newer list                   | that list is taken over, every lease starts anew |
| a renewing node knows a newer list                  | it is told to join, which brings the list        |

A holder that forgot its list, or has an old one, must not give a number again that stands for another list
somewhere: two lists of one number would never give way to each other. So the counted part of its epochs
begins at ``first_epoch``, for which the service takes the wall clock's seconds, and the part below
``EPOCH_STEP`` is a number of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import Member, MemberList, State

RENEWALS_A_LEASE: Final = 4
GRACE_LEASES: Final = 2
EPOCH_STEP: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """Times of the membership."""

    lease_s: float = 10.0
    flap_joins: int = 3
    flap_window_s: float = 600.0
    hold_s: float = 600.0
    copies: int = 0  # nodes that hold what is hit often, for all who go by the list; 0: each as configured

    def __post_init__(self) -> None:
        for name in ("lease_s", "flap_joins", "flap_window_s", "hold_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(name, getattr(self, name), "must be above 0")
        if self.copies < 0:
            raise InvalidRequest("copies", self.copies, "0 or more")


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

    def __init__(
        self,
        config: MembershipConfig,
        known: MemberList | None = None,
        *,
        now_s: float,
        first_epoch: int = 1,
        own_number: int | None = None,
    ) -> None:
        self.config = config
        self.list = known or MemberList(0)
        self._first_epoch = first_epoch
        self._own_number = own_number
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
        *,
        draining: bool = False,
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
        state: State = "draining" if draining else "active"
        if same and current is not None and current.state == state and current.weight == weight:
            return None
        if not same:
            life.joins_s.append(now_s)
            while life.joins_s and life.joins_s[0] <= now_s - self.config.flap_window_s:
                life.joins_s.popleft()
            if len(life.joins_s) > self.config.flap_joins:
                life.held_until_s = now_s + self.config.hold_s
                life.joins_s.clear()
                if current is not None:
                    self._replace(self.list.without([node_id]))
                return Refusal("flapping", self.config.hold_s)
        life.settled_epoch = 0
        member = Member(node_id, address, incarnation, weight, state, joined_epoch=self._next_epoch)
        self._replace(self.list.with_member(member))
        return None

    def renew(self, node_id: str, incarnation: int, settled_epoch: int, now_s: float, epoch: int = 0) -> bool:
        """Extend a lease; False when the node is not listed, or knows a newer list: then it must join."""
        member = self.list.find(node_id)
        if member is None or member.incarnation != incarnation or epoch > self.list.epoch:
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
            self._replace(self.list.without([node_id]))
        elif member.state != "draining":
            self._replace(self.list.with_member(replace(member, state="draining")))

    def unsettled(self) -> int:
        """How many active nodes have not received all that they own under this list."""
        epoch = self.list.epoch
        active = [m.node_id for m in self.list.members if m.state == "active"]
        return sum(self._lives[name].settled_epoch < epoch for name in active)

    def released(self, node_id: str) -> bool:
        """Whether a draining node may go: it is listed as such, and the others have what they own now."""
        member = self.list.find(node_id)
        return member is not None and member.state == "draining" and not self.unsettled()

    def expire(self, now_s: float) -> list[str]:
        """Drop nodes whose lease has run out; their names. To be called several times a lease."""
        gap_s = now_s - self._checked_s
        self._checked_s = now_s
        if gap_s > self.config.lease_s / 2:  # this process was stopped, and could not hear them
            for life in self._lives.values():
                life.lease_until_s += gap_s
        silent_s = {m.node_id: now_s - self._lives[m.node_id].lease_until_s for m in self.list.members}
        gone = [node_id for node_id, past_s in silent_s.items() if past_s >= 0]
        if len(gone) * 2 > len(silent_s):
            grace_s = GRACE_LEASES * self.config.lease_s
            gone = [name for name in gone if silent_s[name] >= grace_s] if len(gone) < len(silent_s) else []
        if gone:
            self._replace(self.list.without(gone))
        return gone

    @property
    def _next_epoch(self) -> int:
        if self._own_number is None:
            return max(self.list.epoch + 1, self._first_epoch)
        counted = max(self.list.epoch // EPOCH_STEP + 1, self._first_epoch)
        return counted * EPOCH_STEP + self._own_number

    def _replace(self, members: MemberList) -> None:
        self.list = replace(members, epoch=self._next_epoch, copies=self.config.copies)

    def _lease_all(self, now_s: float) -> None:
        for member in self.list.members:
            life = self._lives.setdefault(member.node_id, _Life())
            life.lease_until_s = now_s + self.config.lease_s
