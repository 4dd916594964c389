"""The SSD tier against plain files: reads that hit the page cache, and durable writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cedar.kvstore.commit import INDEX_LAG_BYTES
from cedar.kvstore.config import GIB, MIB, SsdConfig
from cedar.kvstore.header import verify_value
from cedar.kvstore.index import PageIndex
from cedar.kvstore.put import PutItem
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment
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
    plain = directory / "plain"
    plain.write_bytes(b"".join(values[key] for key in keys))
    places = {key: VALUE_BYTES * number for number, key in enumerate(keys)}
    tier = SsdTier(SsdConfig(directory=directory / "tier", capacity_bytes=4 * GIB), background=False)
    tier.put([PutItem(key, values[key]) for key in keys]).result()
    index = PageIndex(lambda _: 1e9, 1e9)
    segment = Segment.create(directory / "00000001", 1, durable=True, created_s=0.0)
    for start in range(0, pages, BATCH):
        batch = keys[start : start + BATCH]
        for key, row in segment.append([(key, values[key], Row(VALUE_BYTES, 0.0)) for key in batch]):
            index.insert(key, row, segment)
    fd = os.open(plain, os.O_RDONLY)
    buffer = bytearray(VALUE_BYTES)
    view = memoryview(buffer)

    def from_file() -> None:
        for key in order:
            os.preadv(fd, [buffer], places[key])
            verify_value(view, page_key=key)

    def from_segment() -> None:
        for key in order:
            entry = index.live(key, 1.0)
            assert entry is not None
            verify_value(entry.segment.read(entry.offset, entry.size), page_key=key)

    def from_segment_into() -> None:
        for key in order:
            entry = index.live(key, 1.0)
            assert entry is not None
            entry.segment.read_into(entry.offset, view)
            verify_value(view, page_key=key)

    def from_tier() -> None:
        for key in order:
            assert tier.read_run([key], 1, len) is not None

    def from_tier_into() -> None:
        for key in order:
            assert tier.read_into([key], 1, lambda count, size: [view]) is not None

    cases = {
        "preadv": lambda: timed(from_file),
        "get": lambda: timed(from_segment),
        "get_into": lambda: timed(from_segment_into),
        "tier": lambda: timed(from_tier),
        "tier_into": lambda: timed(from_tier_into),
    }
    interleaved(cases, 2)
    results = interleaved(cases, repeats)
    os.close(fd)
    tier.close()
    segment.close()
    rates = {f"{name}_MB_s": megabytes_per_s(VALUE_BYTES * pages, results[name]) for name in cases}

    def ratio(name: str, what: str, predicted: float, limit: float | None = None) -> Figure:
        ratios = speed_ratios(results, name, "preadv")
        return figure(f"warm get: {what}", ratios, predicted=predicted, limit=limit, details=rates)

    return [
        ratio("get", "index, value in place, checksum / preadv into a reused buffer + checksum", 1.8, 0.95),
        ratio("get_into", "index, value into a reused buffer, checksum / the same preadv", 0.93),
        ratio("tier", "through the tier (use and counters too), value in place / the same preadv", 1.3),
        ratio("tier_into", "through the tier, value into a reused buffer / the same preadv", 0.75),
    ]


def durable_puts(directory: Path, *, batches: int = 160) -> list[Figure]:
    """Batches of 16 and of 64 pages."""
    figures = []
    for pages, repeats in ((BATCH, batches), (4 * BATCH, max(batches // 4, 1))):
        (directory / str(pages)).mkdir()
        figures += _durable_puts(directory / str(pages), pages, repeats)
    return figures


def _durable_puts(directory: Path, pages: int, batches: int) -> list[Figure]:
    """Batches, each on disk before the next is begun: a segment, the tier, and plain files.

    Batch by batch in turn, so that all meet the same disk; each round gives its ratios.
    """
    files: dict[str, PlainFile | SegmentFile | TierFile] = {
        "plain": PlainFile(directory / "plain"),
        "paged": PlainFile(directory / "paged", page_by_page=True),
        "segment": SegmentFile(directory / "segment"),
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
    fastest = "paged" if sum(results["paged"]) < sum(results["plain"]) else "plain"
    how = {"plain": "in one call", "paged": "page by page"}
    what = {"segment": "commit of a segment", "tier": "through the tier"}
    return [
        figure(
            f"durable put, batches of {pages}: {what[name]} / plain file written {how[file]}, fsync",
            speed_ratios(results, name, file),
            predicted=1.2,
            limit=0.75 if file == fastest else None,
            details=rates,
        )
        for file in ("plain", "paged")
        for name in ("segment", "tier")
    ]


class PlainFile:
    """Appends a batch and fsyncs: in one call, or ``page_by_page``, which may be faster.

    (One call gets large folios, whose memory a virtual machine may have to get back from its host.)
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


class SegmentFile:
    """One segment, with its index written as often as the store does."""

    def __init__(self, path: Path) -> None:
        self._segment = Segment.create(path, 1, durable=True, created_s=0.0)

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """One durable batch."""
        row = Row(VALUE_BYTES, 0.0)
        self._segment.append([(key, value, row) for key, value in zip(keys, values, strict=True)])
        if self._segment.unindexed_bytes >= INDEX_LAG_BYTES:
            self._segment.write_index()

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
