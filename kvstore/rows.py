"""What a segment keeps beside each value: a small row that the index is rebuilt from."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from cedar.kvstore.errors import CorruptValue

ROW_VERSION: Final = 1
MAX_TENANT_BYTES: Final = 64
UNKNOWN_TENANT: Final = b"\0unknown"
"""Tenant of pages recovered without their rows: whoever removes a tenant must remove these too."""
_ROW: Final = struct.Struct("<BBHIQdI")
_DEAD: Final = 1


@dataclass(frozen=True)
class Row:
    """One stored page as its segment knows it.

    ``page_index``: position in its chain, 0 for the first page. ``used_s``: store time of its last use when
    the row was written. ``offset``: of the value in the data file, 0 while unknown. ``dead``: quarantined.
    """

    size: int
    used_s: float
    page_index: int = 0
    tenant: bytes = b""
    offset: int = 0
    dead: bool = False


def pack_row(row: Row) -> bytes:
    """The row's bytes."""
    flags = _DEAD if row.dead else 0
    fields = _ROW.pack(ROW_VERSION, flags, 0, row.page_index, row.offset, row.used_s, row.size)
    return fields + row.tenant


def unpack_row(packed: bytes | memoryview) -> Row:
    """Read a row; CorruptValue when it is not one (the caller skips it: a page without a row is a miss)."""
    if not _ROW.size <= len(packed) <= _ROW.size + MAX_TENANT_BYTES:
        raise CorruptValue("short", f"row of {len(packed)} bytes")
    version, flags, _, page_index, offset, used_s, size = _ROW.unpack_from(packed)
    if version != ROW_VERSION:
        raise CorruptValue("version", f"row version {version}")
    tenant = bytes(packed[_ROW.size :])
    return Row(size, used_s, page_index, tenant, offset, bool(flags & _DEAD))
