"""A segment: one LMDB environment that holds the pages written in one stretch of time.

Segments are filled by one writer, then only read, and dropped whole. Values are never rewritten or deleted
one by one, so there is no free list to search and no fragmentation. The map is sized at creation and never
resized; WRITEMAP is never used (a full disk would be a SIGBUS); readahead is off (on files larger than memory
it amplifies reads 43-fold), reads are announced by file offset instead.

Reads hold the segment (``hold``/``let_go``), so that dropping it closes the map only after the last of them.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb
from cedar.kvstore.errors import CorruptValue, StoreClosed
from cedar.kvstore.file_offsets import announce, buffer_address, map_base, populate
from cedar.kvstore.header import ValueHeader, read_header, verify_value
from cedar.kvstore.machine import allocated_bytes
from cedar.kvstore.rows import Row, pack_row, unpack_row

DATA_FILE: Final = "data.mdb"
LOCK_FILE: Final = "lock.mdb"
LMDB_PAGE_BYTES: Final = 4096
MAX_READERS: Final = 256
_SLACK_BYTES: Final = 16 << 20
_CREATED = struct.Struct("<Id")
_SEGMENT_VERSION: Final = 1
_READERS_END_S: Final = 5.0
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


class SegmentDamaged(Exception):
    """The environment cannot be opened or walked."""


def map_bytes_for(segment_bytes: int) -> int:
    """Map size of a segment that is to be closed at ``segment_bytes``: 15 % and 16 MiB more, whole pages."""
    return -(-(segment_bytes * 115 // 100 + _SLACK_BYTES) // LMDB_PAGE_BYTES) * LMDB_PAGE_BYTES


class Segment:
    """An open segment. ``commit`` belongs to the writer thread; everything else may be called from any."""

    def __init__(
        self, path: Path, number: int, *, map_bytes: int, durable: bool, created_s: float | None
    ) -> None:
        """Open the segment in ``path``; ``created_s`` (store time) creates it.

        SegmentDamaged when the fault is the file's; OSError when it is not (no memory, no descriptors, no
        permission): such a file must not be given up.
        """
        self.path = path
        self.number = number
        self.keys: list[bytes] = []  # all ever committed here; the index knows the current ones
        self.last_used_s = 0.0  # youngest use recorded in a row here
        self.closed_to_writes = False
        self.live_pages = 0  # kept by the index
        self._pid = os.getpid()
        self._holders = 0
        self._dropped = False
        self._paused = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._map_bytes = map_bytes
        self._durable = durable
        if created_s is not None:
            path.mkdir(parents=True)
        elif not (path / DATA_FILE).exists():
            raise SegmentDamaged(f"{path.name}: no {DATA_FILE}")
        _allocate_lock_file(path / LOCK_FILE)  # a no-op where it has its blocks, so also on a full disk
        self._open(created_s)
        if created_s is not None and durable:
            _sync_directory(path)
            _sync_directory(path.parent)

    @property
    def dropped(self) -> bool:
        """Whether the segment is gone (or going, once its last reader ends)."""
        return self._dropped

    def allocated_bytes(self) -> int:
        """Bytes that the data file takes on disk; 0 once dropped."""
        return 0 if self._dropped else allocated_bytes(self.path / DATA_FILE)

    # ---- writing (the writer thread) ----

    def commit(
        self, values: Sequence[tuple[bytes, bytes | memoryview, Row]], rows: Sequence[tuple[bytes, Row]] = ()
    ) -> None:
        """Write all values with their rows, and replace ``rows``, in one transaction. All or nothing.

        lmdb.MapFullError when the map is full, another lmdb.Error when the disk fails.
        """
        self._expect_own_process()
        with self._env.begin(write=True) as txn:
            for key, value, row in values:
                txn.put(key, value, db=self._values)
                txn.put(key, pack_row(row), db=self._rows)
            for key, row in rows:
                txn.put(key, pack_row(row), db=self._rows)
        for key, _, row in values:
            self.keys.append(key)
            self.last_used_s = max(self.last_used_s, row.used_s)

    def offsets(self, keys: Iterable[bytes]) -> list[int]:
        """Offset of each value in the data file; 0 where it cannot be told. Touches the values' pages."""
        base = self._map_base
        if base is None:
            return [0 for _ in keys]
        with self.reading() as look_up:
            views = map(look_up, keys)
            return [0 if view is None else buffer_address(view) - base for view in views]

    def recover(self) -> None:
        """After a failed commit (the writer thread): LMDB ends an environment whose last page of a commit it
        could not write, for readers too, so open it anew. SegmentDamaged, OSError when that fails.
        """
        try:
            with self._env.begin():
                return
        except lmdb.Error:
            pass
        with self._idle:
            self._paused = True  # a miss, for as long as this takes
            try:
                if not self._idle.wait_for(lambda: self._holders == 0, _READERS_END_S) or self._dropped:
                    return
                os.close(self._fd)
                self._env.close()
                try:
                    self._open(None)
                except BaseException:
                    self._dropped = True  # nothing is open any more
                    raise
            finally:
                self._paused = False

    def sync(self) -> None:
        """Force everything to disk (for a clean stop without durability)."""
        self._env.sync(True)

    # ---- reading (any thread) ----

    def hold(self) -> bool:
        """Keep the map open until ``let_go``; False when the segment has been dropped."""
        with self._lock:
            if self._dropped or self._paused:
                return False
            self._holders += 1
            return True

    def let_go(self) -> None:
        """End one ``hold``."""
        with self._lock:
            self._holders -= 1
            self._idle.notify_all()
            close = self._dropped and self._holders == 0
        if close:
            self._close()

    @contextmanager
    def reading(self) -> Iterator[Callable[[bytes], memoryview | None]]:
        """A look-up of stored bytes, unverified. The caller holds the segment.

        The views it gives are valid only inside the ``with``: later they would silently show other data.
        """
        self._expect_own_process()
        with self._env.begin(db=self._values, buffers=True) as txn:
            yield txn.get

    def expect_readable(self, offset: int, size: int) -> None:
        """CorruptValue when the disk cannot give these bytes: reading them through the map is a SIGBUS.

        Also fetches them in one go. ``offset`` 0: not known, so nothing is tried.
        """
        if offset and self._map_base is not None and not populate(self._map_base + offset, size):
            raise CorruptValue("unreadable", f"{self.path.name}: the disk cannot read it")

    def header(self, key: bytes, offset: int = 0, size: int = 0) -> ValueHeader | None:
        """Header of a stored value, payload unverified; None when absent, CorruptValue when it is not one."""
        self.expect_readable(offset, size)
        with self.reading() as look_up:
            view = look_up(key)
            return None if view is None else read_header(view)

    def verify(self, key: bytes) -> None:
        """CorruptValue when the value stored under ``key`` is not whole, or gone."""
        with self.reading() as look_up:
            view = look_up(key)
            if view is None:
                raise CorruptValue("key", "its segment has lost it")
            verify_value(view, page_key=key)

    def announce(self, offset: int, size: int) -> None:
        """Let the kernel start reading a value."""
        if offset:
            announce(self._fd, offset, size)

    def stored_rows(self) -> Iterator[tuple[bytes, Row]]:
        """Every row, skipping unreadable ones. SegmentDamaged when the tree cannot be walked."""
        try:
            with self._env.begin(db=self._rows) as txn:
                for key, packed in txn.cursor():
                    try:
                        yield bytes(key), unpack_row(packed)
                    except CorruptValue:
                        continue
        except lmdb.Error as error:
            raise SegmentDamaged(f"{self.path.name}: {error}") from error

    def free_dead_readers(self) -> int:
        """Release slots of readers that died; how many there were."""
        return int(self._env.reader_check())

    # ---- end ----

    def drop(self) -> None:
        """Unlink the files now, close the map when the last reader lets go."""
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
            close = self._holders == 0
        shutil.rmtree(self.path, ignore_errors=True)
        if close:
            self._close()

    def close(self) -> None:
        """Close without deleting anything; waits for nobody, so call it when no reads are left."""
        with self._lock:
            self._dropped = True
            close = self._holders == 0
        if close:
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._env.close()

    def _open(self, created_s: float | None) -> None:
        path, durable = self.path, self._durable
        try:
            self._env = lmdb.open(
                str(path), map_size=self._map_bytes, subdir=True, max_dbs=3, max_readers=MAX_READERS,
                mode=0o600, readahead=False, writemap=False, sync=durable, metasync=durable, meminit=True,
                max_spare_txns=0,
            )  # fmt: skip
        except (lmdb.Error, OSError) as error:
            raise _fault(path.name, error) from error
        try:
            self._fd = os.open(path / DATA_FILE, os.O_RDONLY)
        except OSError as error:
            self._env.close()
            raise _fault(path.name, error) from error
        try:
            self._refuse_truncated()
            self._values = self._env.open_db(b"values")
            self._rows = self._env.open_db(b"rows")
            self._about = self._env.open_db(b"about")
            self.created_s = self._read_created(created_s)
        except (lmdb.Error, OSError, struct.error, SegmentDamaged) as error:
            self._close()
            raise _fault(path.name, error) from error
        self._map_base = map_base(path / DATA_FILE)

    def _expect_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed("a store that was open before a fork cannot be used in the child")

    def _refuse_truncated(self) -> None:
        """Reading a mapped page past the end of its file is a SIGBUS, so look before the first read."""
        needed = (int(self._env.info()["last_pgno"]) + 1) * LMDB_PAGE_BYTES
        actual = os.fstat(self._fd).st_size
        if actual < needed:
            raise SegmentDamaged(f"{self.path.name}: file has {actual} bytes, its tree spans {needed}")

    def _read_created(self, created_s: float | None) -> float:
        with self._env.begin(write=created_s is not None, db=self._about) as txn:
            if created_s is not None:
                txn.put(b"created", _CREATED.pack(_SEGMENT_VERSION, created_s))
                return created_s
            packed: Any = txn.get(b"created")
        if packed is None:
            raise SegmentDamaged(f"{self.path.name}: not a segment")
        version, created = _CREATED.unpack(packed)
        if version != _SEGMENT_VERSION:
            raise SegmentDamaged(
                f"{self.path.name}: segment version {version}, this build reads {_SEGMENT_VERSION}"
            )
        return float(created)


def _fault(name: str, error: Exception) -> Exception:
    """Whose fault it is that a segment does not open: SegmentDamaged for the file's, else OSError."""
    if isinstance(error, SegmentDamaged):
        return error
    code = error.errno if isinstance(error, OSError) else None
    for number in _NOT_THE_FILES_FAULT:  # lmdb.Error says it in words alone
        if code == number or (code is None and os.strerror(number) in str(error)):
            return OSError(number, os.strerror(number), f"segment {name}")
    return SegmentDamaged(f"{name}: {error}")


def _allocate_lock_file(path: Path) -> None:
    """Give the reader table real blocks: it is written through a map, where a full disk is a SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, 128 * (MAX_READERS + 2))
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
