"""A page store in memory with a disk that can be full, slow or wrong: ``kvstore.page_store.PageStore``.

``test_memory_pages.py`` runs the same histories on this and on ``SsdTier``. What survives a crash is in
``Disk``: pages from their commit on, and the small state files. Everything else of the store dies with its
process.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cedar.kvstore.clock import Clock
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.errors import CorruptValue, NotInMemory, Refused, StoreClosed
from cedar.kvstore.header import read_header, verify_value
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.ssd_tier import Run, StoredPage
from cedar.kvstore.stats import Counters, PageUse

T = TypeVar("T")
Later = Callable[[Callable[[], None]], None]
QUEUE_RETRY_S = 0.05


@dataclass
class Page:
    """One stored page."""

    value: bytes
    page_index: int
    tenant: bytes
    used_s: float
    put_s: float
    checked: bool = False  # these very bytes have been verified before: saves time, changes nothing


@dataclass
class Disk:
    """What outlives the process. ``on_commit(key, value)``: told of each page that is stored."""

    pages: dict[bytes, Page] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    full: bool = False
    slow: float = 1.0
    on_commit: Callable[[bytes, bytes], None] = lambda key, value: None

    def damage(self, key: bytes, position: int) -> None:
        """Flip a bit of a page."""
        page = self.pages[key]
        broken = bytearray(page.value)
        broken[position % len(broken)] ^= 1
        page.value, page.checked = bytes(broken), False


class DiskText:
    """``kvstore.state_file.StateText`` on a ``Disk``."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk = disk
        self._name = name

    def load(self) -> str | None:
        return self._disk.texts.get(self._name)

    def save(self, text: str) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "no space left on the simulated disk")
        self._disk.texts[self._name] = text


