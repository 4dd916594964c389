"""A segment: the pages written in one stretch of time, in a values file, and an LMDB index of its records.

A page is stored when its record is in the values file and the file is synced; nothing else is waited for.
The index follows some time later (``write_index``). At a start it says what is in the file as far as it goes;
the rest, and whatever of it is missing or damaged, is found by reading the records themselves. So no state
of the index can lose a page, and all of it can be lost.

Segments are filled by one writer, then only read, and dropped whole. Records are never moved or rewritten.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from cedar.kvstore import segment_index
from cedar.kvstore.erase import erase
from cedar.kvstore.header import HEADER_BYTES, ValueHeader, read_header
from cedar.kvstore.machine import allocated_bytes
from cedar.kvstore.records import BLOCK_BYTES, Scan, extent, laid_out, scan
from cedar.kvstore.rows import Row
from cedar.kvstore.segment_index import INDEX_FILE, LOCK_FILE, IndexDamaged, IndexRows, read_index, sync_path
from cedar.kvstore.values_file import ValuesFile

log = logging.getLogger(__name__)

VALUES_FILE: Final = "values.dat"


class NoSegment(Exception):
    """The directory holds nothing that this build understands."""


class SegmentGone(Exception):
    """The segment was dropped, or its store closed, in the meantime."""


class Segment:
    """An open segment. Methods under "writing" belong to the writer thread; others may be called from any."""

    def __init__(
        self, path: Path, number: int, file: ValuesFile, *, durable: bool, created_s: float, end: int = 0
    ) -> None:
        self.path = path
        self.number = number
        self.created_s = created_s
        self.keys: list[bytes] = []  # all ever stored here; the page index knows the current ones
        self.last_used_s = 0.0  # youngest use recorded in a row here
        self.closed_to_writes = False
        self.damaged = False  # something had to be found by reading records that the index should have had
        self.found_by_record = 0  # pages that the index did not have at the start
        self.live_pages = 0  # kept by the page index, like the next
        self.left_over: dict[int, tuple[bytes, Row]] = {}  # records that are not served, but still on disk
        self.unowned: list[tuple[int, int]] = []  # (offset, bytes) of what is no whole record
        self.unindexed_bytes = 0  # of values whose rows are not in the index yet
        self._file: ValuesFile | None = file
        self._end = self._written = end  # of what is stored, and of what is written
        self._durable = durable
        self._unindexed: dict[int, tuple[bytes, Row]] = {}
        self._index_anew = False
        self._settled_bytes: int | None = None

    @classmethod
    def create(cls, path: Path, number: int, *, durable: bool, created_s: float) -> Segment:
        """A new, empty segment. OSError."""
        path.mkdir(parents=True)
        file = ValuesFile(path / VALUES_FILE, create=True)
        if durable:
            sync_path(path)
            sync_path(path.parent)
        return cls(path, number, file, durable=durable, created_s=created_s)

    @classmethod
    def load(
        cls, path: Path, number: int, *, durable: bool, use_index: bool = True
    ) -> tuple[Segment, list[tuple[bytes, Row]]]:
        """What is in ``path``: the segment, and its rows in the order of their records.

        Records that the index does not have are looked for, verified, and on disk when this returns.
        NoSegment; OSError when that cannot be done now: EIO for the disk's fault, others for somebody else's
        (no memory, no descriptors, no permission).
        """
        try:
            file = ValuesFile(path / VALUES_FILE)
        except FileNotFoundError:
            raise NoSegment(f"{path.name}: no {VALUES_FILE}") from None
        segment = cls(path, number, file, durable=durable, created_s=0.0)
        indexed = segment._indexed(use_index)
        known, gaps, tail = _tiles(indexed.rows, file.size())
        found = scan(file, [*gaps, tail], segment=number)
        forgotten = any(row.offset < tail[0] for _, row in found.rows)  # by an index that has later ones
        segment.damaged |= indexed.damaged or forgotten or len(known) < len(indexed.rows)
        segment._index_anew |= segment.damaged
        if known:
            segment.created_s = indexed.created_s
        elif found.created_s is not None:
            segment.created_s = found.created_s
        segment._take_up(known, found)
        rows = sorted([*known, *found.rows], key=lambda pair: pair[1].offset)
        if segment.damaged:
            counts = (len(found.rows), len(rows))
            log.warning("segment %s: %d of %d pages found by their records", path.name, *counts)
        for key, row in rows:
            segment.keys.append(key)
            segment.last_used_s = max(segment.last_used_s, row.used_s)
        segment.closed_to_writes |= segment.damaged or not rows
        return segment, rows

    @property
    def dropped(self) -> bool:
        """Whether the segment is gone (or going, once its last reader ends)."""
        return self._file is None

    @property
    def end_bytes(self) -> int:
        """Where the next record goes: about the size of all records."""
        return self._written

    @property
    def unindexed(self) -> bool:
        """Whether there are rows that the index does not have yet."""
        return bool(self._unindexed)

    def allocated_bytes(self) -> int:
        """Bytes that its files take on disk; 0 once dropped."""
        file = self._file
        if file is None:
            return 0
        if self._settled_bytes is not None:
            return self._settled_bytes
        size = file.allocated_bytes()
        size += sum(allocated_bytes(self.path / name) for name in (INDEX_FILE, LOCK_FILE))
        if self.closed_to_writes and not self._unindexed:
            self._settled_bytes = size
        return size

    # ---- writing (the writer thread) ----

    def append(self, values: Sequence[tuple[bytes, bytes | memoryview, Row]]) -> list[tuple[bytes, Row]]:
        """Write all values, and wait until they are on disk; their rows, with offsets.

        OSError: none of them is stored, and the segment should take no more (a later sync may lie).
        """
        rows = self.write(values)
        self.sync_values()
        self.stored(rows)
        return rows

    def write(self, values: Sequence[tuple[bytes, bytes | memoryview, Row]]) -> list[tuple[bytes, Row]]:
        """Write all values behind what was written before; their rows, with offsets. OSError as above."""
        file = self._opened()
        rows, pieces, end = laid_out(values, self._written, segment=self.number, created_s=self.created_s)
        file.write(self._written, pieces)
        self._written = end
        return rows

    def sync_values(self) -> None:
        """Wait until what is written is on disk, if it is to be. Any thread; OSError, SegmentGone."""
        if self._durable:
            self._opened().sync()

    def stored(self, rows: Sequence[tuple[bytes, Row]]) -> None:
        """These rows, in the order of writing, are on disk: they count from now on."""
        self.keys += [key for key, _ in rows]
        self._unindexed.update((row.offset, (key, row)) for key, row in rows)
        self.last_used_s = max(self.last_used_s, *(row.used_s for _, row in rows))
        self.unindexed_bytes += sum(row.size for _, row in rows)
        self._end = sum(extent(rows[-1][1]))

    def cut_back(self) -> None:
        """Take off the file what was written and is not stored, so that no later start finds it."""
        file = self._opened()
        size, self._written = self._written, self._end
        try:
            file.truncate(self._end)
        except OSError as error:
            log.warning("segment %d: a commit that failed stays in the file: %s", self.number, error)
            with suppress(OSError):  # XFS that has shut down does not tell even this
                size = file.size()
            if size > self._end:
                self.unowned.append((self._end, size - self._end))

    def mark_dead(self, rows: Iterable[tuple[bytes, Row]], *, erased: bool = False) -> None:
        """These pages are not to be found again; ``write_index`` makes that last."""
        for key, row in rows:
            self._note(key, replace(row, dead=True, erased=erased))
            if erased:
                self.left_over.pop(row.offset, None)

    def write_index(self) -> int:
        """Write the rows that the index lacks; how many dead readers it had.

        IndexDamaged, OSError: they will be written the next time.
        """
        self._opened()
        rows = list(self._unindexed.values())
        dead_readers = segment_index.write_index(
            self.path, rows, created_s=self.created_s, anew=self._index_anew, sync=self._durable
        )
        self._unindexed.clear()
        self.unindexed_bytes = 0
        self._index_anew = False
        self._settled_bytes = None
        return dead_readers

    def erase(self, rows: Iterable[Row] = ()) -> None:
        """Take the records of these rows, and what belongs to nobody, off the disk. OSError."""
        self._opened()
        stretches = [*map(extent, rows), *self.unowned]
        if stretches:
            erase(self.path / VALUES_FILE, stretches)
            self.unowned.clear()
            self._settled_bytes = None

    def sync(self) -> None:
        """Force everything to disk (for a clean stop without durability). OSError."""
        self._opened().sync()
        if (self.path / INDEX_FILE).exists():
            sync_path(self.path / INDEX_FILE)
        sync_path(self.path)

    # ---- reading ----

    def read(self, offset: int, size: int) -> memoryview:
        """The stored bytes of a value, unverified, to be read only. CorruptValue, SegmentGone.

        They stay readable as long as the view lives, and may change if the value is erased meanwhile.
        """
        return self._opened().read(offset, size)

    def read_into(self, offset: int, into: memoryview, *, wait: bool = True) -> None:
        """Fill ``into`` with the stored bytes of a value, unverified. CorruptValue, SegmentGone.

        NotInMemory when it may not ``wait`` for the disk and would have to.
        """
        self._opened().read_into(offset, into, wait=wait)

    def header(self, offset: int, size: int) -> ValueHeader:
        """Header of a stored value, payload unverified; CorruptValue when it is not one. SegmentGone."""
        head = bytearray(min(HEADER_BYTES, size))
        self._opened().read_into(offset, memoryview(head))
        return read_header(head, size)

    def announce(self, offset: int, size: int) -> None:
        """Let the kernel start reading values."""
        file = self._file
        if file is not None:
            file.announce(offset, size)

    # ---- end ----

    def drop(self) -> None:
        """Unlink the files now; the disk has their room again when the last reader is done."""
        self._file = None
        self.left_over.clear()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """No more reads and writes. Deletes nothing."""
        self._file = None

    def _opened(self) -> ValuesFile:
        file = self._file
        if file is None:
            raise SegmentGone(f"segment {self.number}")
        return file

    def _note(self, key: bytes, row: Row) -> None:
        self._unindexed[row.offset] = (key, row)

    def _indexed(self, use_index: bool) -> IndexRows:
        """What the index says; nothing when it cannot be used, and then it will be made anew."""
        try:
            if not use_index:
                raise IndexDamaged(f"{self.path.name}: whoever opens its index dies")
            found = read_index(self.path)
        except IndexDamaged as error:
            log.warning("segment %s", str(error))  # a log that keeps the error would keep the file open
            self._index_anew = True
            return IndexRows(0.0, [], True)
        if found is None:
            return IndexRows(0.0, [], False)
        self._index_anew = found.damaged
        return found

    def _take_up(self, known: Sequence[tuple[bytes, Row]], found: Scan) -> None:
        """Begin with these rows: know where the file ends, and see that what was found is on disk."""
        file = self._opened()
        if found.rows and self._durable:
            try:
                file.sync()  # a process that was killed may have left it in memory only
            except OSError as error:
                raise OSError(errno.EIO, f"what is behind its index cannot be synced: {error}") from error
        self.found_by_record = len(found.rows)
        for key, row in found.rows:
            self._note(key, row)
            self.unindexed_bytes += row.size
        if self._index_anew:
            for key, row in known:
                self._note(key, row)
        ends = [sum(extent(row)) for _, row in (*known[-1:], *found.rows[-1:])]
        self._end = max(ends, default=0)
        if found.unreadable:
            self._end = max(self._end, -(-file.size() // BLOCK_BYTES) * BLOCK_BYTES)
            self.damaged = True
        elif file.size() > self._end:
            self.cut_back()
            self.closed_to_writes = file.size() > self._end
        self._written = self._end
        self.unowned += [(at, size) for at, size in found.unowned if at + size <= self._end]


def _tiles(
    rows: Iterable[tuple[bytes, Row]], size: int
) -> tuple[list[tuple[bytes, Row]], list[tuple[int, int]], tuple[int, int]]:
    """Rows whose records can be in a file of ``size`` bytes, the gaps between them, what is behind them."""
    good: list[tuple[bytes, Row]] = []
    gaps: list[tuple[int, int]] = []
    position = 0
    for key, row in rows:
        start, length = extent(row)
        if start < position or start + length > size:
            continue
        if start > position:
            gaps.append((position, start))
        good.append((key, row))
        position = start + length
    return good, gaps, (position, size)
