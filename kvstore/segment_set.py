"""The segments of one tier: opened at start, one of them open to writes, dropped from the old end."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cedar.kvstore.config import SsdConfig
from cedar.kvstore.eviction import SegmentFacts, effective_capacity_bytes
from cedar.kvstore.machine import allocated_bytes, free_disk_bytes
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import NoSegment, Segment, SegmentGone
from cedar.kvstore.segment_index import sync_path
from cedar.kvstore.segment_probe import index_opens_elsewhere

log = logging.getLogger(__name__)

OPEN_ATTEMPTS: Final = 2
"""A segment during whose opening the process died this often has its index tried in another one first."""
_ATTEMPTS_FILE: Final = "opening"
_UNREADABLE: Final = (errno.EIO, errno.EUCLEAN)


class SegmentSet:
    """Owner of the segment directory. The writer thread alone creates and closes segments to writes."""

    def __init__(self, config: SsdConfig) -> None:
        self._config = config
        self._directory = config.directory / "segments"
        self._durable = config.durability == "batch"
        self._segments: list[Segment] = []
        self._passed_over: list[Path] = []
        self._open: Segment | None = None
        self._next_number = 1
        self._lock = threading.Lock()

    @property
    def damaged(self) -> int:
        """How many segments were found damaged by ``load``, or could not be opened at all."""
        return len(self._passed_over) + sum(segment.damaged for segment in self._segments)

    @property
    def found_by_record(self) -> int:
        """How many pages ``load`` found although the index did not have them."""
        return sum(segment.found_by_record for segment in self._segments)

    def load(self) -> Iterator[tuple[Segment, bytes, Row]]:
        """Open every segment, oldest first, and give its rows in the order of their records."""
        if not self._directory.exists():
            return
        for path in sorted(p for p in self._directory.iterdir() if p.name.isdigit()):
            number = int(path.name)
            self._next_number = max(self._next_number, number + 1)
            try:
                segment, rows = self._load(path, number)
            except NoSegment as error:
                log.warning("segment removed: %s", error)
                shutil.rmtree(path, ignore_errors=True)
                continue
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise
                log.warning("segment %s cannot be opened now, and is left alone: %s", path.name, error)
                self._passed_over.append(path)
                continue
            self._segments.append(segment)
            for key, row in rows:
                yield segment, key, row
        if self._segments and not self._segments[-1].closed_to_writes:
            self._open = self._segments[-1]
        for segment in self._segments[:-1]:
            segment.closed_to_writes = True

    def all(self) -> list[Segment]:
        """A snapshot, oldest first."""
        with self._lock:
            return list(self._segments)

    def unindexed(self) -> list[Segment]:
        """Those whose index lacks something."""
        return [segment for segment in self.all() if segment.unindexed]

    def open_at(self, now_s: float) -> Segment | None:
        """The open segment, unless it is full or old by now."""
        current = self._open
        if current is None or now_s - current.created_s >= self._config.segment_s:
            return None
        return current if current.end_bytes < self._config.segment_bytes else None

    def for_writing(self, now_s: float) -> Segment:
        """The open segment, a new one when there is none or it is full or old. OSError."""
        current = self.open_at(now_s)
        if current is not None:
            return current
        self.close_to_writes()
        path = self._directory / f"{self._next_number:08d}"
        shutil.rmtree(path, ignore_errors=True)  # an attempt that failed half-way
        try:
            segment = Segment.create(path, self._next_number, durable=self._durable, created_s=now_s)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        with self._lock:
            self._next_number += 1
            self._segments.append(segment)
            self._open = segment
        return segment

    def close_to_writes(self) -> None:
        """No more commits into the open segment: the next one goes to a new segment."""
        with self._lock:
            if self._open is not None:
                self._open.closed_to_writes = True
                self._open = None

    def give_up_open(self) -> None:
        """A commit into the open segment failed: leave nothing of it, and no more commits there."""
        failed = self._open
        self.close_to_writes()
        if failed is not None:
            failed.cut_back()
            if not failed.end_bytes:
                self.drop(failed)

    def drop(self, segment: Segment) -> None:
        """Delete a segment from disk."""
        with self._lock:
            if segment is self._open:
                self._open = None
            segment.closed_to_writes = True
            if segment in self._segments:
                self._segments.remove(segment)
        segment.drop()

    def facts(self) -> list[SegmentFacts]:
        """What eviction needs to know of each."""
        return [
            SegmentFacts(s.number, s.allocated_bytes(), s.last_used_s or s.created_s, not s.closed_to_writes)
            for s in self.all()
        ]

    def usage_bytes(self) -> int:
        """Disk really taken, by segments that could not be opened too. OSError."""
        used = sum(segment.allocated_bytes() for segment in self.all())
        for path in self._passed_over:
            used += sum(allocated_bytes(file) for file in path.iterdir())
        return used

    def usage_and_capacity_bytes(self) -> tuple[int, int]:
        """Disk taken, and what may be taken now that the disk is as full as it is. OSError if unreadable."""
        usage = self.usage_bytes()
        capacity = effective_capacity_bytes(
            self._config.capacity_bytes,
            usage_bytes=usage,
            free_bytes=free_disk_bytes(self._config.directory),
            reserve_bytes=self._config.reserve_bytes,
        )
        return usage, capacity

    def close(self, *, sync: bool) -> None:
        """Close every segment; ``sync`` forces unsynced commits to disk first. OSError when that failed."""
        try:
            if sync:
                self.sync()
        finally:
            for segment in self.all():
                segment.close()

    def sync(self) -> None:
        """Force everything to disk that was written without. OSError."""
        for segment in self.all():
            with suppress(SegmentGone):
                segment.sync()
        if self._directory.exists():
            sync_path(self._directory)

    def _load(self, path: Path, number: int) -> tuple[Segment, list[tuple[bytes, Row]]]:
        attempts_file = path / _ATTEMPTS_FILE
        use_index = True
        try:
            attempts = len(attempts_file.read_bytes()) if attempts_file.exists() else 0
            use_index = attempts < OPEN_ATTEMPTS or index_opens_elsewhere(path)
            attempts_file.write_bytes(b"x" * (attempts + 1))
        except OSError as error:  # a full disk must not cost the segment
            log.warning("segment %s: cannot note the attempt to open it: %s", path.name, error)
        loaded = Segment.load(path, number, durable=self._durable, use_index=use_index)
        try:
            attempts_file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("segment %s: %s", path.name, error)
        return loaded
