"""The directory of a store: made, locked to one process, and marked while it holds unsynced data.

On a disk that is read-only all of this waits: what is there can be read, and ``prepare`` is called again
before anything is written.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from cedar.kvstore.clock import Clock
from cedar.kvstore.directory_lock import DirectoryLock
from cedar.kvstore.errors import StoreLocked
from cedar.kvstore.segment_index import sync_path
from cedar.kvstore.volatile_mark import VolatileMark

log = logging.getLogger(__name__)


class StoreDirectory:
    """Opens ``path``; StoreLocked when another process has it, OSError when it cannot be used.

    ``volatile``: what is written will not be synced. Data that a crash of the machine left so is thrown away.
    """

    def __init__(self, path: Path, clock: Clock, *, volatile: bool) -> None:
        self.path = path
        self._segments = path / "segments"
        self._clock = clock
        self._volatile = volatile
        self._lock = DirectoryLock(path)
        self._mark: VolatileMark | None = None
        self._prepared = False
        try:
            self._take()
            self._make_ready()
        except OSError as error:
            lawless = self._mark is None and self._holds_segments()  # without a lock, or with data of a crash
            if error.errno != errno.EROFS or lawless:
                self._lock.release()
                raise
            log.warning("store %s: the disk is read-only, puts are refused: %s", path, error)
        except BaseException:
            self._lock.release()
            raise

    def prepare(self) -> None:
        """Before a write: make what is still missing. OSError, StoreLocked."""
        if self._prepared:
            return
        if self._mark is None and self._holds_segments():
            raise StoreLocked(f"store directory {self.path} has pages of another process: start again")
        self._take()
        self._make_ready()

    @property
    def unsynced(self) -> bool:
        """Whether there may be unsynced data, of this process or of one before it."""
        return self._mark is not None and self._mark.marked

    def synced(self) -> None:
        """Everything is on disk now. OSError."""
        if self._mark is not None:
            self._mark.clear()

    def release(self) -> None:
        """Give the directory free; may be called again."""
        self._lock.release()

    def _take(self) -> None:
        _make_directory(self.path)
        self._lock.acquire()
        if self._mark is None:
            self._mark = VolatileMark(self.path, self._clock)

    def _make_ready(self) -> None:
        assert self._mark is not None
        _make_directory(self._segments)
        if self._volatile:
            self._mark.set()
        self._prepared = True

    def _holds_segments(self) -> bool:
        return self._segments.exists() and any(self._segments.iterdir())


def _make_directory(path: Path) -> None:
    """Make a directory that a crash of the machine does not take away again."""
    if not path.exists():
        path.mkdir(parents=True)
        sync_path(path.parent)
