"""The tier of immutable pages on SSD: put, match and read over time-bucketed segments.

Threads: one writes (``group_commit``) and has another wait for the disk, one maintains (``maintenance``), any
number read. Readers never wait for the writer. All methods may block on the disk except ``match``, which
looks at memory alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from cedar.kvstore.clock import Clock, SystemClock
from cedar.kvstore.commit import Committer
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.group_commit import GroupCommit
from cedar.kvstore.index import PageIndex
from cedar.kvstore.judge import Judge
from cedar.kvstore.maintenance import Maintenance
from cedar.kvstore.page_reader import PageReader, Run
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.quarantine import Quarantine
from cedar.kvstore.removal import Copies, remove_pages
from cedar.kvstore.segment import Segment
from cedar.kvstore.segment_set import SegmentSet
from cedar.kvstore.stats import Counters
from cedar.kvstore.store_directory import StoreDirectory
from cedar.kvstore.store_time import StoreTime
from cedar.kvstore.usage_log import UsageLog

log = logging.getLogger(__name__)
T = TypeVar("T")

__all__ = ["Run", "SsdTier", "StoredPage"]


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


class SsdTier:
    """The tier in ``config.directory``. StoreLocked when another process has it.

    On a disk that is read-only it starts with what is there, and takes puts once the disk does.
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
        self._directory = StoreDirectory(config.directory, clock, volatile=config.durability == "none")
        segments: SegmentSet | None = None
        try:
            self._segments = segments = SegmentSet(config)
            self.tenants = config.tenant_table
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
            self._directory.release()
            raise
        self._closed = False
        self._pid = os.getpid()
        self._committer = committer = Committer(
            config,
            clock,
            self._segments,
            self._index,
            self.counters,
            prepare=self._prepare,
            on_pressure=lambda: self.maintenance.wake(),
        )
        judge = Judge(
            self._index,
            self.tenants,
            on_quota=lambda tenant: self.maintenance.over_quota(tenant),
            on_corrupt=lambda *what: self._reader.corrupt(*what),
        )
        self._writer = GroupCommit(
            config,
            committer,
            self._index,
            self.counters,
            judge,
            now_s=self._time.now_s,
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
        self._reader = PageReader(
            self._index,
            self.counters,
            self._quarantine,
            now_s=self._time.now_s,
            mark_dead=self._writer.mark_dead,
            served=self.maintenance.served,
        )
        if background:
            self.maintenance.start()

    # ---- writing ----

    def put(self, items: Sequence[PutItem]) -> Future[PutCounts]:
        """Store verified values; the future is set when they are durable. Refused when the queue is full."""
        return self._writer.submit(items)

    # ---- reading ----

    def match(self, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        """How many leading pages are held. Counts as a use of them: their holder may never fetch the head.

        ``tenant``: who looks, to whom it is booked; empty: whoever the first page found belongs to.
        """
        now_s = self._time.now_s()
        count = self._index.use_leading(keys, now_s)
        first = self._index.get(keys[0]) if count else None
        whose = tenant or (first.tenant if first else b"")
        self.counters.observer.looked_up("ssd", whose, len(keys), count)
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
        return self._reader.read_run(keys, max_bytes, build, use=use)

    def read_into(
        self,
        keys: Sequence[bytes],
        max_bytes: int,
        place: Callable[[int, int], Sequence[memoryview]],
        *,
        use: bool = True,
        wait: bool = True,
    ) -> Run | None:
        """Read leading pages, as ``read_run`` does, into memory of the caller's, and verify them there.

        ``place(count, value_bytes)`` gives that many writable views of that size; it is called once, if at
        all. The run may be shorter than it was told: what the other views hold then is nothing.
        ``wait=False``: never waits for the disk; NotInMemory when it would have to, or when a page is not
        sound, with nothing counted or changed: then read again and wait.
        """
        return self._reader.read_into(keys, max_bytes, place, use=use, wait=wait)

    def announce(self, keys: Sequence[bytes]) -> None:
        """Let the kernel start reading these pages, before the first of them is read."""
        self._reader.announce(keys)

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
        return self._reader.lost(key)

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
        found = (self._reader.tokens_of(key) for key in next(self.listing(16), []))
        return next((tokens for tokens in found if tokens), 0)

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
        return self._reader.why_unsound(key)

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
                    copies.setdefault(entry.segment, {})[entry.offset] = (key, entry.row())
            return self._removed(copies)

        return self._writer.call(chore)

    def purge(self, tenant: bytes) -> tuple[list[bytes], int]:
        """Remove all pages of a tenant, and data that belongs to nobody known: (keys, bytes) that went.

        Covers every put that was submitted before, older copies, quarantined and damaged data. Blocks.
        """
        closed = [segment for segment in self._segments.all() if segment.closed_to_writes]
        copies = self._copies(closed, tenant)

        def chore() -> int:
            seen = set(closed)
            copies.update(self._copies([s for s in self._segments.all() if s not in seen], tenant))
            return self._removed(copies)

        size = self._writer.call(chore).result()
        self._quarantine.purge(tenant)
        return [key for pages in copies.values() for key, _ in pages.values()], size

    def _copies(self, segments: Sequence[Segment], tenant: bytes) -> Copies:
        """What is there of a tenant, and the segments in which something is nobody's."""
        found: Copies = {}
        for segment in segments:
            pages = self._index.copies(segment, tenant)
            if pages or segment.unowned:
                found[segment] = pages
        return found

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
            self._segments.close(sync=self._directory.unsynced)
            self._directory.synced()
        except OSError as error:  # the mark stays, should the machine go down before it is on disk
            log.warning("store %s: not everything is on disk: %s", self.config.directory, error)
        finally:
            self._directory.release()

    def _prepare(self) -> None:
        """Before a commit: do what a start, or an earlier process, left undone. OSError, StoreLocked."""
        self._directory.prepare()
        if self.config.durability == "batch" and self._directory.unsynced:
            self._segments.sync()  # else a crash of the machine would take what is acknowledged from now on
            self._directory.synced()

    def _load_index(self) -> float:
        """Fill the index from the segments; the youngest store time found."""
        youngest_s = 0.0
        for segment, key, row in self._segments.load():
            youngest_s = max(youngest_s, row.used_s)
            if not row.dead:
                self._index.insert(key, row, segment)
            elif not row.erased:
                segment.left_over[row.offset] = (key, row)
        self.counters.add("store_segments_damaged", self._segments.damaged)
        self.counters.add("store_pages_found_by_record", self._segments.found_by_record)
        return youngest_s
