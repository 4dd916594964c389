"""The file of a segment's values: bytes are added at its end, and read by offset from any thread.

Whoever reads keeps a reference, and the file is closed when nobody has one any more: a segment may be
dropped while it is read. Values in the page cache are looked at where they are, through a map; others are
read, since a sector that cannot be read is an error there and a SIGBUS in a map. (What is left of that: a
page that goes from the cache, and from a failing disk, in the microseconds of its use.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from cedar.kvstore.errors import CorruptValue, NotInMemory

WRITE_BYTES: Final = 896 << 10
"""Most that one call writes. Larger ones get large folios, out of just that memory which a virtual machine
gives back to its host: writing to it takes ten times as long (docs/log.md)."""
_NO_WAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE
_UNREADABLE: Final = (errno.EIO, errno.EBADMSG, errno.EILSEQ)


class ValuesFile:
    """One open file. OSError when it cannot be opened or made."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._path = path
        self._fd = self._write_fd = -1
        self._map: _Map | None = None
        if create:
            self._fd = self._write_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            self._fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        for fd in {self._fd, self._write_fd} - {-1}:
            os.close(fd)

    def size(self) -> int:
        """Bytes from its start to its end."""
        return os.fstat(self._fd).st_size

    def allocated_bytes(self) -> int:
        """Bytes that it takes on disk."""
        return os.fstat(self._fd).st_blocks * 512

    # ---- reading (any thread) ----

    def read_into(self, offset: int, into: memoryview, *, wait: bool = True) -> None:
        """Fill ``into``. CorruptValue when the disk cannot, or the file ends before.

        NotInMemory when it may not ``wait`` for the disk and would have to, or that cannot be told.
        """
        if not wait and not _NO_WAIT:
            raise NotInMemory
        try:
            got = os.preadv(self._fd, (into,), offset, 0 if wait else _NO_WAIT)
        except OSError as error:
            if not wait:
                raise NotInMemory from None
            if error.errno not in _UNREADABLE:
                raise
            raise CorruptValue("unreadable", f"{self._path.parent.name}: {error.strerror}") from None
        if got != len(into):
            if not wait:
                raise NotInMemory
            raise CorruptValue("short", f"{self._path.parent.name}: {got} of {len(into)} bytes")

    def read(self, offset: int, size: int) -> memoryview:
        """These bytes, to be read only: where they are, if in memory, else a copy. Raises as above.

        They may change when the value is erased, so a reader copies what it wants to keep.
        """
        mapped = self._mapped(offset + size)
        if mapped is not None and mapped.resident(offset, size):
            return mapped.view[offset : offset + size]
        copy = bytearray(size)
        self.read_into(offset, memoryview(copy))
        return memoryview(copy).toreadonly()

    def announce(self, offset: int, size: int) -> None:
        """Let the kernel start reading."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def next_data(self, offset: int) -> int:
        """The first offset from here on that is not in a hole; the file's size when there is none."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return self.size()
            return offset

    # ---- writing (one thread) ----

    def write(self, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Write the pieces one after the other from ``offset`` on, and let the disk begin. OSError."""
        fd = self._writable()
        for parts, size in _calls(pieces):
            written = os.pwritev(fd, parts, offset)
            while written < size:  # the disk is full, most likely: the next call says so
                rest = memoryview(b"".join(parts))[written:]
                more = os.pwrite(fd, rest, offset + written)
                if not more:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += more
            if _sync_file_range is not None:
                _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _START_WRITING)
            offset += size

    def sync(self) -> None:
        """Wait until everything is on disk. OSError: what was written since the last time may be lost."""
        os.fdatasync(self._fd if self._write_fd < 0 else self._write_fd)

    def truncate(self, size: int) -> None:
        """Cut off what is beyond ``size``. OSError."""
        os.ftruncate(self._writable(), size)

    def _writable(self) -> int:
        if self._write_fd < 0:
            self._write_fd = os.open(self._path, os.O_RDWR)
        return self._write_fd

    def _mapped(self, end: int) -> _Map | None:
        """A map that reaches to ``end``; None when there can be none."""
        mapped = self._map
        if mapped is None or len(mapped.view) < end:
            size = self.size()
            if size < end:
                return None
            try:
                view = memoryview(mmap.mmap(self._fd, size, prot=mmap.PROT_READ))
            except OSError:  # no room for a map
                return None
            mapped = self._map = _Map(view, _address(view))
        return mapped


class _Map(NamedTuple):
    view: memoryview
    base: int

    def resident(self, offset: int, size: int) -> bool:
        """Whether all of it is in memory. False where it cannot be told."""
        if _mincore is None:
            return False
        start = (self.base + offset) & -mmap.PAGESIZE
        length = self.base + offset + size - start
        pages = -(-length // mmap.PAGESIZE)
        answer = (ctypes.c_char * pages)()
        return bool(_mincore(start, length, answer) == 0) and answer.raw.count(b"\1") == pages


def _calls(pieces: Iterable[bytes | memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """The same bytes, as the parts of one write call after the other."""
    parts: list[memoryview] = []
    size = 0
    for piece in pieces:
        left = memoryview(piece)
        while left:
            part = left[: WRITE_BYTES - size]
            left = left[len(part) :]
            parts.append(part)
            size += len(part)
            if size == WRITE_BYTES or len(parts) == _PARTS:
                yield parts, size
                parts, size = [], 0
    if parts:
        yield parts, size


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


def _address(view: memoryview) -> int:
    """Address of the first byte of a contiguous buffer."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


_PARTS: Final = 512  # of the 1,024 that one call may have
_mincore: Any = None
_sync_file_range: Any = None
with contextlib.suppress(AttributeError, OSError):  # Linux alone has both
    _mincore = ctypes.PyDLL(None).mincore  # too short a call to let other threads in
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    _sync_file_range = ctypes.CDLL(None).sync_file_range
