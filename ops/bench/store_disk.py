"""The SSD tier against plain files: reads that hit the page cache, and durable writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cedar.kvstore.config import GIB, MIB, SsdConfig
from cedar.kvstore.header import verify_value
from cedar.kvstore.put import PutItem
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, map_bytes_for
from cedar.kvstore.ssd_tier import SsdTier

from .store_measure import (
    VALUE_BYTES,
    Figure,
    bench_keys,
    bench_value,
    figure,
    interleaved,
    megabytes_per_s,
    speed_ratios,
)

BATCH = 16


def warm_reads(directory: Path, *, pages: int = 192, repeats: int = 15) -> list[Figure]:
    """One page at a time out of the page cache, each verified, in an order that suits no prefetcher."""
    keys = bench_keys(pages)
    values = {key: bench_value(key) for key in keys}
    order = sorted(keys)
    segment = Segment(directory / "00000001", 1, map_bytes=map_bytes_for(GIB), durable=True, created_s=0.0)
    for start in range(0, pages, BATCH):
        segment.commit([(key, values[key], Row(VALUE_BYTES, 0.0)) for key in keys[start : start + BATCH]])
    plain = directory / "plain"
    plain.write_bytes(b"".join(values[key] for key in keys))
    places = {key: VALUE_BYTES * number for number, key in enumerate(keys)}
    tier = SsdTier(SsdConfig(directory=directory / "tier", capacity_bytes=4 * GIB), background=False)
    tier.put([PutItem(key, values[key]) for key in keys]).result()
    fd = os.open(plain, os.O_RDONLY)
    buffer = bytearray(VALUE_BYTES)
    view = memoryview(buffer)

    def from_file() -> None:
        for key in order:
            os.preadv(fd, [buffer], places[key])
            verify_value(view, page_key=key)

    def from_lmdb() -> None:
        for key in order:
            with segment.reading() as look_up:
                found = look_up(key)
                assert found is not None
                verify_value(found, page_key=key)

    def from_tier() -> None:
        for key in order:
            assert tier.read_run([key], 1, len) is not None

    cases = {
        "preadv": lambda: timed(from_file),
        "lmdb": lambda: timed(from_lmdb),
        "tier": lambda: timed(from_tier),
    }
    interleaved(cases, 2)
    results = interleaved(cases, repeats)
    os.close(fd)
    tier.close()
    segment.close()
    rates = {f"{name}_MB_s": megabytes_per_s(VALUE_BYTES * pages, results[name]) for name in cases}
    return [
        figure(
            "warm get: LMDB view + checksum / preadv into a reused buffer + checksum",
            speed_ratios(results, "lmdb", "preadv"),
            predicted=1.02,
            limit=0.95,
            details=rates,
        ),
        figure(
            "warm get: through the tier (index, use, counters) / the same preadv",
            speed_ratios(results, "tier", "preadv"),
            predicted=0.95,
            details=rates,
        ),
    ]


def durable_puts(directory: Path, *, batches: int = 160) -> list[Figure]:
    """Batches of 16 and of 64 pages."""
    figures = []
    for pages, repeats in ((BATCH, batches), (4 * BATCH, max(batches // 4, 1))):
        (directory / str(pages)).mkdir()
        figures += _durable_puts(directory / str(pages), pages, repeats)
    return figures


def _durable_puts(directory: Path, pages: int, batches: int) -> list[Figure]:
    """Batches, each on disk before the next is begun: LMDB, the tier, and a plain file.

    Batch by batch in turn, so that all three meet the same disk; each triple gives its ratios.
    """
    files: dict[str, PlainFile | LmdbFile | TierFile] = {
        "plain": PlainFile(directory / "plain"),
        "paged": PlainFile(directory / "paged", page_by_page=True),
        "lmdb": LmdbFile(directory / "lmdb"),
        "tier": TierFile(directory / "tier"),
    }
    batch_of = iter(range(1, 1 << 30))
    cases = {}
    for name, file in files.items():

        def run(put: Callable[[list[bytes], list[bytes]], None] = file.put) -> float:
            keys = bench_keys(pages, salt=next(batch_of))
            values = [bench_value(key) for key in keys]
            return timed(lambda: put(keys, values))

        cases[name] = run
    interleaved(cases, min(batches, 5))
    results = interleaved(cases, batches)
    for file in files.values():
        file.close()
    rates = {f"{name}_MB_s": megabytes_per_s(VALUE_BYTES * pages, results[name]) for name in cases}
    return [
        figure(
            f"durable put, batches of {pages}: LMDB commit / write + fsync of a plain file",
            speed_ratios(results, "lmdb", "plain"),
            predicted=0.85,
            limit=0.75,
            details=rates,
        ),
        figure(
            f"durable put, batches of {pages}: through the tier / the same plain file",
            speed_ratios(results, "tier", "plain"),
            predicted=0.80,
            details=rates,
        ),
        figure(
            f"durable put, batches of {pages}: LMDB commit / a plain file written page by page",
            speed_ratios(results, "lmdb", "paged"),
            predicted=0.85,
            details=rates,
        ),
    ]


class PlainFile:
    """Appends a batch and fsyncs: in one call as LMDB does, or ``page_by_page``, which may be faster.

    (With large folios, Linux 6.18 takes ten times as long for one write of 4 MB as for four of 1 MB.)
    """

    def __init__(self, path: Path, *, page_by_page: bool = False) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self._page_by_page = page_by_page

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """One durable batch."""
        if self._page_by_page:
            for value in values:
                os.write(self._fd, value)
        else:
            wrote = os.writev(self._fd, values)
            assert wrote == sum(map(len, values))
        os.fsync(self._fd)

    def close(self) -> None:
        """Close."""
        os.close(self._fd)


class LmdbFile:
    """One segment."""

    def __init__(self, path: Path) -> None:
        self._segment = Segment(path, 1, map_bytes=map_bytes_for(4 * GIB), durable=True, created_s=0.0)

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """One durable batch."""
        row = Row(VALUE_BYTES, 0.0)
        self._segment.commit([(key, value, row) for key, value in zip(keys, values, strict=True)])

    def close(self) -> None:
        """Close."""
        self._segment.close()


class TierFile:
    """The whole tier, in this process."""

    def __init__(self, path: Path) -> None:
        self._tier = SsdTier(SsdConfig(directory=path, capacity_bytes=8 * GIB, queue_bytes=64 * MIB))

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """One durable batch."""
        items = [PutItem(key, value) for key, value in zip(keys, values, strict=True)]
        assert self._tier.put(items).result().stored == len(keys)

    def close(self) -> None:
        """Close."""
        self._tier.close()


def timed(work: Callable[[], None]) -> float:
    """Seconds that ``work`` takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
