"""Where a value lies in its database file: the address of its view minus the base of the memory map.

Known offsets let a batch of reads be announced to the kernel (``posix_fadvise``) before the first of them
faults, and let a value's pages be fetched in one call that fails where touching them would be a SIGBUS; they
are never used to read by. Linux only; elsewhere nothing is known and nothing is announced.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

_MADV_POPULATE_READ: Final = 22  # Linux 5.14; the mmap module has no name for it
_UNREADABLE: Final = (errno.EFAULT, 133)  # 133: EHWPOISON


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def buffer_address(view: memoryview) -> int:
    """Address of the first byte of a contiguous buffer."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def map_base(path: Path) -> int | None:
    """Address at which this process has mapped the start of ``path``; None when it cannot be told."""
    try:
        wanted = os.path.realpath(path)
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == wanted and int(fields[2], 16) == 0:
                return int(fields[0].split("-")[0], 16)
    except (OSError, ValueError):
        return None
    return None


def populate(address: int, length: int) -> bool:
    """Bring these mapped bytes into memory; False when the disk cannot give them.

    True too where the kernel has no such call: then it is not known. Bytes that are in memory cost about a
    microsecond.
    """
    start = address & -mmap.PAGESIZE
    size = address + length - start
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_char * pages)()
    if _mincore(start, size, resident) == 0 and resident.raw.count(b"\1") == pages:
        return True
    return bool(_madvise(start, size, _MADV_POPULATE_READ) == 0) or ctypes.get_errno() not in _UNREADABLE


def announce(fd: int, offset: int, length: int) -> None:
    """Tell the kernel that these bytes will be read soon."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


_mincore = ctypes.PyDLL(None).mincore  # too short a call to let other threads in
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
