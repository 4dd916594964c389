"""Configuration of a cluster of store nodes: of a node's part in it, and of the client of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cedar.kvstore.config import MIB, ClientConfig
from cedar.kvstore.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class ClusterClientConfig:
    """How a client uses several nodes. ``copies``: holders of a run it may ask, if the list does not say."""

    node: ClientConfig = field(default_factory=ClientConfig)
    copies: int = 2
    hedge_least_s: float = 0.02
    hedge_most_s: float = 0.25
    read_ahead_bytes: int = 32 * MIB  # of all nodes together
    purge_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("copies", "hedge_least_s", "hedge_most_s", "read_ahead_bytes", "purge_timeout_s"):
            _expect_positive(name, getattr(self, name))
        if self.hedge_least_s > self.hedge_most_s:
            raise InvalidRequest("hedge_least_s", self.hedge_least_s, f"at most {self.hedge_most_s}")


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """A node's part in a cluster.

    ``node_id``: empty: made once and kept in the node's directory. ``advertise``: the address that others
    reach it under; empty: the one it listens on. Where the member list comes from: ``membership`` (the
    service's address), or ``members_file``, or ``peers`` (all nodes' addresses, this one's included, which
    is then its ``node_id``), or else whoever publishes to the node's feed.
    """

    node_id: str = ""
    advertise: str = ""
    membership: str = ""
    members_file: Path | None = None
    peers: tuple[str, ...] = ()
    weight: float = 1.0
    copies: int = 2  # nodes that hold what is hit often, if the member list does not say
    copy_after_hits: int = 3  # 0: every page, as soon as it is written
    copy_bytes_per_s: int = 32 * MIB
    move_bytes_per_s: int = 32 * MIB
    remembered_pages: int = 131_072  # whose hits are counted
    call_timeout_s: float = 0.4  # of a small request to a peer, such as one inside a client's MatchPrefix
    stall_timeout_s: float = 1.0  # of a transfer from a peer
    retry_s: float = 1.0
    purge_sync_s: float = 30.0
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "weight", "copies", "copy_bytes_per_s", "move_bytes_per_s", "remembered_pages", "call_timeout_s",
            "stall_timeout_s", "retry_s", "purge_sync_s", "drain_timeout_s",
        ):  # fmt: skip
            _expect_positive(name, getattr(self, name))
        if self.copy_after_hits < 0:
            raise InvalidRequest("copy_after_hits", self.copy_after_hits, "0 or more")
        sources = [bool(self.membership), self.members_file is not None, bool(self.peers)]
        if sum(sources) > 1:
            raise InvalidRequest("membership", "several sources", "one of membership, members_file, peers")


def _expect_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InvalidRequest(name, value, "must be above 0")
