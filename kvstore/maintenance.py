"""Background work of the SSD tier, one ``tick`` at a time: expire, evict, carry forward, keep the time.

Decisions are made in ``eviction``; this carries them out. Nothing here may stop reads or puts for long, and a
round that fails is logged, counted, and tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import islice
from typing import Any, Final

from cedar.kvstore import eviction
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.errors import Refused, StoreClosed
from cedar.kvstore.eviction import PageFacts, TokenBucket
from cedar.kvstore.group_commit import GroupCommit
from cedar.kvstore.index import Entry, PageIndex
from cedar.kvstore.put import PutItem
from cedar.kvstore.segment import Segment
from cedar.kvstore.segment_set import SegmentSet
from cedar.kvstore.stats import Counters
from cedar.kvstore.store_time import StoreTime
from cedar.kvstore.tenants import QUOTA_LOW, TenantTable
from cedar.kvstore.usage_log import UsageLog

log = logging.getLogger(__name__)

MAX_WANTED: Final = 65_536
CARRIED_TOGETHER: Final = 16
_COMMIT_TIMEOUT_S: Final = 60.0


class Maintenance:
    """Background work of one tier; ``start`` runs ``tick`` on a thread, tests call it themselves."""

    def __init__(
        self,
        config: SsdConfig,
        time: StoreTime,
        segments: SegmentSet,
        index: PageIndex,
        uses: UsageLog,
        counters: Counters,
        writer: GroupCommit,
        *,
        read: Callable[[bytes], bytes | None],
        tenants: TenantTable,
        remove: Callable[[list[bytes]], Any],
    ) -> None:
        self._config = config
        self._time = time
        self._segments = segments
        self._index = index
        self._uses = uses
        self._counters = counters
        self._writer = writer
        self._read = read
        self._tenants = tenants
        self._remove = remove
        self._over_quota: dict[bytes, None] = {}
        self._wanted: dict[bytes, None] = {}
        rate = config.carry_bytes_per_s
        self._bucket = TokenBucket(rate, rate, time.now_s())
        self._flushed_s = time.now_s()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run in the background until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="cedar-store-maintenance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was being carried forward stays where it is."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def wake(self) -> None:
        """Do a round now."""
        self._wake.set()

    def served(self, keys: Sequence[bytes], now_s: float) -> None:
        """Pages were hit: note those whose segment is in the last quarter of its life."""
        for key in keys:
            entry = self._index.get(key)
            if entry is None or not entry.segment.closed_to_writes or len(self._wanted) >= MAX_WANTED:
                continue
            if eviction.in_last_quarter(entry.segment.last_used_s, now_s, self._config.ttl_s):
                self._wanted[key] = None

    def over_quota(self, tenant: bytes) -> None:
        """A tenant's put was refused for its quota: make room among its own pages."""
        self._over_quota[tenant] = None
        self._wake.set()

    def tick(self) -> None:
        """One round."""
        now_s = self._time.now_s()
        self._evict()
        self._evict_over_quota()
        self._expire(now_s)
        self._carry_wanted(now_s)
        if self._segments.unindexed():
            self._writer.keep_index()
        if now_s - self._flushed_s >= self._config.usage_flush_s:
            self._flushed_s = now_s
            self.save()
            self._uses.expire(now_s)

    def save(self) -> None:
        """Write the uses and the time that a restart should know. A disk that will not is logged."""
        try:
            self._uses.append(self._index.take_unlogged(), self._time.now_s())
            self._time.save()
        except OSError as error:
            log.warning("last uses not saved: %s", error)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.tick()
            except Exception:
                self._counters.add("store_maintenance_failures")
                log.exception("store maintenance failed, will try again")
            self._wake.wait(self._config.maintenance_s)
            self._wake.clear()

    def _evict(self) -> None:
        usage, capacity = self._segments.usage_and_capacity_bytes()
        victims = eviction.segments_to_evict(
            self._segments.facts(),
            usage_bytes=usage,
            capacity_bytes=capacity,
            high=self._config.high_watermark,
            low=self._config.low_watermark,
        )
        room = usage < capacity
        for segment in self._by_number(victims):
            budget = int(eviction.CARRY_SHARE * segment.allocated_bytes()) if room else 0
            self._carry(eviction.pages_worth_keeping(self._pages(segment), budget))
            self._drop(segment, "store_pages_evicted_capacity")

    def _evict_over_quota(self) -> None:
        while self._over_quota:
            tenant = next(iter(self._over_quota))
            del self._over_quota[tenant]
            excess = self._index.tenant_bytes(tenant) - QUOTA_LOW * self._tenants.quota_bytes(tenant)
            if excess <= 0:
                continue
            pages = [_facts(key, entry) for key, entry in self._index.items() if entry.tenant == tenant]
            victims = eviction.coldest_pages(pages, excess)
            try:
                self._remove(victims).result(_COMMIT_TIMEOUT_S)
            except (StoreClosed, FutureTimeout):
                return
            self._counters.add("store_pages_evicted_quota", len(victims))
            self._counters.observer.evicted("ssd", "quota", len(victims))

    def _expire(self, now_s: float) -> None:
        expired = eviction.expired_segments(self._segments.facts(), now_s, self._config.ttl_s)
        for segment in self._by_number(expired):
            in_use = eviction.pages_still_in_use(self._pages(segment), now_s, self._config.ttl_s)
            allowed = self._within_rate(in_use, now_s)
            if not self._carry(allowed) or len(allowed) < len(in_use):
                return  # go on in the next round; the pages are served from here until then
            self._drop(segment, "store_pages_evicted_expired")

    def _carry_wanted(self, now_s: float) -> None:
        while self._wanted and not self._stopping:
            wanted = list(islice(self._wanted, CARRIED_TOGETHER))
            live = [key for key in wanted if self._index.live(key, now_s) is not None]
            allowed = self._within_rate(live, now_s)
            if not self._carry(allowed):
                return
            limited = set(live[len(allowed) :])
            for key in wanted:
                if key not in limited:
                    self._wanted.pop(key, None)
            if limited:
                return

    def _within_rate(self, keys: Sequence[bytes], now_s: float) -> Sequence[bytes]:
        """The first of ``keys`` that may be carried now."""
        for count, key in enumerate(keys):
            entry = self._index.get(key)
            if entry is not None and not self._bucket.take(entry.size, now_s):
                return keys[:count]
        return keys

    def _carry(self, keys: Sequence[bytes]) -> bool:
        """Copy pages into the open segment, some in each commit; False when the tier takes no puts now."""
        start, together = 0, CARRIED_TOGETHER
        while start < len(keys):
            items = []
            for key in keys[start : start + together]:
                entry = self._index.get(key)
                value = self._read(key)
                if entry is not None and value is not None:
                    items.append(PutItem(key, value, entry.page_index, entry.tenant, entry.used_s))
            try:
                refused = self._writer.submit(items, carry=True).result(_COMMIT_TIMEOUT_S).refused
            except (Refused, StoreClosed, FutureTimeout):
                return False
            if not refused:
                start += together
            elif together > 1:
                together = 1  # there may be room for some
            else:
                return False
        return True

    def _drop(self, segment: Segment, counter: str) -> None:
        now_s = self._time.now_s()
        left_s = [e.used_s + e.ttl_s - now_s for _, e in self._index.current_keys(segment)]
        self._counters.add(counter, self._index.remove_segment(segment))
        self._counters.observer.evicted("ssd", counter.rpartition("_")[2], len(left_s), left_s)
        self._counters.add("store_segments_dropped")
        self._segments.drop(segment)

    def _pages(self, segment: Segment) -> list[PageFacts]:
        return [_facts(key, entry) for key, entry in self._index.current_keys(segment)]

    def _by_number(self, numbers: list[int]) -> list[Segment]:
        wanted = set(numbers)
        return [segment for segment in self._segments.all() if segment.number in wanted]


def _facts(key: bytes, entry: Entry) -> PageFacts:
    return PageFacts(key, entry.size, entry.put_s, entry.used_s, entry.page_index, entry.ttl_s)
