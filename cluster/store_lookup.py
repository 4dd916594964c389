"""Asks the store what it has of a prompt. Never raises: a store that is away is a miss.

``WindowRef`` and ``WindowRecord`` have the same three fields; the first is what Prefill is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cedar.cluster.fleet import Fleet
from cedar.cluster.hits import Hit
from cedar.kvstore.connect import Store, connect
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.window_match import longest_window
from cedar.v1 import common_pb2 as common
from cedar.v1 import stages_pb2 as stages


@dataclass(frozen=True)
class Query:
    """A prompt, as its pages are named. ``tenant``: its domain, to whom the look-up is booked."""

    tenant: bytes
    root: bytes
    keys: Sequence[bytes]
    ids: Sequence[int]
    images: Sequence[common.ImageSpan]
    page_tokens: int


class StoreLookup:
    """Follows the store when it moves. ``timeout_s`` bounds a look-up."""

    def __init__(
        self, fleet: Fleet, fingerprint: bytes, timeout_s: float, tls: TlsConfig | None = None
    ) -> None:
        self._fleet = fleet
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._tls = tls
        self._client: Store | None = None
        self._target = ""
        self.misses_by_error = 0

    async def hit(self, query: Query) -> Hit:
        """Leading pages held, and the window record that continues the prompt exactly."""
        client = await self._current()
        if client is None:
            return Hit()
        try:
            async with asyncio.timeout(self._timeout_s):
                match = await client.match(query.root, list(query.keys), tenant=query.tenant)
        except TimeoutError:
            self.misses_by_error += 1
            return Hit()
        record = longest_window(
            match.windows, query.root, query.keys, query.ids, query.images, query.page_tokens
        )
        window = None
        if record is not None:
            window = stages.WindowRef(page_key=record.page_key, tokens=record.tokens, digest=record.digest)
        return Hit(match.pages, window)

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _current(self) -> Store | None:
        target = self._fleet.view.store_target
        if target is None:
            return None
        client = self._client
        if client is None or target != self._target:
            old, self._target = client, target
            self._client = client = connect(target, fingerprint=self._fingerprint, tls=self._tls)
            if old is not None:
                await old.close()
        return client
