"""Where a value lies in its database file: the address of its view minus the base of the memory map.

Known offsets let a batch of reads be announced to the kernel (``posix_fadvise``) before the first of them
faults; they are never used to read by. Linux only; elsewhere nothing is known and nothing is announced.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


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


def announce(fd: int, offset: int, length: int) -> None:
    """Tell the kernel that these bytes will be read soon."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
