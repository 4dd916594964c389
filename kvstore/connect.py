"""One way to any store: what its users call, and how they name it.

| target                        | store                                                        |
|-------------------------------|--------------------------------------------------------------|
| ``host:port``                 | one node                                                     |
| ``host:port,host:port,...``   | several nodes that never change                              |
| ``membership://host:port``    | the nodes that this membership service lists                 |
| ``file:///path``              | the nodes that this file lists (``members.to_json``)         |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from cedar.kvstore.client import Match, StoreClient
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import ClusterClientConfig
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.member_feed import FileFeed, MemberFeed, ServiceFeed
from cedar.kvstore.put import PutCounts
from cedar.kvstore.tls import TlsConfig


class Store(Protocol):
    """A store of any number of nodes; see ``StoreClient`` for what each call promises."""

    counters: Counter[str]

    async def match(self, root: bytes, keys: Sequence[bytes], *, tenant: bytes = b"") -> Match:
        """How much of a chain is held."""

    def get_pages(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[int, memoryview], None]:
        """Leading pages, verified, in order."""

    async def put_pages(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int = 0, tenant: bytes = b""
    ) -> PutCounts:
        """Store sealed values of consecutive pages."""

    async def get_window(
        self, page_key: bytes, tokens: int, digest: bytes, *, tenant: bytes = b""
    ) -> bytes | None:
        """A window record."""

    async def put_window(
        self, page_key: bytes, tokens: int, digest: bytes, record: bytes, *, tenant: bytes = b""
    ) -> bool:
        """File a window record."""

    async def stats(self) -> dict[str, float]:
        """Counters and gauges, added up over the nodes."""

    async def close(self) -> None:
        """From now on everything is a miss."""


def connect(
    target: str,
    *,
    fingerprint: bytes | None = None,
    config: ClientConfig | None = None,
    tls: TlsConfig | None = None,
    copies: int | None = None,
) -> Store:
    """The client of the store named by ``target``; it connects when first used. InvalidRequest.

    ``copies``: nodes that hold what is hit often, for lists that do not say it themselves; None: 2.
    """
    many = ClusterClientConfig(node=config or ClientConfig(), copies=2 if copies is None else copies)
    if not target:
        raise InvalidRequest("store", target, "must name a store")
    scheme, separator, rest = target.partition("://")
    feed: MemberFeed
    if not separator:
        addresses = tuple(part.strip() for part in target.split(","))
        if len(addresses) == 1:
            return StoreClient(addresses[0], fingerprint=fingerprint, config=config, tls=tls)
        feed = MemberFeed.fixed(addresses)
    elif scheme == "membership":
        feed = ServiceFeed(rest, tls=tls)
    elif scheme == "file":
        feed = FileFeed(Path(rest))
    else:
        raise InvalidRequest("store", target, "host:port, membership://host:port or file:///path")
    return ClusterClient(feed, fingerprint=fingerprint, config=many, tls=tls)
