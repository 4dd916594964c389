"""Marks a directory that is written without syncing: after a machine crash its databases may lie, unnoticed.

While the mark of an earlier boot stands at start, the machine went down under unsynced data, and all of it is
thrown away. A process that merely died leaves the page cache whole, so the mark of this boot is no reason to.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from cedar.kvstore.clock import Clock

log = logging.getLogger(__name__)


class VolatileMark:
    """The mark in ``directory``; constructing it discards data left by a crash. OSError."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._path = directory / "volatile"
        self._boot_id = clock.boot_id() or "unknown"
        if self._path.exists():
            marked = self._path.read_text().strip()
            if marked != self._boot_id or marked == "unknown":
                log.warning("unsynced data of an earlier boot: discarding the store's segments")
                if (directory / "segments").exists():
                    shutil.rmtree(directory / "segments")
                self._path.unlink()

    @property
    def marked(self) -> bool:
        """Whether data may be unsynced, of this process or of one before it."""
        return self._path.exists()

    def set(self) -> None:
        """From now on data may be unsynced. The mark itself is on disk before any of it."""
        with open(self._path, "w") as file:
            file.write(self._boot_id)
            file.flush()
            os.fsync(file.fileno())
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def clear(self) -> None:
        """Everything is on disk."""
        if self._path.exists():
            self._path.unlink()
