"""Gets the intact pages out of a damaged segment, without its tree.

A value of more than about 2 KiB begins 16 bytes into a database page and runs on contiguously, and says in
its own header which page it is. So one pass over the file finds every value; the checksum says which are
whole.
Plain reads only: a file that is cut short or on a failing disk gives errors here, not a SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.segment import LMDB_PAGE_BYTES

_LMDB_HEADER_BYTES: Final = 16


def intact_values(data_file: Path, *, max_value_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """(page key, value) of every whole value in the file; unreadable stretches are passed over."""
    fd = os.open(data_file, os.O_RDONLY)
    try:
        pages = os.fstat(fd).st_size // LMDB_PAGE_BYTES
        page = 0
        while page < pages:
            value = _value_at(fd, page, max_value_bytes)
            if value is None:
                page += 1
                continue
            yield value
            page += -(-(len(value[1]) + _LMDB_HEADER_BYTES) // LMDB_PAGE_BYTES)
    finally:
        os.close(fd)


def _value_at(fd: int, page: int, max_value_bytes: int) -> tuple[bytes, bytes] | None:
    offset = page * LMDB_PAGE_BYTES + _LMDB_HEADER_BYTES
    try:
        head = os.pread(fd, HEADER_BYTES, offset)
        if head[:4] != b"CDRP":
            return None
        size = HEADER_BYTES + int.from_bytes(head[12:16], "little")
        if size > max_value_bytes:
            return None
        value = os.pread(fd, size, offset)
        return verify_value(value).page_key, value
    except (OSError, CorruptValue):
        return None
