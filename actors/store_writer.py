"""Write-behind to the store: pages and window records leave in the background, within a byte budget.

Nothing here is ever in a request's way: what does not fit the budget, or what the store refuses, is counted
and forgotten. A page that is lost is a later miss.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, Protocol

PUT_PAGES: Final = 16
PUT_BYTES: Final = 4 << 20
"""Limits of one put: what the store commits together."""


class PutCounts(Protocol):
    """The store's answer to a put."""

    @property
    def stored(self) -> int:
        """Pages taken."""

    @property
    def present(self) -> int:
        """Pages that were held already."""

    @property
    def conflicts(self) -> int:
        """Pages held already with other bytes."""

    @property
    def refused(self) -> int:
        """Pages not taken."""


class Store(Protocol):
    """The part of the store's client that is used here. Nothing of it raises for a store that is dead."""

    async def put_pages(self, keys: list[bytes], values: list[bytes], *, tenant: bytes = b"") -> PutCounts:
        """Store sealed values under their keys."""

    async def put_window(self, page_key: bytes, tokens: int, digest: bytes, record: bytes) -> bool:
        """File a window record; whether it was taken."""


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

    def put_page(self, key: bytes, value: bytes, receipt: Receipt) -> None:
        """Offer a sealed page."""
        self._put(_Page(key, value, receipt))

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
            batch = self._next()
            try:
                await self._write(batch)
            except Exception:  # a put never fails a request; the count is what operators watch
                self._counters["put_errors"] += 1
            for item in batch:
                self._bytes -= item.size
                item.receipt.pending -= 1
                if item.receipt.pending == 0:
                    item.receipt.settled.set()

    def _next(self) -> list[_Page | _Window]:
        """The next items that go in one call: pages of one request up to the limits, or one record."""
        batch = [self._queue.popleft()]
        size = batch[0].size
        while isinstance(batch[0], _Page) and self._queue and len(batch) < PUT_PAGES and size < PUT_BYTES:
            follower = self._queue[0]
            if not isinstance(follower, _Page) or follower.receipt is not batch[0].receipt:
                break
            batch.append(self._queue.popleft())
            size += follower.size
        return batch

    async def _write(self, batch: list[_Page | _Window]) -> None:
        store, receipt = self._store, batch[0].receipt
        if store is None:
            receipt.dropped += len(batch)
            return
        if isinstance(batch[0], _Window):
            one = batch[0]
            taken = await store.put_window(one.page_key, one.tokens, one.digest, one.record)
            receipt.window_stored = receipt.window_stored or taken
            self._counters["put_windows_stored" if taken else "put_windows_refused"] += 1
            return
        pages = [item for item in batch if isinstance(item, _Page)]
        answer = await store.put_pages(
            [p.key for p in pages], [p.value for p in pages], tenant=receipt.tenant
        )
        receipt.stored += answer.stored + answer.present
        self._counters["put_pages_stored"] += answer.stored
        self._counters["put_pages_present"] += answer.present
        self._counters["put_pages_conflicts"] += answer.conflicts
        self._counters["put_pages_refused"] += answer.refused
