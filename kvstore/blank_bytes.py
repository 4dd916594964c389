"""Bytes that are filled after they were made, for what must be ``bytes`` in the end and is read from a disk.

gRPC sends nothing but ``bytes``; reading into a buffer and making bytes of it would copy every page once
more. CPython's own way to build a bytes object is to allocate it and write into it before anybody else has
it; this is that, from Python.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

_ALLOCATE: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_ADDRESS: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def blank_bytes(size: int) -> tuple[bytes, memoryview]:
    """Bytes of this size with arbitrary contents, and a view to write them by. At least 2 bytes.

    Every byte must be written, and the view be let go, before the bytes are handed on: what was in that
    memory before is not theirs to see, and bytes do not change.
    """
    if size < 2:  # CPython shares those among all users
        raise ValueError(f"size={size}: at least 2 bytes")
    blank: bytes = _ALLOCATE(None, size)
    room: Any = _array_type(size).from_address(_ADDRESS(blank))
    room.owner = blank  # the view keeps ``room`` alive, and ``room`` the bytes
    return blank, memoryview(room).cast("B")


@functools.lru_cache(maxsize=64)
def _array_type(size: int) -> Any:
    """Kept, since making a type costs as much as filling a small frame, and leaves work to the collector."""
    return ctypes.c_char * size
