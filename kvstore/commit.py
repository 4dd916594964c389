"""One group commit: new values into the open segment, then visible; or a reason why not.

A disk that fails or is full refuses puts for ``disk_retry_s`` and closes the segment to writes (after a
failed sync the next one may lie), then is tried again; reads are not touched. The index of a segment follows
its values by ``INDEX_LAG_S`` or ``INDEX_LAG_BYTES`` at most: that is what a start after a crash has to read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from cedar.kvstore.clock import Clock
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.errors import StoreLocked
from cedar.kvstore.header import read_header
from cedar.kvstore.index import PageIndex
from cedar.kvstore.put import PutItem
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, SegmentGone
from cedar.kvstore.segment_index import IndexDamaged
from cedar.kvstore.segment_set import SegmentSet
from cedar.kvstore.stats import Counters

log = logging.getLogger(__name__)

INDEX_LAG_BYTES: Final = 128 * MIB
INDEX_LAG_S: Final = 10.0
INDEX_RETRY_S: Final = 10.0


class Committer:
    """Writes batches; used by the writer thread alone.

    ``prepare``: called before every commit, to make what a first start could not. OSError, StoreLocked.
    """

    def __init__(
        self,
        config: SsdConfig,
        clock: Clock,
        segments: SegmentSet,
        index: PageIndex,
        counters: Counters,
        *,
        prepare: Callable[[], None],
        on_pressure: Callable[[], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._segments = segments
        self._index = index
        self._counters = counters
        self._prepare = prepare
        self._on_pressure = on_pressure
        self._retry_s = self._index_retry_s = float("-inf")
        self._indexed_s = clock.monotonic_s()

    def write(self, items: Mapping[bytes, PutItem], now_s: float) -> str:
        """Store all items together; "" when they are durable and visible, else "full" or "disk"."""
        size = sum(len(item.value) for item in items.values())
        started_s = time.monotonic()
        segment = None
        try:
            if self._clock.monotonic_s() < self._retry_s:
                return "disk"
            self._prepare()
            if self._is_full(size):
                return "full"
            segment = self._segments.for_writing(now_s)
            values = [(key, item.value, _row(item, now_s)) for key, item in items.items()]
            rows = segment.append(values)
        except (OSError, StoreLocked) as error:
            self._fail(error, len(items))
            return "disk"
        took_s = time.monotonic() - started_s
        self._counters.add("store_commits")
        self._counters.add("store_commit_values", len(rows))
        self._counters.add("store_commit_seconds", took_s)
        self._counters.add("store_put_bytes", size)
        self._counters.observer.committed(len(rows), took_s)
        for key, row in rows:
            item = items[key]
            self._counters.observer.stored("ssd", item.tenant, row.size, read_header(item.value).tokens)
            self._index.insert(key, row, segment)
        return ""

    def mark_dead(self, segment: Segment, rows: Iterable[tuple[bytes, Row]], *, erased: bool = False) -> None:
        """These pages are not to be found again after a restart."""
        if not segment.dropped:
            segment.mark_dead(rows, erased=erased)

    def keep_index(self, *, everything: bool = False) -> None:
        """Write the indices that have fallen behind, or all that lack anything."""
        now_s = self._clock.monotonic_s()
        late = now_s - self._indexed_s >= INDEX_LAG_S
        if late:
            self._indexed_s = now_s
        for segment in self._segments.unindexed():
            if everything or segment.closed_to_writes or late or segment.unindexed_bytes >= INDEX_LAG_BYTES:
                if not everything and now_s < self._index_retry_s:
                    return
                self.write_index(segment)

    def write_index(self, segment: Segment) -> bool:
        """Bring one index up to date; whether that worked. Nothing is lost when it does not."""
        try:
            self._counters.add("store_dead_readers", segment.write_index())
        except SegmentGone:
            return False
        except (IndexDamaged, OSError, MemoryError) as error:
            log.warning("segment %d: index not written, will try again: %s", segment.number, error)
            self._index_retry_s = self._clock.monotonic_s() + INDEX_RETRY_S
            return False
        return True

    def _is_full(self, size: int) -> bool:
        usage, capacity = self._segments.usage_and_capacity_bytes()
        if usage + size > self._config.high_watermark * capacity:
            self._on_pressure()
        return usage + size > capacity

    def _fail(self, error: Exception, pages: int) -> None:
        log.warning("commit of %d pages failed: %s", pages, error)
        self._counters.add("store_commit_failures")
        self._segments.give_up_open()
        self._retry_s = self._clock.monotonic_s() + self._config.disk_retry_s
        self._on_pressure()


def _row(item: PutItem, now_s: float) -> Row:
    used_s = now_s if item.used_s is None else item.used_s
    return Row(len(item.value), used_s, item.page_index, item.tenant)
