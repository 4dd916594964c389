"""Who is asked for what in one call to a cluster: its nodes under one member list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cedar.kvstore.members import MemberList
from cedar.kvstore.node_client import NodeClient


@dataclass(frozen=True)
class Plan:
    """``holders``: a run's nodes in the order to ask them. ``copies``: how many of them may be asked."""

    members: MemberList
    holders: Callable[[bytes], list[NodeClient]]
    copies: int

    def holder(self, tag: bytes, level: int) -> NodeClient | None:
        """The node to ask at this level, 0 first."""
        nodes = self.holders(tag)
        return nodes[level] if level < len(nodes) else None

    def is_last(self, level: int) -> bool:
        """Whether nobody is asked after this level."""
        return level + 1 >= min(self.copies, len(self.members.members))
