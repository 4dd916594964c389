"""What a segment knows of each value beside the value itself: a small row, in the record and in the index."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.keys import KEY_BYTES

ROW_VERSION: Final = 2
MAX_TENANT_BYTES: Final = 64
_ROW: Final = struct.Struct(f"<BBHIdI{KEY_BYTES}s")
_CHECKSUM: Final = struct.Struct("<Q")
_DEAD: Final = 1
_ERASED: Final = 2


@dataclass(frozen=True)
class Row:
    """One stored page as its segment knows it.

    ``page_index``: position in its chain, 0 for the first page. ``used_s``: store time of its last use when
    the row was written. ``offset``: of the value in the values file. ``dead``: quarantined or removed;
    ``erased``: its bytes are off the disk too.
    """

    size: int
    used_s: float
    page_index: int = 0
    tenant: bytes = b""
    offset: int = 0
    dead: bool = False
    erased: bool = False


def pack_row(key: bytes, row: Row) -> bytes:
    """The row's bytes; its offset is not among them, since rows are filed under it."""
    flags = _DEAD * row.dead | _ERASED * row.erased
    fields = _ROW.pack(ROW_VERSION, flags, 0, row.page_index, row.used_s, row.size, key) + row.tenant
    return fields + _CHECKSUM.pack(_checksum(fields, row.offset))


def unpack_row(packed: bytes | memoryview, offset: int) -> tuple[bytes, Row]:
    """(page key, row) of what is filed under ``offset``; CorruptValue when it is not what was put there."""
    if not _ROW.size <= len(packed) - _CHECKSUM.size <= _ROW.size + MAX_TENANT_BYTES:
        raise CorruptValue("short", f"row of {len(packed)} bytes")
    fields = bytes(packed[: -_CHECKSUM.size])
    if _CHECKSUM.unpack_from(packed, len(fields))[0] != _checksum(fields, offset):
        raise CorruptValue("checksum", "of a row")
    version, flags, _, page_index, used_s, size, key = _ROW.unpack_from(fields)
    if version != ROW_VERSION:
        raise CorruptValue("version", f"row version {version}")
    dead, erased = bool(flags & _DEAD), bool(flags & _ERASED)
    return key, Row(size, used_s, page_index, fields[_ROW.size :], offset, dead, erased)


def _checksum(fields: bytes, offset: int) -> int:
    return int(xxhash.xxh3_64_intdigest(fields, seed=offset))
