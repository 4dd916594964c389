"""The tier of immutable pages on SSD: put, match and read over time-bucketed LMDB segments.

Threads: one writes (``group_commit``), one maintains (``maintenance``), any number read. Readers never wait
for the writer. All methods may block on the disk except ``match``, which looks at memory alone.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, TypeVar

import lmdb
from cedar.kvstore.clock import Clock, SystemClock
from cedar.kvstore.commit import Committer
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.directory_lock import DirectoryLock
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.group_commit import GroupCommit
from cedar.kvstore.header import read_header, verify_value
from cedar.kvstore.index import Entry, PageIndex
from cedar.kvstore.maintenance import Maintenance
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.quarantine import Quarantine
from cedar.kvstore.removal import Copies, copies_of, remove_pages
from cedar.kvstore.rows import UNKNOWN_TENANT, Row
from cedar.kvstore.segment import LMDB_PAGE_BYTES, Segment
from cedar.kvstore.segment_set import SegmentSet
from cedar.kvstore.stats import Counters, PageUse
from cedar.kvstore.store_time import StoreTime
from cedar.kvstore.usage_log import UsageLog
from cedar.kvstore.volatile_mark import VolatileMark

log = logging.getLogger(__name__)
T = TypeVar("T")
LookUp = Callable[[bytes], memoryview | None]

MAX_LOST: Final = 65_536
ERRORS_TO_CONDEMN: Final = 3
"""Reads that LMDB itself fails in one segment before the segment is taken out of service and salvaged."""


@dataclass(frozen=True, kw_only=True)
class StoredPage:
    """One page as the tier has it. ``age_s``: since it was stored; ``idle_s``: since its last use."""

    size: int
    page_index: int
    tenant: bytes
    age_s: float
    idle_s: float
    ttl_left_s: float
    segment: int


@dataclass(frozen=True)
class Run:
    """Leading pages read together: their keys, and what the reader built from them."""

    count: int
    value_bytes: int


class SsdTier:
    """The tier in ``config.directory``. StoreLocked when another process has it.

    ``background=False`` starts no maintenance thread: the caller runs ``maintenance.tick``.
    """

    def __init__(
        self,
        config: SsdConfig,
        *,
        clock: Clock | None = None,
        counters: Counters | None = None,
        background: bool = True,
    ) -> None:
        self.config = config
        self.counters = counters or Counters()
        clock = clock or SystemClock()
        config.directory.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(config.directory)
        segments: SegmentSet | None = None
        try:
            self._volatile = VolatileMark(config.directory, clock)
            if config.durability == "none":
                self._volatile.set()
            self._segments = segments = SegmentSet(config)
            self.tenants = config.tenant_table
            self._lost: OrderedDict[bytes, None] = OrderedDict()
            self._index = PageIndex(self.tenants.ttl_s, config.usage_grain_s)
            floor_s = self._load_index()
            uses = UsageLog(
                config.directory / "uses", period_s=config.segment_s, keep_s=self.tenants.longest_ttl_s
            )
            for key, used_s in uses.read():
                self._index.remember_use(key, used_s)
                floor_s = max(floor_s, used_s)
            self._time = StoreTime(
                clock, config.directory / "time.json", floor_s=floor_s, max_gap_s=config.max_restart_gap_s
            )
            self._quarantine = Quarantine(config.directory / "quarantine", config.quarantine_bytes)
        except BaseException:
            if segments is not None:
                segments.close(sync=False)
            self._lock.release()
            raise
        self._errors: dict[int, int] = {}
        self._closed = False
        self._pid = os.getpid()
        self._committer = committer = Committer(
            config, clock, self._segments, self._index, self.counters, self._press
        )
        self._writer = GroupCommit(
            config,
            committer,
            self._index,
            self.counters,
            now_s=self._time.now_s,
            tenants=self.tenants,
            on_quota=lambda tenant: self.maintenance.over_quota(tenant),
            on_corrupt=self._corrupt,
        )
        self.maintenance = Maintenance(
            config,
            self._time,
            self._segments,
            self._index,
            uses,
            self.counters,
            self._writer,
            read=self.get,
            tenants=self.tenants,
            remove=self.remove,
        )
        if background:
            self.maintenance.start()

    # ---- writing ----

    def put(self, items: Sequence[PutItem]) -> Future[PutCounts]:
        """Store verified values; the future is set when they are durable. Refused when the queue is full."""
        return self._writer.submit(items)

    # ---- reading ----

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are held. Counts as a use of them: their holder may never fetch the head."""
        now_s = self._time.now_s()
        count = self._index.use_leading(keys, now_s)
        first = self._index.get(keys[0]) if count else None
        self.counters.observer.looked_up("ssd", first.tenant if first else b"", len(keys), count)
        return count

    def get(self, key: bytes) -> bytes | None:
        """One verified value, or None. Not a use."""
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
        """Verify leading pages of one size, at most ``max_bytes`` of them, and build something from views.

        At least one page if the first is held, else None. The run ends before the first page that is missing,
        expired, damaged or of another size. ``build`` must copy: the views die when it returns.
        """
        now_s = self._time.now_s()
        with ExitStack() as stack:
            views: list[memoryview] = []
            uses: list[PageUse] = []
            look_ups: dict[Segment, LookUp] = {}
            size = page_tokens = 0
            for key in keys:
                entry = self._index.live(key, now_s)
                if entry is None:
                    self._count_miss(key)
                    break
                if views and (entry.size != size or (len(views) + 1) * size > max_bytes):
                    break
                view = self._view(key, entry, look_ups, stack)
                if view is None:
                    break
                size = entry.size
                views.append(view)
                uses.append(PageUse(entry.tenant, now_s - entry.put_s))
            if not views:
                return None
            page_tokens = read_header(views[0]).tokens
            built = build(views)
        served = keys[: len(views)]
        if use:
            self._index.touch(served, now_s)
            self.maintenance.served(served, now_s)
            self.counters.add("store_pages_read", len(served))
            self.counters.add("store_read_bytes", size * len(served))
            self.counters.observer.served("ssd", uses, size, page_tokens)
        return Run(len(served), size), built

    def announce(self, keys: Sequence[bytes]) -> None:
        """Let the kernel start reading these pages, before the first of them is read."""
        now_s = self._time.now_s()
        stretches: list[tuple[Segment, int, int]] = []  # pages stored together are read in one go
        for key in keys:
            entry = self._index.live(key, now_s)
            if entry is None:
                break
            end = entry.offset + entry.size
            if stretches:
                segment, start, until = stretches[-1]
                if entry.segment is segment and 0 <= entry.offset - until < LMDB_PAGE_BYTES:
                    stretches[-1] = (segment, start, end)
                    continue
            stretches.append((entry.segment, entry.offset, end))
        for segment, start, end in stretches:
            if segment.hold():
                segment.announce(start, end - start)
                segment.let_go()

    # ---- for other nodes ----

    def now_s(self) -> float:
        """Store time."""
        return self._time.now_s()

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these can be served. Not a use."""
        now_s = self._time.now_s()
        return [self._index.live(key, now_s) is not None for key in keys]

    def facts(self, key: bytes) -> tuple[int, bytes, float] | None:
        """(place in its chain, tenant, seconds since its last use) of a page that can be served."""
        now_s = self._time.now_s()
        entry = self._index.live(key, now_s)
        return None if entry is None else (entry.page_index, entry.tenant, max(now_s - entry.used_s, 0.0))

    def lost(self, key: bytes) -> bool:
        """Whether this page was here and turned out damaged."""
        return key in self._lost

    def listing(self, portion: int) -> Iterator[list[bytes]]:
        """Keys of all pages in portions: young segments first, in each the last used first, heads first."""
        now_s = self._time.now_s()
        for segment in reversed(self._segments.all()):
            live = [(k, e) for k, e in self._index.current_keys(segment) if e.used_s + e.ttl_s > now_s]
            live.sort(key=lambda page: (-page[1].used_s, page[1].page_index))
            for start in range(0, len(live), portion):
                yield [key for key, _ in live[start : start + portion]]

    # ---- for operators ----

    def page_tokens(self) -> int:
        """Tokens of a page, as the first readable page held says; 0 when there is none. Not a use."""
        for key in next(self.listing(16), []):
            entry = self._index.get(key)
            if entry is None or not entry.segment.hold():
                continue
            try:
                header = entry.segment.header(key, entry.offset, entry.size)
            except (CorruptValue, lmdb.Error):
                continue
            finally:
                entry.segment.let_go()
            if header is not None:
                return header.tokens
        return 0

    def describe(self, key: bytes) -> StoredPage | None:
        """What is known of a page, expired or not. Not a use."""
        entry = self._index.get(key)
        if entry is None or entry.segment.dropped:
            return None
        now_s = self._time.now_s()
        return StoredPage(
            size=entry.size,
            page_index=entry.page_index,
            tenant=entry.tenant,
            age_s=max(now_s - entry.put_s, 0.0),
            idle_s=max(now_s - entry.used_s, 0.0),
            ttl_left_s=entry.used_s + entry.ttl_s - now_s,
            segment=entry.segment.number,
        )

    def why_unsound(self, key: bytes) -> str:
        """Reads a page and says why it cannot be served: "" if it can, "gone" if it is not here.

        Changes nothing, unlike ``get``, which quarantines a bad page.
        """
        entry = self._index.live(key, self._time.now_s())
        if entry is None or not entry.segment.hold():
            return "gone"
        try:
            entry.segment.expect_readable(entry.offset, entry.size)
            with entry.segment.reading() as look_up:
                view = look_up(key)
                if view is None:
                    return "key"
                verify_value(view, page_key=key)
        except CorruptValue as error:
            return error.reason
        except lmdb.Error as error:
            return type(error).__name__
        finally:
            entry.segment.let_go()
        return ""

    def keys_held(self, *, tenant: bytes = b"", segment: int = 0) -> list[bytes]:
        """Keys of all pages that can be served (of a tenant, of a segment), chain heads first."""
        now_s = self._time.now_s()
        chosen = [
            (entry.tenant, entry.page_index, key)
            for key, entry in self._index.items()
            if entry.used_s + entry.ttl_s > now_s
            and tenant in (b"", entry.tenant)
            and segment in (0, entry.segment.number)
        ]
        return [key for _, _, key in sorted(chosen)]

    def tenant_bytes(self) -> dict[bytes, int]:
        """Bytes of the values held, by tenant."""
        return self._index.tenants()

    # ---- removal ----

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """Remove pages and take their bytes off the disk; bytes that went. Runs on the writer thread."""

        def chore() -> int:
            copies: Copies = {}
            for key in keys:
                entry = self._index.get(key)
                if entry is not None:
                    row = Row(entry.size, entry.used_s, entry.page_index, entry.tenant, entry.offset)
                    copies.setdefault(entry.segment, {})[key] = row
            return self._removed(copies)

        return self._writer.call(chore)

    def purge(self, tenant: bytes) -> tuple[list[bytes], int]:
        """Remove all pages of a tenant, and those of which nobody knows the tenant: (keys, bytes) that went.

        Covers every put that was submitted before, older copies, quarantined and damaged data. Blocks.
        """
        tenants = {tenant, UNKNOWN_TENANT}
        self.maintenance.discard_damaged()
        closed = [segment for segment in self._segments.all() if segment.closed_to_writes]
        copies = copies_of(closed, tenants)

        def chore() -> int:
            seen = set(closed)
            copies.update(copies_of([s for s in self._segments.all() if s not in seen], tenants))
            return self._removed(copies)

        size = self._writer.call(chore).result()
        self._quarantine.purge(tenants)
        return [key for rows in copies.values() for key in rows], size

    def _removed(self, copies: Copies) -> int:
        def not_erased() -> None:
            self.counters.add("store_erase_failures")

        return remove_pages(self._index, self._committer, copies, not_erased)

    # ---- upkeep ----

    def stats(self) -> dict[str, float]:
        """Gauges, by name."""
        return {
            "store_pages": float(len(self._index)),
            "store_page_bytes": float(self._index.value_bytes),
            "store_segments": float(len(self._segments.all())),
            "store_disk_bytes": float(self._segments.usage_bytes()),
            "store_capacity_bytes": float(self.config.capacity_bytes),
            "store_queue_bytes": float(self._writer.queued_bytes),
        }

    def check_integrity(self, *, deep: bool = False) -> None:
        """AssertionError when the books do not balance; ``deep`` also reads and verifies every page."""
        self._index.check_integrity()
        segments = set(self._segments.all())
        for key, entry in self._index.items():
            assert entry.segment in segments, f"page {key.hex()} is in a segment that is gone"
            if deep:
                assert self.get(key) is not None or self._index.get(key) is not entry, (
                    f"page {key.hex()} unreadable"
                )

    def close(self) -> None:
        """Commit what is queued, stop the threads, close the segments. May be called again.

        In a forked child it does nothing: all of this is the parent's.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.maintenance.stop()
        self._writer.stop()
        self.maintenance.save()
        try:
            self._segments.close(sync=self._volatile.marked)
            self._volatile.clear()
        except (
            lmdb.Error,
            OSError,
        ) as error:  # the mark stays, should the machine go down before it is on disk
            log.warning("store %s: not everything is on disk: %s", self.config.directory, error)
        finally:
            self._lock.release()

    def _load_index(self) -> float:
        """Fill the index from the segments; the youngest store time found."""
        youngest_s = 0.0
        for segment, key, row in self._segments.load():
            youngest_s = max(youngest_s, row.used_s)
            if row.dead:
                entry = self._index.get(key)
                if entry is not None and entry.segment is segment:
                    self._index.remove(key, segment)
            else:
                self._index.insert(key, row, segment)
        return youngest_s

    def _view(
        self, key: bytes, entry: Entry, look_ups: dict[Segment, LookUp], stack: ExitStack
    ) -> memoryview | None:
        """A verified view that lives as long as ``stack``; None when the page cannot be served."""
        segment = entry.segment
        try:
            if segment not in look_ups:
                if not segment.hold():
                    return None
                stack.callback(segment.let_go)
                look_ups[segment] = stack.enter_context(segment.reading())
            segment.expect_readable(entry.offset, entry.size)
            view = look_ups[segment](key)
            if view is None:
                raise CorruptValue("key", "its segment has lost it")
            try:
                verify_value(view, page_key=key)
            except CorruptValue as error:
                self._quarantine.keep(key, error.reason, bytes(view), tenant=entry.tenant)
                raise
        except CorruptValue as error:
            self._corrupt(key, entry, error)
            return None
        except lmdb.Error as error:
            self._segment_error(key, entry, error)
            return None
        return view

    def _corrupt(self, key: bytes, entry: Entry, error: CorruptValue) -> None:
        if self._index.remove(key, entry.segment):
            self._note_lost(key)
            self.counters.add("store_values_corrupt")
            self.counters.observer.quarantined(error.reason)
            row = Row(entry.size, entry.used_s, entry.page_index, entry.tenant, entry.offset, dead=True)
            self._writer.mark_dead(entry.segment, key, row)
            log.warning("page %s: %s", key.hex(), error)

    def _segment_error(self, key: bytes, entry: Entry, error: lmdb.Error) -> None:
        """LMDB itself failed: forget the page, and after a few the whole segment."""
        segment = entry.segment
        self._note_lost(key)
        log.warning("segment %d: page %s: %s", segment.number, key.hex(), error)
        self._index.remove(key, segment)
        self._errors[segment.number] = self._errors.get(segment.number, 0) + 1
        if self._errors[segment.number] >= ERRORS_TO_CONDEMN and not segment.dropped:
            self.counters.add("store_segments_damaged")
            self._index.remove_segment(segment)
            self._segments.condemn(segment)
            self.maintenance.wake()

    def _note_lost(self, key: bytes) -> None:
        self._lost[key] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)

    def _count_miss(self, key: bytes) -> None:
        expired = self._index.get(key) is not None
        self.counters.add("store_page_expired" if expired else "store_page_misses")

    def _press(self) -> None:
        self.maintenance.wake()
