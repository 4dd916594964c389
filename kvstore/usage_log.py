"""When pages were last used, kept over a restart: small append-only files, one a stretch of store time.

A chunk is ``count u32 ‖ xxh3_64 of the records ‖ records``, a record ``key [32] ‖ used_s f64``. A torn or
damaged chunk ends the reading of its file, which is cut there, so that what is added later is found. Losing
a log costs pages some of their time, never their bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

_CHUNK: Final = struct.Struct("<IQ")
_RECORD: Final = struct.Struct("<32sd")
_MAX_RECORDS: Final = 1 << 22


class UsageLog:
    """The log of one tier, in ``directory``: a new file each ``period_s``, kept for ``keep_s``."""

    def __init__(self, directory: Path, *, period_s: float, keep_s: float) -> None:
        self._directory = directory
        self._period_s = period_s
        self._keep_s = keep_s

    def append(self, uses: Mapping[bytes, float], now_s: float) -> None:
        """Add uses (key -> store time). OSError when the disk will not; the uses are then only in memory."""
        if not uses:
            return
        records = b"".join(_RECORD.pack(key, used_s) for key, used_s in uses.items())
        self._directory.mkdir(exist_ok=True)
        chunk = _CHUNK.pack(len(uses), xxhash.xxh3_64_intdigest(records)) + records
        with open(self._directory / f"{int(now_s // self._period_s):012d}.log", "ab") as file:
            file.write(chunk)

    def read(self) -> Iterator[tuple[bytes, float]]:
        """Every recorded use, oldest file first."""
        for path in self._files():
            yield from _read_file(path)

    def expire(self, now_s: float) -> None:
        """Delete the files in which every use is older than ``keep_s``."""
        for path in self._files():
            if (int(path.stem) + 1) * self._period_s + self._keep_s < now_s:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.glob("*.log") if path.stem.isdigit())


def _read_file(path: Path) -> Iterator[tuple[bytes, float]]:
    whole = 0
    with open(path, "rb") as file:
        while len(head := file.read(_CHUNK.size)) == _CHUNK.size:
            count, checksum = _CHUNK.unpack(head)
            if count > _MAX_RECORDS:
                break
            records = file.read(count * _RECORD.size)
            if len(records) != count * _RECORD.size or xxhash.xxh3_64_intdigest(records) != checksum:
                break
            whole = file.tell()
            yield from _RECORD.iter_unpack(records)
        torn = os.fstat(file.fileno()).st_size != whole
    if torn:
        with suppress(OSError):
            os.truncate(path, whole)
