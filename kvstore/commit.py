"""The steps of a group commit: new values into the open segment; synced, they are made visible.

A disk that fails or is full refuses puts for ``disk_retry_s`` and closes the segment to writes (after a
failed sync the next one may lie), then is tried again; reads are not touched. The index of a segment follows
its values by ``INDEX_LAG_S`` or ``INDEX_LAG_BYTES`` at most: that is what a start after a crash has to read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cedar.kvstore.clock import Clock
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.errors import StoreLocked
from cedar.kvstore.header import tokens_of
from cedar.kvstore.index import PageIndex
from cedar.kvstore.put import PutItem
from cedar.kvstore.records import span
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, SegmentGone
from cedar.kvstore.segment_index import IndexDamaged
from cedar.kvstore.segment_set import SegmentSet
from cedar.kvstore.stats import Counters

log = logging.getLogger(__name__)

INDEX_LAG_BYTES: Final = 128 * MIB
INDEX_LAG_S: Final = 10.0
INDEX_RETRY_S: Final = 10.0
MEASURE_BYTES: Final = 16 * MIB
MEASURE_S: Final = 0.05
"""So much is written, for so long, before the disk is asked again what is free: an answer costs 0.1 ms."""


class WriteFailed(Exception):
    """The open segment cannot be written: nothing that is written and not synced is worth anything."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Written:
    """Values that are written to ``segment`` and not synced."""

    segment: Segment
    items: Mapping[bytes, PutItem]
    rows: Sequence[tuple[bytes, Row]]
    began_s: float


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
        self._room_bytes = 0  # that surely fits below the high watermark, as of ``_measured_s``
        self._measured_s = float("-inf")

    def changes_segment(self, now_s: float) -> bool:
        """Whether the next write would go to another segment than the last."""
        return self._segments.open_at(now_s) is None

    def write(self, items: Mapping[bytes, PutItem], now_s: float) -> Written | str:
        """Write items to the open segment; "full" or "disk" if they are refused. WriteFailed."""
        began_s = time.monotonic()
        if self._clock.monotonic_s() < self._retry_s:
            return "disk"
        try:
            self._prepare()
            if self._is_full([len(item.value) for item in items.values()]):
                return "full"
            segment = self._segments.for_writing(now_s)
            values = [(key, item.value, _row(item, now_s)) for key, item in items.items()]
            return Written(segment, items, segment.write(values), began_s)
        except (OSError, StoreLocked) as error:
            raise WriteFailed(error) from error

    def publish(self, commit: Sequence[Written]) -> None:
        """What was written is on disk: make it visible."""
        if not commit:
            return
        sizes: dict[bytes, int] = {}
        for written in commit:
            written.segment.stored(written.rows)
            for key, row in written.rows:
                self._index.insert(key, row, written.segment)
                sizes[row.tenant] = sizes.get(row.tenant, 0) + row.size
        tokens = tokens_of(next(iter(commit[-1].items.values())).value)
        for tenant, size in sizes.items():
            self._counters.observer.stored("ssd", tenant, size, tokens)
        values = sum(len(written.rows) for written in commit)
        took_s = time.monotonic() - commit[0].began_s
        self._counters.add("store_commits")
        self._counters.add("store_commit_values", values)
        self._counters.add("store_commit_seconds", took_s)
        self._counters.add("store_put_bytes", sum(sizes.values()))
        self._counters.observer.committed(values, took_s)

    def fail(self, error: Exception, pages: int) -> None:
        """A write or a sync failed: close the segment, without what was not synced, and wait a while."""
        log.warning("commit of %d pages failed: %s", pages, error)
        self._counters.add("store_commit_failures")
        self._retry_s = self._clock.monotonic_s() + self._config.disk_retry_s
        self._segments.give_up_open()
        self._on_pressure()

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

    def _is_full(self, sizes: Sequence[int]) -> bool:
        """Whether these values do not fit. What is taken and free is looked up when it may have changed."""
        now_s = time.monotonic()
        taken = sum(map(span, sizes))
        if taken <= self._room_bytes and now_s < self._measured_s + MEASURE_S:
            self._room_bytes -= taken
            return False
        usage, capacity = self._segments.usage_and_capacity_bytes()
        wanted = usage + sum(sizes)
        high = int(self._config.high_watermark * capacity)
        if wanted > high:
            self._on_pressure()
        self._room_bytes = min(high - usage - taken, MEASURE_BYTES)
        self._measured_s = now_s
        return wanted > capacity


def _row(item: PutItem, now_s: float) -> Row:
    used_s = now_s if item.used_s is None else item.used_s
    return Row(len(item.value), used_s, item.page_index, item.tenant)
