"""The segments of one tier: opened at start, one of them open to writes, dropped from the old end."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.eviction import SegmentFacts, effective_capacity_bytes
from cedar.kvstore.machine import free_disk_bytes
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import DATA_FILE, Segment, SegmentDamaged, map_bytes_for
from cedar.kvstore.segment_probe import opens_elsewhere

log = logging.getLogger(__name__)

OPEN_ATTEMPTS: Final = 2
"""A segment during whose opening the process died this often is tried in another process first."""
_ATTEMPTS_FILE: Final = "opening"


class SegmentSet:
    """Owner of the segment directory. The writer thread alone creates and closes segments to writes."""

    def __init__(self, config: SsdConfig) -> None:
        self._config = config
        self._directory = config.directory / "segments"
        self.damaged_directory = config.directory / "damaged"
        self._directory.mkdir(exist_ok=True)
        self.damaged_directory.mkdir(exist_ok=True)
        self._durable = config.durability == "batch"
        self._map_bytes = map_bytes_for(config.segment_bytes)
        self._segments: list[Segment] = []
        self._open: Segment | None = None
        self._next_number = 1
        self._lock = threading.Lock()

    def load(self) -> Iterator[tuple[Segment, bytes, Row]]:
        """Open every segment, oldest first, and give its rows. One that cannot be walked is set aside."""
        for path in sorted(p for p in self._directory.iterdir() if p.name.isdigit()):
            number = int(path.name)
            self._next_number = max(self._next_number, number + 1)
            try:
                segment, rows = self._open_and_walk(path, number)
            except SegmentDamaged as error:
                log.warning("segment set aside: %s", error)
                self._set_aside(path)
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

    def for_writing(self, now_s: float) -> Segment:
        """The open segment, a new one when there is none or it is full or old. OSError, SegmentDamaged."""
        current = self._open
        if current is not None:
            too_old = now_s - current.created_s >= self._config.segment_s
            if not too_old and current.allocated_bytes() < self._config.segment_bytes:
                return current
            self.close_to_writes()
        path = self._directory / f"{self._next_number:08d}"
        shutil.rmtree(path, ignore_errors=True)  # an attempt that failed half-way
        try:
            segment = Segment(
                path, self._next_number, map_bytes=self._map_bytes, durable=self._durable, created_s=now_s
            )
        except (SegmentDamaged, OSError):
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

    def drop(self, segment: Segment) -> None:
        """Delete a segment from disk."""
        self._forget(segment)
        segment.drop()

    def condemn(self, segment: Segment) -> None:
        """Take a segment that fails out of service, keeping its file for salvage."""
        self._forget(segment)
        self._set_aside(segment.path)
        segment.close()

    def facts(self) -> list[SegmentFacts]:
        """What eviction needs to know of each."""
        return [
            SegmentFacts(s.number, s.allocated_bytes(), s.last_used_s or s.created_s, not s.closed_to_writes)
            for s in self.all()
        ]

    def usage_bytes(self) -> int:
        """Disk really taken, damaged segments included."""
        used = sum(segment.allocated_bytes() for segment in self.all())
        for path in self.damaged_directory.glob(f"*/{DATA_FILE}"):
            used += path.stat().st_blocks * 512
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
        """Close every segment; ``sync`` forces unsynced commits to disk first. lmdb.Error when one failed."""
        failed: lmdb.Error | None = None
        for segment in self.all():
            try:
                if sync:
                    segment.sync()
            except lmdb.Error as error:
                failed = error
            finally:
                segment.close()
        if failed is not None:
            raise failed

    def _forget(self, segment: Segment) -> None:
        with self._lock:
            if segment is self._open:
                self._open = None
            segment.closed_to_writes = True
            if segment in self._segments:
                self._segments.remove(segment)

    def _open_and_walk(self, path: Path, number: int) -> tuple[Segment, list[tuple[bytes, Row]]]:
        attempts_file = path / _ATTEMPTS_FILE
        try:
            attempts = len(attempts_file.read_bytes()) if attempts_file.exists() else 0
            if attempts >= OPEN_ATTEMPTS and not opens_elsewhere(path, self._map_bytes):
                raise SegmentDamaged(f"{path.name}: the process died {attempts} times while opening it")
            attempts_file.write_bytes(b"x" * (attempts + 1))
        except OSError as error:  # a full disk must not cost the segment
            log.warning("segment %s: cannot note the attempt to open it: %s", path.name, error)
        segment = Segment(
            path,
            number,
            map_bytes=self._map_bytes,
            durable=self._config.durability == "batch",
            created_s=None,
        )
        try:
            rows = list(segment.stored_rows())
        except SegmentDamaged:
            segment.close()
            raise
        for key, row in rows:
            segment.keys.append(key)
            segment.last_used_s = max(segment.last_used_s, row.used_s)
        attempts_file.unlink(missing_ok=True)
        return segment, rows

    def _set_aside(self, path: Path) -> None:
        target = self.damaged_directory / path.name
        shutil.rmtree(target, ignore_errors=True)
        try:
            path.rename(target)
        except OSError as error:
            log.warning("segment %s stays where it is until the next start: %s", path.name, error)
