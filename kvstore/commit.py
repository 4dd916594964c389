"""One group commit: new values into the open segment, then visible; or a reason why not.

A full map starts the next segment. A disk that fails or is full refuses puts for ``disk_retry_s`` and closes
the segment to writes (after a failed sync the next one may lie), then is tried again; reads are not touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import lmdb
from cedar.kvstore.clock import Clock
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.header import read_header
from cedar.kvstore.index import PageIndex
from cedar.kvstore.put import PutItem
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, SegmentDamaged
from cedar.kvstore.segment_set import SegmentSet
from cedar.kvstore.stats import Counters

log = logging.getLogger(__name__)


class Committer:
    """Writes batches; used by the writer thread alone."""

    def __init__(
        self,
        config: SsdConfig,
        clock: Clock,
        segments: SegmentSet,
        index: PageIndex,
        counters: Counters,
        on_pressure: Callable[[], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._segments = segments
        self._index = index
        self._counters = counters
        self._on_pressure = on_pressure
        self._retry_s = float("-inf")
        self._located: tuple[Segment, list[tuple[bytes, Row]]] | None = None

    def write(self, items: Mapping[bytes, PutItem], now_s: float) -> str:
        """Store all items in one transaction; "" when they are durable and visible, else "full" or "disk"."""
        size = sum(len(item.value) for item in items.values())
        if reason := self._refusal(size):
            return reason
        rows = {key: _row(item, now_s) for key, item in items.items()}
        values = [(key, item.value, rows[key]) for key, item in items.items()]
        started_s = time.monotonic()
        for _ in range(2):
            segment = None
            try:
                segment = self._segments.for_writing(now_s)
                segment.commit(values, self._rows_to_update(segment))
            except lmdb.MapFullError:
                self._segments.close_to_writes()
            except (lmdb.Error, OSError, SegmentDamaged) as error:
                self._fail(error, len(values))
                if segment is not None:
                    self._recover(segment)
                return "disk"
            else:
                self._counters.add("store_commits")
                self._counters.add("store_commit_values", len(values))
                self._counters.add("store_commit_seconds", time.monotonic() - started_s)
                self._counters.add("store_put_bytes", size)
                self._counters.observer.committed(len(values), time.monotonic() - started_s)
                for item in items.values():
                    tokens = read_header(item.value).tokens
                    self._counters.observer.stored("ssd", item.tenant, len(item.value), tokens)
                self._publish(segment, rows)
                return ""
        return "full"

    def finish(self) -> None:
        """Write the offsets that are still only in memory; losing them costs read-ahead, not data."""
        if self._located is not None:
            segment = self._located[0]
            rows = self._current_rows()
            self._located = None
            self.update_rows(segment, rows)

    def update_rows(self, segment: Segment, rows: list[tuple[bytes, Row]]) -> None:
        """Replace rows of stored pages, in any segment that is still there."""
        if not segment.hold():
            return
        try:
            segment.commit((), rows)
        except lmdb.Error as error:
            log.warning("segment %d: rows not updated: %s", segment.number, error)
        else:
            return
        finally:
            segment.let_go()
        self._recover(segment)

    def _recover(self, segment: Segment) -> None:
        """Keep a segment readable whose commit failed; one that is not any more goes to salvage."""
        try:
            segment.recover()
        except (lmdb.Error, OSError, SegmentDamaged) as error:
            log.warning("segment %d: %s", segment.number, error)
            self._counters.add("store_segments_damaged")
            self._index.remove_segment(segment)
            self._segments.condemn(segment)
            self._on_pressure()

    def _refusal(self, size: int) -> str:
        if self._clock.monotonic_s() < self._retry_s:
            return "disk"
        try:
            usage, capacity = self._segments.usage_and_capacity_bytes()
        except OSError as error:
            self._fail(error, 0)
            return "disk"
        if usage + size > self._config.high_watermark * capacity:
            self._on_pressure()
        return "full" if usage + size > capacity else ""

    def _fail(self, error: Exception, pages: int) -> None:
        log.warning("commit of %d pages failed: %s", pages, error)
        self._counters.add("store_commit_failures")
        self._located = None
        self._segments.close_to_writes()
        self._retry_s = self._clock.monotonic_s() + self._config.disk_retry_s
        self._on_pressure()

    def _rows_to_update(self, segment: Segment) -> list[tuple[bytes, Row]]:
        """Offsets of the last commit, which could only be known after it; they ride along with this one."""
        if self._located is None:
            return []
        if self._located[0] is not segment:
            self.finish()
            return []
        return self._current_rows()

    def _current_rows(self) -> list[tuple[bytes, Row]]:
        """The rows that know their offset by now, without those of pages that were lost meanwhile."""
        if self._located is None:
            return []
        segment, rows = self._located
        return [(key, row) for key, row in rows if self._index.is_in(key, segment)]

    def _publish(self, segment: Segment, rows: Mapping[bytes, Row]) -> None:
        try:
            offsets = segment.offsets(rows)
        except lmdb.Error:
            offsets = [0] * len(rows)
        located = []
        for (key, row), offset in zip(rows.items(), offsets, strict=True):
            located.append((key, replace(row, offset=offset)))
            self._index.insert(*located[-1], segment)
        self._located = (segment, located)


def _row(item: PutItem, now_s: float) -> Row:
    used_s = now_s if item.used_s is None else item.used_s
    return Row(len(item.value), used_s, item.page_index, item.tenant)
