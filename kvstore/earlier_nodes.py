"""Nodes of member lists that are over: whom to ask for the present list when nobody on the last one is left.

A client that cannot hear the holder of the list learns of changes from the nodes it calls. That ends when its
list is empty (every node was dropped, or drained, in one moment) or names only nodes that do not answer: then
there is no call left that could bring it a newer one. Nodes that it knew before are often back by then.
"""

from __future__ import annotations

from typing import Final

from cedar.kvstore.members import Member, MemberList

REMEMBERED: Final = 64
ASKED_AT_ONCE: Final = 8
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 8.0


class EarlierNodes:
    """Who was listed, the last seen last, and when they may be asked again. Time is an argument."""

    def __init__(self) -> None:
        self._seen: dict[str, Member] = {}
        self._epoch = -1
        self._pause_s = FIRST_PAUSE_S
        self._next_s = float("-inf")

    @property
    def known(self) -> tuple[Member, ...]:
        """Everyone remembered, at the address seen last."""
        return tuple(self._seen.values())

    def listed(self, members: MemberList) -> None:
        """This is the list now; with a new one, asking begins anew."""
        if members.epoch == self._epoch:
            return
        self._epoch = members.epoch
        self._pause_s, self._next_s = FIRST_PAUSE_S, float("-inf")
        for member in members.members:
            self._seen.pop(member.node_id, None)
            self._seen[member.node_id] = member
        while len(self._seen) > max(REMEMBERED, len(members.members)):
            del self._seen[next(iter(self._seen))]

    def to_ask(self, members: MemberList, now_s: float) -> list[Member]:
        """Whom to ask now that nobody on ``members`` answers; [] while it is too early to ask again."""
        if now_s < self._next_s:
            return []
        gone = [member for member in self._seen.values() if members.find(member.node_id) is None]
        if gone:
            self._next_s = now_s + self._pause_s
            self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
        return gone[: -ASKED_AT_ONCE - 1 : -1]
