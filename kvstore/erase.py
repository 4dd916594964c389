"""Takes records off the disk without rewriting their segment.

Records are whole blocks and are never moved, so one that must go is cut out where it lies: its blocks are
given back to the file system and read as zeros from then on, or are overwritten where it cannot take them,
and the file is synced.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
_PIECE_BYTES: Final = 512 << 10


def erase(values_file: Path, stretches: Iterable[tuple[int, int]]) -> None:
    """Erase each (offset, size) of the file, and wait until that is on disk. OSError."""
    fd = os.open(values_file, os.O_RDWR)
    try:
        for offset, size in stretches:
            if not _punch(fd, offset, size):
                for at in range(offset, offset + size, _PIECE_BYTES):
                    os.pwrite(fd, bytes(min(_PIECE_BYTES, offset + size - at)), at)
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
