"""A pack: many stored values in one file or object, for the cold tier and for export and import.

    0         magic "CDRPACK1"
    8         values back to back, each a whole stored value (``header``): key, model and checksum inside
    footer    one record a value: key [32], offset u64, size u32, place u32, age s f64, tenant u8 + bytes
    last 48   footer offset u64, footer bytes u64, values u64, "CDRPEND1", xxh3_128 of footer and this [16]

Little endian. The footer is written last, so a pack that was cut short has none and is refused whole. Every
value is verified again when it is read: bytes that rotted in a pack are a lost page, never a wrong one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.keys import KEY_BYTES
from cedar.kvstore.rows import MAX_TENANT_BYTES

MAX_PACK_VALUES: Final = 1 << 22
_MAGIC: Final = b"CDRPACK1"
_END_MAGIC: Final = b"CDRPEND1"
_RECORD: Final = struct.Struct("<32sQIIdB")
_TRAILER: Final = struct.Struct("<QQQ8s")
_CHECKSUM_BYTES: Final = 16
TRAILER_BYTES: Final = _TRAILER.size + _CHECKSUM_BYTES


class BadPack(ValueError):
    """Not a whole pack: cut short, damaged in its footer, or something else altogether."""


@dataclass(frozen=True)
class PackedPage:
    """One value of a pack. ``offset`` is from the pack's start; ``age_s``: since its last use, at packing."""

    key: bytes
    offset: int
    size: int
    page_index: int = 0
    tenant: bytes = b""
    age_s: float = 0.0


@dataclass(frozen=True)
class Page:
    """A page on its way into a pack or out of one: its stored value, and what its store knew of it."""

    key: bytes
    value: bytes | memoryview
    page_index: int = 0
    tenant: bytes = b""
    age_s: float = 0.0


class Sink(Protocol):
    """What a pack is written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append bytes."""


ReadAt = Callable[[int, int], bytes]
"""(offset, length) -> exactly those bytes, or fewer at the end of the pack."""


class PackWriter:
    """Writes one pack; ``finish`` makes it whole."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._footer: list[bytes] = []
        self._offset = len(_MAGIC)
        self._digest = xxhash.xxh3_128(_MAGIC)
        sink.write(_MAGIC)

    @property
    def values(self) -> int:
        """Values written so far."""
        return len(self._footer)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._offset

    def add(self, page: Page) -> None:
        """Append a value. CorruptValue when it is not what its key promises: nothing bad enters a pack."""
        verify_value(page.value, page_key=page.key)
        if len(page.tenant) > MAX_TENANT_BYTES:
            raise CorruptValue("tenant", f"{len(page.tenant)} bytes")
        size = len(page.value)
        fields = (page.key, self._offset, size, page.page_index, page.age_s, len(page.tenant))
        self._footer.append(_RECORD.pack(*fields) + page.tenant)
        self._write(page.value)

    def finish(self) -> bytes:
        """Write the footer; the checksum of the whole pack [16]."""
        footer = b"".join(self._footer)
        trailer = _TRAILER.pack(self._offset, len(footer), len(self._footer), _END_MAGIC)
        self._write(footer)
        self._write(trailer)
        self._write(xxhash.xxh3_128_digest(footer + trailer))
        return self._digest.digest()

    def _write(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._digest.update(data)
        self._offset += len(data)


class PackReader:
    """Reads a pack of ``size`` bytes through ``read_at``. BadPack when it has no valid footer."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self.size = size
        self.pages = _read_footer(read_at, size)

    def value(self, page: PackedPage) -> bytes:
        """One verified value. CorruptValue when it is damaged or cut."""
        value = self._read_at(page.offset, page.size)
        _verify(page, value)
        return value

    def read(self, *, batch_bytes: int = 4 << 20) -> Iterator[tuple[PackedPage, bytes | CorruptValue]]:
        """Every page in order, neighbours read together; a damaged one comes as its error."""
        for batch in _batches(self.pages, batch_bytes):
            start = batch[0].offset
            data = self._read_at(start, batch[-1].offset + batch[-1].size - start)
            for page in batch:
                value = data[page.offset - start : page.offset - start + page.size]
                try:
                    _verify(page, value)
                except CorruptValue as error:
                    yield page, error
                else:
                    yield page, value


def _verify(page: PackedPage, value: bytes) -> None:
    if len(value) != page.size:
        raise CorruptValue("short", f"{len(value)} of {page.size} bytes")
    verify_value(value, page_key=page.key)


def _read_footer(read_at: ReadAt, size: int) -> list[PackedPage]:
    if size < len(_MAGIC) + TRAILER_BYTES or read_at(0, len(_MAGIC)) != _MAGIC:
        raise BadPack("not a pack")
    end = read_at(size - TRAILER_BYTES, TRAILER_BYTES)
    if len(end) != TRAILER_BYTES:
        raise BadPack("cut short")
    trailer, checksum = end[: _TRAILER.size], end[_TRAILER.size :]
    offset, length, count, magic = _TRAILER.unpack(trailer)
    if magic != _END_MAGIC:
        raise BadPack("no footer: it was cut short, or is still being written")
    if offset + length + TRAILER_BYTES != size or count > MAX_PACK_VALUES:
        raise BadPack("the footer does not fit the size")
    footer = read_at(offset, length)
    if len(footer) != length or xxhash.xxh3_128_digest(footer + trailer) != checksum:
        raise BadPack("the footer is damaged")
    pages = list(_records(footer))
    if len(pages) != count:
        raise BadPack(f"the footer names {len(pages)} of {count} values")
    for page in pages:
        if page.size <= HEADER_BYTES or page.offset < len(_MAGIC) or page.offset + page.size > offset:
            raise BadPack("a value lies outside the pack")
    return pages


def _records(footer: bytes) -> Iterator[PackedPage]:
    position = 0
    while position + _RECORD.size <= len(footer):
        key, offset, size, page_index, age_s, length = _RECORD.unpack_from(footer, position)
        position += _RECORD.size
        tenant = footer[position : position + length]
        position += length
        assert len(key) == KEY_BYTES
        yield PackedPage(key, offset, size, page_index, tenant, age_s)


def _batches(pages: Iterable[PackedPage], batch_bytes: int) -> Iterator[list[PackedPage]]:
    """Runs of neighbours of at most ``batch_bytes``."""
    batch: list[PackedPage] = []
    for page in pages:
        end = batch[-1].offset + batch[-1].size if batch else 0
        if batch and (page.offset != end or end + page.size - batch[0].offset > batch_bytes):
            yield batch
            batch = []
        batch.append(page)
    if batch:
        yield batch
