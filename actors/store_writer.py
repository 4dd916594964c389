"""Write-behind to the store: pages and window records leave in the background, within a byte budget.

Nothing here is ever in a request's way: what does not fit the budget, or what the store refuses, is counted
and forgotten. A page that is lost is a later miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from cedar.kvstore.connect import Store

_log = logging.getLogger(__name__)

PUT_PAGES: Final = 16
PUT_BYTES: Final = 4 << 20
"""Limits of one put: what the store commits together."""


@dataclass
class Receipt:
    """What one request asked to be stored, and what became of it."""

    tenant: bytes = b""
    offered: int = 0
    stored: int = 0  # held by the store now, by this put or before
    dropped: int = 0
    window_stored: bool = False
    pending: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, timeout_s: float) -> None:
        """Until everything offered so far has its answer, at most ``timeout_s``."""
        if self.pending:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.settled.wait()
            except TimeoutError:
                return


@dataclass(frozen=True)
class _Page:
    index: int
    key: bytes
    value: bytes
    receipt: Receipt

    @property
    def size(self) -> int:
        return len(self.value)


@dataclass(frozen=True)
class _Window:
    page_key: bytes
    tokens: int
    digest: bytes
    record: bytes
    receipt: Receipt

    @property
    def size(self) -> int:
        return len(self.record)


class StoreWriter:
    """One queue to the store. ``counters`` is the worker's; names begin with ``put_``."""

    def __init__(self, budget_bytes: int, counters: Counter[str]) -> None:
        self._budget = budget_bytes
        self._counters = counters
        self._store: Store | None = None
        self._queue: deque[_Page | _Window] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def connect(self, store: Store | None) -> None:
        """Write to this store from now on; None drops what is offered."""
        self._store = store

    def put_page(self, index: int, key: bytes, value: bytes, receipt: Receipt) -> None:
        """Offer the sealed page that is number ``index`` of its chain."""
        self._put(_Page(index, key, value, receipt))

    def put_window(
        self, page_key: bytes, tokens: int, digest: bytes, record: bytes, receipt: Receipt
    ) -> None:
        """Offer a window record."""
        self._put(_Window(page_key, tokens, digest, record, receipt))

    async def close(self, timeout_s: float) -> None:
        """Write what is queued for at most ``timeout_s``, then stop."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                while self._bytes:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            self._counters["put_abandoned"] += len(self._queue)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None

    def _put(self, item: _Page | _Window) -> None:
        kind = "pages" if isinstance(item, _Page) else "windows"
        item.receipt.offered += 1
        self._counters[f"put_{kind}_offered"] += 1
        if self._store is None or self._bytes + item.size > self._budget:
            item.receipt.dropped += 1
            self._counters[f"put_{kind}_dropped"] += 1
            return
        self._bytes += item.size
        self._queue.append(item)
        item.receipt.pending += 1
        item.receipt.settled.clear()
        self._more.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._more.clear()
                await self._more.wait()
            item = self._next()
            store = self._store
            try:
                if store is None:
                    self._counters["put_dropped_without_store"] += 1
                elif isinstance(item, _Window):
                    await self._write_window(store, item)
                else:
                    await self._write_pages(store, item)
            except Exception:
                _log.exception("a put failed")  # it never fails a request; the count is what is watched
                self._counters["put_errors"] += 1
            for done in [item] if isinstance(item, _Window) else item:
                self._bytes -= done.size
                done.receipt.pending -= 1
                if done.receipt.pending == 0:
                    done.receipt.settled.set()

    def _next(self) -> list[_Page] | _Window:
        """What goes in the next call: consecutive pages of one request up to the limits, or one record."""
        first = self._queue.popleft()
        if isinstance(first, _Window):
            return first
        batch, size = [first], first.size
        while self._queue and len(batch) < PUT_PAGES and size < PUT_BYTES:
            follower = self._queue[0]
            if (
                not isinstance(follower, _Page)
                or follower.receipt is not first.receipt
                or follower.index != batch[-1].index + 1
            ):
                break
            self._queue.popleft()
            batch.append(follower)
            size += follower.size
        return batch

    async def _write_window(self, store: Store, item: _Window) -> None:
        taken = await store.put_window(
            item.page_key, item.tokens, item.digest, item.record, tenant=item.receipt.tenant
        )
        item.receipt.window_stored = item.receipt.window_stored or taken
        self._counters["put_windows_stored" if taken else "put_windows_refused"] += 1

    async def _write_pages(self, store: Store, batch: list[_Page]) -> None:
        first = batch[0]
        keys, values = [page.key for page in batch], [page.value for page in batch]
        answer = await store.put_pages(keys, values, first_page=first.index, tenant=first.receipt.tenant)
        first.receipt.stored += answer.stored + answer.present
        self._counters["put_pages_stored"] += answer.stored
        self._counters["put_pages_present"] += answer.present
        self._counters["put_pages_conflicts"] += answer.conflicts
        self._counters["put_pages_refused"] += answer.refused
