"""The index of a segment: an LMDB environment with one row for each record, filed under its offset.

It saves reading the values at a start, and keeps what the values file cannot say (that a page was removed).
It is opened for a moment, to read all of it or to add to it, and closed again: nothing of it is mapped while
pages are served, and no transaction outlives a call. What is not in it is found in the values file, so it is
written now and then, each time with syncs: it is never in a state that a crash could have torn.

WRITEMAP is never used (a full disk would be a SIGBUS), the map is chosen anew at every opening.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.rows import Row, pack_row, unpack_row

INDEX_FILE: Final = "data.mdb"
LOCK_FILE: Final = "lock.mdb"
INDEX_VERSION: Final = 2
MAX_READERS: Final = 16
_LMDB_PAGE_BYTES: Final = 4096
_ROW_ROOM_BYTES: Final = 1024  # in the tree, with all that a commit copies
_SLACK_BYTES: Final = 4 << 20
_OFFSET: Final = struct.Struct(">Q")  # big endian: rows are then added at the end of the tree
_ABOUT: Final = struct.Struct("<Id")
_ABOUT_KEY: Final = b"about the segment"  # longer than an offset, and behind any
_PIECE_BYTES: Final = 1 << 20
_NOT_THE_FILES_FAULT: Final = frozenset(
    (
        errno.EACCES,
        errno.EAGAIN,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EPERM,
        errno.EROFS,
    )
)


class IndexDamaged(Exception):
    """The index cannot be read, or is of another version: the records must be looked at instead."""


@dataclass
class IndexRows:
    """All that an index says, by offset. ``damaged``: some rows are not what was written."""

    created_s: float
    rows: list[tuple[bytes, Row]]
    damaged: bool


def read_index(directory: Path) -> IndexRows | None:
    """Everything in the index; None when there is none. IndexDamaged; OSError when it is not its fault."""
    path = directory / INDEX_FILE
    if not path.exists():
        return None
    size = _expect_readable(path)
    with _opened(directory, size, readonly=True, lock=False) as env:
        needed = (int(env.info()["last_pgno"]) + 1) * _LMDB_PAGE_BYTES
        if size < needed:  # reading a mapped page past the end of its file is a SIGBUS
            raise IndexDamaged(f"{directory.name}: index has {size} bytes, its tree spans {needed}")
        with env.begin() as txn:
            about: Any = txn.get(_ABOUT_KEY)
            if about is None or len(about) != _ABOUT.size:
                raise IndexDamaged(f"{directory.name}: not the index of a segment")
            version, created_s = _ABOUT.unpack(about)
            if version != INDEX_VERSION:
                raise IndexDamaged(
                    f"{directory.name}: index version {version}, this build reads {INDEX_VERSION}"
                )
            found = IndexRows(float(created_s), [], False)
            for key, packed in txn.cursor():
                if key == _ABOUT_KEY:
                    continue
                try:
                    found.rows.append(unpack_row(packed, _OFFSET.unpack(key)[0]))
                except (CorruptValue, struct.error):
                    found.damaged = True
    return found


def write_index(
    directory: Path, rows: Sequence[tuple[bytes, Row]], *, created_s: float, anew: bool, sync: bool
) -> int:
    """Add rows, or replace those of the same offset; how many dead readers of the index were found.

    ``anew``: begin with an empty index. OSError, IndexDamaged: nothing was added.
    """
    path = directory / INDEX_FILE
    if anew:
        path.unlink(missing_ok=True)
    first = not path.exists()
    size = 0 if first else _expect_readable(path)
    _allocate_lock_file(directory / LOCK_FILE)
    room = 2 * size + len(rows) * _ROW_ROOM_BYTES + _SLACK_BYTES
    with _opened(directory, room, readonly=False, lock=True, sync=sync, metasync=sync) as env:
        dead_readers = int(env.reader_check())
        with env.begin(write=True) as txn:
            cursor = txn.cursor()
            for key, row in sorted(rows, key=lambda pair: pair[1].offset):
                cursor.put(_OFFSET.pack(row.offset), pack_row(key, row))
            cursor.put(_ABOUT_KEY, _ABOUT.pack(INDEX_VERSION, created_s))
    if first and sync:
        sync_path(directory)
    return dead_readers


def sync_path(path: Path) -> None:
    """Wait until a file's or a directory's content is on disk. OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _opened(directory: Path, room: int, **how: Any) -> Iterator[Any]:
    map_bytes = -(-max(room, _SLACK_BYTES) // _LMDB_PAGE_BYTES) * _LMDB_PAGE_BYTES
    try:
        env = lmdb.open(
            str(directory), map_size=map_bytes, subdir=True, max_dbs=0, max_readers=MAX_READERS, mode=0o600,
            writemap=False, meminit=True, max_spare_txns=0, **how,
        )  # fmt: skip
        try:
            yield env
        finally:
            env.close()
    except (lmdb.Error, OSError) as error:
        raise _fault(directory.name, error) from error


def _fault(name: str, error: Exception) -> Exception:
    """Whose fault it is: IndexDamaged for the file's, else OSError."""
    code = error.errno if isinstance(error, OSError) else None
    for number in _NOT_THE_FILES_FAULT | {errno.ENOSPC}:  # lmdb.Error says it in words alone
        if code == number or (code is None and os.strerror(number) in str(error)):
            return OSError(number, os.strerror(number), f"index of segment {name}")
    return IndexDamaged(f"{name}: {error}")


def _expect_readable(path: Path) -> int:
    """The file's size. Reads all of it, so that no look through a map meets a sector that cannot be read."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while file.read(_PIECE_BYTES):
                pass
        except OSError as error:
            raise IndexDamaged(f"{path.parent.name}: index cannot be read: {error.strerror}") from error
    return size


def _allocate_lock_file(path: Path) -> None:
    """Give the reader table real blocks: it is written through a map, where a full disk is a SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, 128 * (MAX_READERS + 2))
    finally:
        os.close(fd)
