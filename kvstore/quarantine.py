"""Keeps a bounded number of bytes of values that failed verification, for whoever wants to know why."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class Quarantine:
    """Bad values as files ``<page key>.<tenant>.<reason>``, at most ``limit_bytes`` together."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._bytes = sum(path.stat().st_size for path in directory.glob("*"))

    def keep(self, key: bytes, reason: str, value: bytes, *, tenant: bytes = b"") -> None:
        """Keep a copy if there is room; a failure to write is logged, not raised."""
        log.warning("page %s quarantined: %s", key.hex(), reason)
        if self._bytes + len(value) > self._limit_bytes:
            return
        try:
            self._directory.mkdir(exist_ok=True)
            (self._directory / f"{key.hex()}.{tenant.hex()}.{reason}").write_bytes(value)
            self._bytes += len(value)
        except OSError as error:
            log.warning("quarantine: %s", error)

    def purge(self, tenant: bytes) -> int:
        """Delete what is kept of a tenant; how many values."""
        gone = 0
        for path in list(self._directory.glob("*")):
            if path.name.split(".")[1:2] == [tenant.hex()]:
                self._bytes -= path.stat().st_size
                path.unlink()
                gone += 1
        return gone
