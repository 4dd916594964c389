"""Durable puts through the whole node, beside the same bytes written and fsynced to a plain file.

One sample is 128 pages (29 MB). Plain: eight batches of 16 pages, each written (in one call, or page by page)
and then fsynced, one after the other, to a file that grows. Node: two calls of 64 pages under way (each a
chunk of a long prompt), which it receives, checks, commits and acknowledges. Samples alternate in an order
that turns, and every round gives one ratio each. The limit holds against the plain file that was the faster
one in this run.

Two things are the same for all of them, as each alone changes a plain file's speed by a factor of three:

- Memory of the page cache has been used a moment ago: before each sample the cache of all that was written is
  given back, as a machine whose cache is full does all the time. Otherwise each sample takes memory that was
  not used for long, and a virtual machine whose host takes free memory back then waits for the host at each
  4 KiB, which takes several times as long as the copy.
- The disk is not throttled. One of a cloud has an allowance that long writing uses up, and is slow from then
  on. So ``MEAN_BYTES_PER_S`` are written on average; in between the processor is kept busy, since one that
  sleeps takes a while to be fast again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cedar.kvstore.client import StoreClient
from cedar.kvstore.machine import keep_freed_memory

from .store_disk import BATCH, PlainFile, timed
from .store_measure import (
    FINGERPRINT,
    VALUE_BYTES,
    Figure,
    bench_keys,
    bench_value,
    figure,
    megabytes_per_s,
    speed_ratios,
)
from .store_rpc import Case, interleaved, node

MEAN_BYTES_PER_S: Final = 400e6


def node_puts(directory: Path, *, repeats: int = 24, pages: int = 64) -> list[Figure]:
    """See above; ``pages`` of each of the two calls."""
    keep_freed_memory()
    with node(directory / "node") as at:
        return asyncio.run(_node_puts(at, directory, repeats, pages))


class _Evenly:
    """Makes batches, and the same conditions for each sample."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._salt = 0
        self._free_s = time.perf_counter()

    def batch(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """Keys and sealed values that nobody has written before."""
        self._salt += 1
        keys = bench_keys(count, salt=self._salt)
        return keys, [bench_value(key) for key in keys]

    def settle(self, total_bytes: int) -> None:
        """Before a sample that will write so much."""
        for pattern in ("plain-*", "node/segments/*/values.dat"):
            for path in self._directory.glob(pattern):
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        while time.perf_counter() < self._free_s:
            pass
        self._free_s = time.perf_counter() + total_bytes / MEAN_BYTES_PER_S


async def _node_puts(at: str, directory: Path, repeats: int, pages: int) -> list[Figure]:
    client = StoreClient(at, fingerprint=FINGERPRINT)
    files = {
        "one call": PlainFile(directory / "plain-one"),
        "page by page": PlainFile(directory / "plain-paged", page_by_page=True),
    }
    evenly = _Evenly(directory)
    total_bytes = 2 * pages * VALUE_BYTES

    async def put(keys: list[bytes], values: list[bytes]) -> None:
        counts = await client.put_pages(keys, values)
        assert counts.stored == len(keys), counts

    def plain(file: PlainFile) -> Callable[[], float]:
        keys, values = evenly.batch(2 * pages)
        evenly.settle(total_bytes)

        def write() -> None:
            for start in range(0, len(keys), BATCH):
                file.put(keys[start : start + BATCH], values[start : start + BATCH])

        return lambda: timed(write)

    async def through(file: PlainFile) -> float:
        return await asyncio.to_thread(plain(file))

    async def through_node(count: int) -> float:
        calls = [evenly.batch(count) for _ in range(2 * pages // count)]
        evenly.settle(total_bytes)
        started_s = time.perf_counter()
        if count == BATCH:
            for call in calls:
                await put(*call)
        else:
            await asyncio.gather(*(put(*call) for call in calls))
        return time.perf_counter() - started_s

    cases: dict[str, Case] = {
        "one call": lambda: through(files["one call"]),
        "two of 64": lambda: through_node(pages),
        "page by page": lambda: through(files["page by page"]),
        "16 at a time": lambda: through_node(BATCH),
    }
    await interleaved(cases, 3)
    results = await interleaved(cases, repeats)
    await client.close()
    for file in files.values():
        file.close()
    rates = {f"{name}_MB_s": megabytes_per_s(total_bytes, results[name]) for name in cases}
    fastest = max(files, key=lambda name: rates[f"{name}_MB_s"])

    def ratio(name: str, what: str, file: str, predicted: float, limited: bool) -> Figure:
        return figure(
            f"durable put through the node, {what} / plain file in batches of 16, {file}, fsync",
            speed_ratios(results, name, file),
            predicted=predicted,
            limit=0.6 if limited and file == fastest else None,
            details=rates,
        )

    return [
        *(ratio("two of 64", "two calls of 64 pages", file, 0.7, True) for file in files),
        *(ratio("16 at a time", "one call of 16 pages at a time", file, 0.5, False) for file in files),
    ]
