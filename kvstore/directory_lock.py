"""One process a store directory: a lock that dies with its holder, also where forked children live on."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from cedar.kvstore.errors import StoreLocked

_HOLDER_BYTES: Final = 32


class DirectoryLock:
    """An exclusive lock on ``directory/LOCK``, which also names the holder's process id."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "LOCK"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise StoreLocked(
                f"store directory {directory} is in use by process {holder or 'unknown'}"
            ) from None
        _held.add(self)
        with suppress(OSError):  # the name of the holder is a courtesy; a full disk is no reason to fail
            os.pwrite(self._fd, f"{os.getpid()}\n".ljust(_HOLDER_BYTES).encode(), 0)

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
