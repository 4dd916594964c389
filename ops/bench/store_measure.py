"""How the store is measured: ratios against a yardstick that runs beside it, interleaved.

On a busy machine a number of one moment cannot be held against one of another. So each repetition runs the
yardstick and every candidate, in an order of its own, and gives one ratio each; the median of those counts.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from cedar.kvstore.header import HEADER_BYTES, seal_value
from cedar.kvstore.keys import page_key, root_key

PAGE_BYTES: Final = 227_840
PAGE_TOKENS: Final = 256
VALUE_BYTES: Final = PAGE_BYTES + HEADER_BYTES
FINGERPRINT: Final = hashlib.sha256(b"cedar.ops.bench.store").digest()
ROOT: Final = root_key(b"bench", FINGERPRINT, b"bench")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the report. ``ratio``: median over the repetitions; ``spread``: their quartiles.

    ``predicted`` was written down before the measurement. ``limit``: None where nothing is asked for.
    """

    name: str
    unit: str
    ratio: float
    spread: tuple[float, float]
    repeats: int
    predicted: float
    limit: float | None = None
    at_least: bool = True
    note: str = ""
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the limit is kept."""
        if self.limit is None:
            return True
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    def record(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"met": self.met}


def figure(
    name: str,
    ratios: Sequence[float],
    *,
    predicted: float,
    unit: str = "x",
    limit: float | None = None,
    at_least: bool = True,
    note: str = "",
    details: Mapping[str, float] | None = None,
) -> Figure:
    """A figure from the ratios of its repetitions."""
    ordered = sorted(ratios)
    count = len(ordered)
    return Figure(
        name=name,
        unit=unit,
        ratio=statistics.median(ordered),
        spread=(ordered[count // 4], ordered[(3 * count - 1) // 4]),
        repeats=count,
        predicted=predicted,
        limit=limit,
        at_least=at_least,
        note=note,
        details=details or {},
    )


def interleaved(
    cases: Mapping[str, Callable[[], float]], repeats: int, *, seed: int = 0
) -> dict[str, list[float]]:
    """What each case returns (seconds, or any measure) in every repetition; the order is shuffled in each."""
    rng = random.Random(seed)
    names = list(cases)
    results: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        rng.shuffle(names)
        for name in names:
            results[name].append(cases[name]())
    return results


def speed_ratios(results: Mapping[str, Sequence[float]], name: str, yardstick: str) -> list[float]:
    """How fast ``name`` was as a part of ``yardstick``'s speed, from seconds, repetition by repetition."""
    return [base / own for base, own in zip(results[yardstick], results[name], strict=True)]


def megabytes_per_s(total_bytes: int, seconds: Sequence[float]) -> float:
    """Median rate."""
    return total_bytes / statistics.median(seconds) / 1e6


def bench_keys(count: int, *, salt: int = 0) -> list[bytes]:
    """A chain of page keys."""
    keys = []
    parent = ROOT
    for number in range(count):
        parent = page_key(parent, [salt, number])
        keys.append(parent)
    return keys


def bench_value(key: bytes, payload_bytes: int = PAGE_BYTES) -> bytes:
    """A sealed page of bytes that no disk compresses, different for each key."""
    noise = _NOISE
    start = int.from_bytes(key[:4], "little") % (len(noise) // 2)
    payload = noise[start : start + payload_bytes]
    return seal_value(payload, fingerprint=FINGERPRINT, page_key=key, tokens=PAGE_TOKENS)


def drop_cached(path: Path) -> None:
    """Let the kernel forget the cached pages of a file that nobody has mapped."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_from_disk_bytes() -> int:
    """Bytes that this process has made the disk deliver."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    raise OSError("/proc/self/io has no read_bytes")


_NOISE: Final = random.Random(0).randbytes(2 * PAGE_BYTES)
