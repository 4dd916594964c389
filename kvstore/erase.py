"""Takes a value's bytes off the disk without rewriting its segment.

Values are never moved or rewritten, so a page that must go is cut out where it lies: whole blocks are given
back to the file system (they read as zeros from then on), what remains at the edges is overwritten, and the
file is synced. The tree around it is not touched; a read of such a value fails its checksum.

Limit: a value that fits into a single 4 KiB page of the database (only models made for tests have such) may
leave parts of itself in the unused space of other pages, since LMDB writes those from reused buffers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

BLOCK_BYTES: Final = 4096
_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02


def erase(data_file: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Erase each (offset, size) of the file, and wait until that is on disk. OSError."""
    fd = os.open(data_file, os.O_RDWR)
    try:
        for offset, size in ranges:
            first = -(-offset // BLOCK_BYTES) * BLOCK_BYTES
            last = (offset + size) // BLOCK_BYTES * BLOCK_BYTES
            if first < last and _punch(fd, first, last - first):
                os.pwrite(fd, bytes(first - offset), offset)
                os.pwrite(fd, bytes(offset + size - last), last)
            else:
                os.pwrite(fd, bytes(size), offset)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _punch(fd: int, offset: int, size: int) -> bool:
    """Give blocks back; False where the file system cannot."""
    fallocate: Any = getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    arguments = (ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE), ctypes.c_int64(offset))
    return bool(fallocate(*arguments, ctypes.c_int64(size)) == 0)


_libc = ctypes.CDLL(None, use_errno=True)
