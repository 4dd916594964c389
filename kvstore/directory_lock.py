"""One process a store directory: a lock that dies with its holder, also where forked children live on."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from cedar.kvstore.errors import StoreLocked

_HOLDER_BYTES: Final = 32


class DirectoryLock:
    """An exclusive lock on ``directory/LOCK``, which also names the holder's process id.

    On a disk that is read-only now, a lock file that is there is locked all the same; where there is none,
    ``held`` is False, and ``acquire`` has to be called again before anything is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "LOCK"
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether no other process has the directory."""
        return self._fd >= 0

    def acquire(self) -> None:
        """Take the lock, if it is not held yet. StoreLocked; OSError when there is no file to lock."""
        if self._fd >= 0:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            try:
                fd = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                raise error from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
            os.close(fd)
            raise StoreLocked(
                f"store directory {self._directory} is in use by process {holder or 'unknown'}"
            ) from None
        self._fd = fd
        _held.add(self)
        with suppress(OSError):  # the name of the holder is a courtesy; a full disk is no reason to fail
            os.pwrite(fd, f"{os.getpid()}\n".ljust(_HOLDER_BYTES).encode(), 0)

    def release(self) -> None:
        """Give the directory free; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _forget_in_child() -> None:
    """A child has the same open file, and would hold the lock for its parent that died."""
    for lock in list(_held):
        lock.release()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
