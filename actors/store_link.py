"""A worker's way to the store: reads that turn every failure into a miss, and the write-behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from cedar.actors.config import PagedConfig
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.store_writer import StoreWriter
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.header import open_value

if TYPE_CHECKING:
    from cedar.kvstore.client import StoreClient
    from cedar.v1.stages_pb2 import WindowRef


class StoreLink:
    """The store as one worker uses it; ``connect`` may change it at any time. Loop thread only."""

    def __init__(self, config: PagedConfig, memory: NetworkMemory, counters: Counter[str]) -> None:
        self._config = config
        self._memory = memory
        self._counters = counters
        self._client: StoreClient | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.writer = StoreWriter(config.put_queue_bytes, counters)

    @property
    def connected(self) -> bool:
        """Whether there is a store at all; it may be dead."""
        return self._client is not None

    def connect(self, address: str | None) -> None:
        """Use the store at this address from now on; None: no store."""
        old, self._client = self._client, None
        if address is not None:
            from cedar.kvstore.client import StoreClient

            self._client = StoreClient(address, fingerprint=self._memory.network.fingerprint)
        self.writer.connect(self._client)
        if old is not None:
            task = asyncio.create_task(old.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def pages(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[int, memoryview]]:
        """(index, payload) of leading pages of ``keys``, verified; ends at the first that is missing or bad.

        The whole read ends after ``store_timeout_s``, however far it has come.
        """
        client = self._client
        if client is None:
            return
        try:
            async with asyncio.timeout(self._config.store_timeout_s):
                async with aclosing(client.get_pages(list(keys))) as values:
                    async for index, value in values:
                        payload = open_value(
                            value,
                            page_key=keys[index],
                            fingerprint=self._memory.network.fingerprint,
                            tokens=self._memory.model.page_tokens,
                            payload_bytes=self._memory.pages.page_bytes,
                        )
                        self._counters["store_pages_read"] += 1
                        yield index, payload
        except TimeoutError:
            self._counters["store_timeouts"] += 1
        except CorruptValue:
            self._counters["store_pages_corrupt"] += 1

    async def window(self, ref: WindowRef) -> bytes | None:
        """The window record of this name, or None when it is gone."""
        client = self._client
        if client is None:
            return None
        try:
            async with asyncio.timeout(self._config.store_timeout_s):
                record = await client.get_window(ref.page_key, ref.tokens, ref.digest)
        except TimeoutError:
            self._counters["store_timeouts"] += 1
            return None
        self._counters["store_windows_read" if record is not None else "store_windows_missed"] += 1
        return record

    async def close(self) -> None:
        """Write what is queued for a moment, then let the store go."""
        await self.writer.close(self._config.store_wait_s)
        self.connect(None)
        while self._closing:
            await asyncio.wait(list(self._closing))
