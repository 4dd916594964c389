"""Records: what lies in a segment's values file, one after the other, each beginning at a multiple of 4 KiB.

    0  magic "CDRS"   4  version u16   6  tenant bytes u16   8  value bytes u32   12  place in its chain u32
    16 offset of the record u64        24 last use f64       32 creation of the segment f64
    40 number of the segment u64       48 tenant [64]        112 zero [8]
    120 xxh3_64 of bytes 0..120 and of the value's header
    128 the value: its own header (``header``), then the page; zeros up to the next multiple of 4 KiB

Little endian; times are store time. A record says everything that the index knows of it, and where it lies,
so the index can be made again from the records alone. A page of 227,840 bytes takes 56 blocks of 4 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import xxhash
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.rows import MAX_TENANT_BYTES, Row
from cedar.kvstore.values_file import ValuesFile

BLOCK_BYTES: Final = 4096
HEAD_BYTES: Final = 128
RECORD_VERSION: Final = 1
_MAGIC: Final = b"CDRS"
_FIELDS: Final = struct.Struct(f"<4sHHIIQddQ{MAX_TENANT_BYTES}s8x")
_CHECKSUM: Final = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEAD_BYTES
_KEY: Final = slice(HEAD_BYTES + 16, HEAD_BYTES + 48)
_WINDOW_BYTES: Final = 4 << 20
_ZEROS: Final = bytes(BLOCK_BYTES)


def span(value_bytes: int) -> int:
    """Bytes that a record of a value so large takes in the file."""
    return -(-(HEAD_BYTES + value_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def extent(row: Row) -> tuple[int, int]:
    """(offset, bytes) of a row's record in its file."""
    return row.offset - HEAD_BYTES, span(row.size)


def laid_out(
    values: Iterable[tuple[bytes, bytes | memoryview, Row]], at: int, *, segment: int, created_s: float
) -> tuple[list[tuple[bytes, Row]], list[bytes | memoryview], int]:
    """Records of (key, value, row) from offset ``at`` on: rows with offsets, the bytes in pieces, the end."""
    rows: list[tuple[bytes, Row]] = []
    pieces: list[bytes | memoryview] = []
    between = b""  # zeros behind the record before
    for key, value, row in values:
        size, used_s, place, tenant = row.size, row.used_s, row.page_index, row.tenant
        rows.append((key, Row(size, used_s, place, tenant, at + HEAD_BYTES)))
        fields = _FIELDS.pack(
            _MAGIC, RECORD_VERSION, len(tenant), size, place, at, used_s, created_s, segment, tenant
        )
        checksum = _CHECKSUM.pack(_checksum(fields, value[:HEADER_BYTES]))
        pieces += (between + fields + checksum, value)
        taken = span(size)
        between = _ZEROS[: taken - HEAD_BYTES - size]
        at += taken
    pieces.append(between)
    return rows, pieces, at


@dataclass
class Scan:
    """What was found between two offsets. ``unowned``: (offset, bytes) stretches that are no whole record.

    ``unreadable``: some of it could not be read, so there may be more. ``created_s``: of the segment.
    """

    rows: list[tuple[bytes, Row]] = field(default_factory=list)
    unowned: list[tuple[int, int]] = field(default_factory=list)
    unreadable: bool = False
    created_s: float | None = None

    def no_record(self, at: int, size: int) -> None:
        """Note a stretch that belongs to nobody."""
        if self.unowned and sum(self.unowned[-1]) == at:
            at, size = self.unowned[-1][0], self.unowned.pop()[1] + size
        self.unowned.append((at, size))


def scan(file: ValuesFile, stretches: Iterable[tuple[int, int]], *, segment: int) -> Scan:
    """Find every whole record of ``segment`` in the (start, stop) stretches, verifying all values there."""
    found = Scan()
    window = _Window(file)
    for start, stop in stretches:
        at = start
        while at < stop:
            at = _look(window, at, stop, segment, found)
    return found


def _look(window: _Window, at: int, stop: int, segment: int, found: Scan) -> int:
    """Judge the block at ``at``; where to look next."""
    block = window.read(at, min(BLOCK_BYTES, stop - at))
    if block is None:
        found.unreadable = True
        return at + BLOCK_BYTES
    head = _read_head(block, at, segment)
    if head is None:
        if block == _ZEROS[: len(block)]:  # taken off the disk, or never written: often much of it
            return window.next_data(at + BLOCK_BYTES, stop)
        found.no_record(at, len(block))
        return at + BLOCK_BYTES
    key, row, created_s = head
    end = at + span(row.size)
    if end <= stop:
        value = window.read(row.offset, row.size)
        if value is None:
            found.unreadable = True
            return end
        try:
            verify_value(value, page_key=key)
        except CorruptValue:
            pass
        else:
            found.rows.append((key, row))
            found.created_s = created_s
            return end
    found.no_record(at, min(end, stop) - at)
    return end


def _read_head(block: memoryview, at: int, segment: int) -> tuple[bytes, Row, float] | None:
    if len(block) < HEAD_BYTES + HEADER_BYTES or bytes(block[:4]) != _MAGIC:
        return None
    fields, checksum = block[: _FIELDS.size], _CHECKSUM.unpack_from(block, _FIELDS.size)[0]
    if checksum != _checksum(fields, block[HEAD_BYTES : HEAD_BYTES + HEADER_BYTES]):
        return None
    _, version, length, size, page_index, offset, used_s, created_s, number, tenant = _FIELDS.unpack(fields)
    if version != RECORD_VERSION or offset != at or number != segment or length > MAX_TENANT_BYTES:
        return None
    row = Row(size, used_s, page_index, tenant[:length], at + HEAD_BYTES)
    return bytes(block[_KEY]), row, created_s


def _checksum(fields: bytes | memoryview, value_header: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(value_header)
    return int(digest.intdigest())


class _Window:
    """Reads a file from front to back in large pieces; None for what the disk cannot give."""

    def __init__(self, file: ValuesFile) -> None:
        self._file = file
        self._buffer = memoryview(bytearray(_WINDOW_BYTES))
        self._start = self._held = 0

    def read(self, at: int, size: int) -> memoryview | None:
        """These bytes, valid until the next call."""
        if size > _WINDOW_BYTES:
            return self._read_alone(at, size)
        if not self._start <= at <= at + size <= self._start + self._held:
            self._start = at
            self._held = min(_WINDOW_BYTES, max(self._file.size() - at, 0))
            try:
                self._file.read_into(at, self._buffer[: self._held])
            except CorruptValue:
                self._held = 0
                return self._read_alone(at, size)
        if at + size > self._start + self._held:
            return None
        return self._buffer[at - self._start : at - self._start + size]

    def next_data(self, at: int, stop: int) -> int:
        """The first block from ``at`` on that is no hole."""
        if at + BLOCK_BYTES <= self._start + self._held:
            return at
        return min(self._file.next_data(at) // BLOCK_BYTES * BLOCK_BYTES, stop) if at < stop else at

    def _read_alone(self, at: int, size: int) -> memoryview | None:
        alone = memoryview(bytearray(size))
        try:
            self._file.read_into(at, alone)
        except CorruptValue:
            return None
        return alone