class InlineReaders(Executor):
    """Reader threads that do their work a moment later, all at once."""

    def __init__(self, later: Later) -> None:
        self._later = later
        self._closed = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        self._later(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True


class MemoryPages:
    """See ``SsdTier``, method by method.

    ``later(function)``: runs it when the disk has got to it. ``cold``: whether a read must wait for it.
    """

    def __init__(
        self,
        config: SsdConfig,
        clock: Clock,
        counters: Counters,
        disk: Disk,
        later: Later,
        cold: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        self.counters = counters
        self.tenants = config.tenant_table
        self._clock = clock
        self._disk = disk
        self._later = later
        self._cold = cold
        self._lost: dict[bytes, None] = {}
        self._jobs: list[tuple[list[PutItem], Future[PutCounts]]] = []
        self._queued_bytes = 0
        self._due = False
        self._closed = False

    # ---- writing ----

    def put(self, items: Sequence[PutItem]) -> Future[PutCounts]:
        if self._closed:
            raise StoreClosed("the store is closed")
        size = sum(len(item.value) for item in items)
        if self._queued_bytes and self._queued_bytes + size > self.config.queue_bytes:
            raise Refused("queue", QUEUE_RETRY_S)
        self._queued_bytes += size
        future: Future[PutCounts] = Future()
        future.set_running_or_notify_cancel()
        self._jobs.append(([replace(item, value=bytes(item.value)) for item in items], future))
        if not self._due:
            self._due = True
            self._later(self._commit)
        return future

    def _commit(self) -> None:
        self._due = False
        jobs, self._jobs, self._queued_bytes = self._jobs, [], 0
        now_s = self.now_s()
        answers = [self._store(items, now_s) for items, _ in jobs]
        for (_, future), counts in zip(jobs, answers, strict=True):
            for name, amount in (
                ("store_puts_stored", counts.stored),
                ("store_puts_present", counts.present),
                ("store_puts_conflict", counts.conflicts),
                ("store_puts_refused", counts.refused),
            ):
                self.counters.add(name, amount)
            future.set_result(counts)

    def _store(self, items: list[PutItem], now_s: float) -> PutCounts:
        counts = PutCounts()
        for item in items:
            same = self._same_as_stored(item, now_s)
            if same is None:
                if self._over_quota(item):
                    counts.add(PutCounts(refused=1, reason="quota"))
                    continue
                if self._disk.full:
                    counts.add(PutCounts(refused=1, reason="full"))
                    continue
                used_s = now_s if item.used_s is None else item.used_s
                page = Page(bytes(item.value), item.page_index, item.tenant, used_s, now_s)
                self._disk.pages[item.key] = page
                self._disk.on_commit(item.key, page.value)
                counts.stored += 1
            elif same:
                counts.present += 1
            else:
                counts.conflicts += 1
            if same is not None and item.used_s is None:
                self._disk.pages[item.key].used_s = now_s
        return counts

    def _same_as_stored(self, item: PutItem, now_s: float) -> bool | None:
        page = self._live(item.key, now_s)
        if page is None:
            return None
        try:
            if read_header(page.value) == read_header(item.value):
                return True
            verify_value(page.value, page_key=item.key)
            return False
        except CorruptValue as error:
            self._corrupt(item.key, error)
            return None

    def _over_quota(self, item: PutItem) -> bool:
        held = self.tenant_bytes().get(item.tenant, 0) if self.config.tenants else 0
        return held + len(item.value) > self.tenants.quota_bytes(item.tenant)

    # ---- reading ----

    def match(self, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        now_s = self.now_s()
        count = 0
        first: Page | None = None
        for key in keys:
            page = self._live(key, now_s)
            if page is None:
                break
            first = first or page
            page.used_s = now_s
            count += 1
        whose = tenant or (first.tenant if first else b"")
        self.counters.observer.looked_up("ssd", whose, len(keys), count)
        return count

    def get(self, key: bytes) -> bytes | None:
        found = self.read_run([key], 1, lambda views: bytes(views[0]), use=False)
        return found[1] if found else None

    def read_run(
        self,
        keys: Sequence[bytes],
        max_bytes: int,
        build: Callable[[list[memoryview]], T],
        *,
        use: bool = True,
    ) -> tuple[Run, T] | None:
        now_s = self.now_s()
        views: list[memoryview] = []
        size = 0
        for key in keys:
            page = self._live(key, now_s)
            if page is None:
                expired = key in self._disk.pages
                self.counters.add("store_page_expired" if expired else "store_page_misses")
                break
            if views and (len(page.value) != size or (len(views) + 1) * size > max_bytes):
                break
            if not self._sound(key, page):
                break
            size = len(page.value)
            views.append(memoryview(page.value))
        if not views:
            return None
        built = build(views)
        if use:
            uses = []
            for key in keys[: len(views)]:
                page = self._disk.pages[key]
                page.used_s = now_s
                uses.append(PageUse(page.tenant, now_s - page.put_s))
            self.counters.add("store_pages_read", len(views))
            self.counters.add("store_read_bytes", size * len(views))
            self.counters.observer.served("ssd", uses, size, read_header(views[0]).tokens)
        return Run(len(views), size), built

    def read_into(
        self,
        keys: Sequence[bytes],
        max_bytes: int,
        place: Callable[[int, int], Sequence[memoryview]],
        *,
        use: bool = True,
        wait: bool = True,
    ) -> Run | None:
        if not wait and (self._cold() or any(map(self.why_unsound, keys))):
            raise NotInMemory
        found = self.read_run(keys, max_bytes, lambda views: views, use=use)
        if found is None:
            return None
        run, values = found
        for value, view in zip(values, place(run.count, run.value_bytes), strict=True):
            view[:] = value
        return run

    def announce(self, keys: Sequence[bytes]) -> None:
        pass

    # ---- for other nodes, for operators ----

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        now_s = self.now_s()
        return [self._live(key, now_s) is not None for key in keys]

    def facts(self, key: bytes) -> tuple[int, bytes, float] | None:
        now_s = self.now_s()
        page = self._live(key, now_s)
        return None if page is None else (page.page_index, page.tenant, max(now_s - page.used_s, 0.0))

    def lost(self, key: bytes) -> bool:
        return key in self._lost

    def listing(self, portion: int) -> Iterator[list[bytes]]:
        now_s = self.now_s()
        pages = self._disk.pages
        live = [
            (-page.used_s, page.page_index, key) for key, page in pages.items() if self._lives(page, now_s)
        ]
        live.sort(key=lambda page: page[:2])
        for start in range(0, len(live), portion):
            yield [key for _, _, key in live[start : start + portion]]

    def page_tokens(self) -> int:
        for key in next(self.listing(16), []):
            return read_header(self._disk.pages[key].value).tokens
        return 0

    def describe(self, key: bytes) -> StoredPage | None:
        page = self._disk.pages.get(key)
        if page is None:
            return None
        now_s = self.now_s()
        return StoredPage(
            size=len(page.value),
            page_index=page.page_index,
            tenant=page.tenant,
            age_s=max(now_s - page.put_s, 0.0),
            idle_s=max(now_s - page.used_s, 0.0),
            ttl_left_s=page.used_s + self.tenants.ttl_s(page.tenant) - now_s,
            segment=1,
        )

    def why_unsound(self, key: bytes) -> str:
        page = self._live(key, self.now_s())
        if page is None:
            return "gone"
        try:
            verify_value(page.value, page_key=key)
        except CorruptValue as error:
            return error.reason
        return ""

    def keys_held(self, *, tenant: bytes = b"", segment: int = 0) -> list[bytes]:
        now_s = self.now_s()
        return [
            key
            for _, _, key in sorted(
                (page.tenant, page.page_index, key)
                for key, page in self._disk.pages.items()
                if self._lives(page, now_s) and tenant in (b"", page.tenant) and segment in (0, 1)
            )
        ]

    def tenant_bytes(self) -> dict[bytes, int]:
        held: dict[bytes, int] = {}
        for page in self._disk.pages.values():
            held[page.tenant] = held.get(page.tenant, 0) + len(page.value)
        return held

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        gone = [page for key in keys if (page := self._disk.pages.pop(key, None)) is not None]
        future.set_result(sum(len(page.value) for page in gone))
        return future

    def purge(self, tenant: bytes) -> tuple[list[bytes], int]:
        if self._jobs:
            self._commit()
        pages = self._disk.pages
        keys = [key for key, page in pages.items() if page.tenant == tenant]
        return keys, sum(len(pages.pop(key).value) for key in keys)

    def stats(self) -> dict[str, float]:
        return {
            "store_pages": float(len(self._disk.pages)),
            "store_page_bytes": float(sum(len(page.value) for page in self._disk.pages.values())),
            "store_queue_bytes": float(self._queued_bytes),
        }

    def check_integrity(self, *, deep: bool = False) -> None:
        assert self._queued_bytes == sum(len(item.value) for items, _ in self._jobs for item in items)
        if deep:
            for key in list(self._disk.pages):
                self.get(key)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._commit()

    # ---- inside ----

    def _lives(self, page: Page, now_s: float) -> bool:
        return page.used_s + self.tenants.ttl_s(page.tenant) > now_s

    def _live(self, key: bytes, now_s: float) -> Page | None:
        page = self._disk.pages.get(key)
        return page if page is not None and self._lives(page, now_s) else None

    def _sound(self, key: bytes, page: Page) -> bool:
        if not page.checked:
            try:
                verify_value(page.value, page_key=key)
            except CorruptValue as error:
                self._corrupt(key, error)
                return False
            page.checked = True
        return True

    def _corrupt(self, key: bytes, error: CorruptValue) -> None:
        del self._disk.pages[key]
        self._lost[key] = None
        self.counters.add("store_values_corrupt")
        self.counters.observer.quarantined(error.reason)
