"""Keeps a bounded number of bytes of values that failed verification, for whoever wants to know why."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class Quarantine:
    """Bad values as files ``<page key>.<reason>`` in ``directory``, at most ``limit_bytes`` together."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        directory.mkdir(exist_ok=True)
        self._bytes = sum(path.stat().st_size for path in directory.iterdir())

    def keep(self, key: bytes, reason: str, value: bytes) -> None:
        """Keep a copy if there is room; a failure to write is logged, not raised."""
        log.warning("page %s quarantined: %s", key.hex(), reason)
        if self._bytes + len(value) > self._limit_bytes:
            return
        try:
            (self._directory / f"{key.hex()}.{reason}").write_bytes(value)
            self._bytes += len(value)
        except OSError as error:
            log.warning("quarantine: %s", error)
