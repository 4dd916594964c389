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
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.connect import Store, connect
from cedar.kvstore.header import HEADER_BYTES, read_header

if TYPE_CHECKING:
    from cedar.v1.stages_pb2 import WindowRef, WorkerStatus


class StoreLink:
    """The store as one worker uses it; ``connect`` may change it at any time. Loop thread only."""

    def __init__(self, config: PagedConfig, memory: NetworkMemory, counters: Counter[str]) -> None:
        self._config = config
        self._memory = memory
        self._counters = counters
        self._target: str | None = None
        self._client: Store | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.writer = StoreWriter(config.put_queue_bytes, counters)

    @property
    def connected(self) -> bool:
        """Whether there is a store at all; it may be dead."""
        return self._client is not None

    def connect(self, target: str | None) -> None:
        """Use this store from now on (see ``kvstore.connect`` for how one is named); None: no store."""
        if target == self._target:
            return
        old, self._client, self._target = self._client, None, target
        if target is not None:
            patience_s = self._config.store_timeout_s
            config = ClientConfig(stall_timeout_s=patience_s, window_timeout_s=patience_s)
            fingerprint = self._memory.network.fingerprint
            tls = self._config.store_tls
            self._client = connect(target, fingerprint=fingerprint, config=config, tls=tls)
        self.writer.connect(self._client)
        if old is not None:
            task = asyncio.create_task(old.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def pages(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[int, memoryview]]:
        """(index, payload) of leading pages of ``keys``; ends at the first that is missing, bad or late.

        The client has verified key, model and checksum; what is left to see is that the page is of this size.
        """
        client = self._client
        if client is None:
            return
        async with aclosing(client.get_pages(keys)) as values:
            async for index, value in values:
                header = read_header(value)
                expected = (self._memory.model.page_tokens, self._memory.pages.page_bytes)
                if (header.tokens, header.payload_bytes) != expected:
                    self._counters["store_pages_foreign"] += 1
                    return
                self._counters["store_pages_read"] += 1
                yield index, value[HEADER_BYTES:]

    async def window(self, ref: WindowRef, tenant: bytes) -> bytes | None:
        """The window record of this name, or None when it is gone. ``tenant``: the domain of who asks."""
        client = self._client
        if client is None:
            return None
        record = await client.get_window(ref.page_key, ref.tokens, ref.digest, tenant=tenant)
        self._counters["store_windows_missed" if record is None else "store_windows_read"] += 1
        return record

    def describe(self, status: WorkerStatus) -> None:
        """Add the client's own counts to a status."""
        if self._client is not None:
            for name, value in self._client.counters.items():
                status.counters[f"store_client_{name}"] = value

    async def close(self) -> None:
        """Write what is queued for a moment, then let the store go."""
        await self.writer.close(self._config.store_wait_s)
        self.connect(None)
        while self._closing:
            await asyncio.wait(list(self._closing))
