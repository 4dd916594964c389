"""The whole node over loopback against bare gRPC: GetPages, MatchPrefix."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from cedar.kvstore.client import StoreClient
from cedar.kvstore.frames import FRAME_BYTES
from cedar.kvstore.machine import keep_freed_memory
from cedar.kvstore.rpc import ServiceStub, channel_options
from cedar.v1 import store_pb2

from .store_bare_server import SERVICE as BARE
from .store_disk import BATCH
from .store_measure import (
    FINGERPRINT,
    ROOT,
    VALUE_BYTES,
    Figure,
    bench_keys,
    bench_value,
    figure,
    megabytes_per_s,
    speed_ratios,
)

STORE: Final = store_pb2.DESCRIPTOR.services_by_name["Store"]
FRAME_PAGES: Final = FRAME_BYTES // VALUE_BYTES
MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "268435456"}
"""What every worker of a cluster runs with."""

Case = Callable[[], Awaitable[float]]


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """A server in a process of its own; its address."""
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **MALLOC},
    )
    assert child.stdout is not None
    try:
        yield json.loads(child.stdout.readline())["address"]
    finally:
        child.terminate()
        child.wait(30)
        child.stdout.close()


def bare_server(frame_bytes: int, frames: int) -> contextlib.AbstractContextManager[str]:
    """The yardstick."""
    return process("cedar.ops.bench.store_bare_server", str(frame_bytes), str(frames))


@contextlib.contextmanager
def node(directory: Path, *options: str) -> Iterator[str]:
    """A store node."""
    with process("cedar.kvstore.node", "--directory", str(directory), "--capacity-gib", "16", *options) as at:
        yield at


async def interleaved(cases: Mapping[str, Case], repeats: int) -> dict[str, list[float]]:
    """As ``store_measure.interleaved``, on an event loop; the order turns."""
    names = list(cases)
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            results[name].append(await cases[name]())
    return results


async def seconds(work: Awaitable[Any]) -> float:
    """Seconds that an awaitable takes."""
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


def loopback(directory: Path, *, pages: int = 128, repeats: int = 25) -> list[Figure]:
    """Reads and look-ups. The client keeps freed memory, as all workers of a cluster do (``MALLOC``)."""
    keep_freed_memory()
    frame_bytes = FRAME_PAGES * VALUE_BYTES
    with node(directory / "node") as at, bare_server(frame_bytes, pages // FRAME_PAGES) as bare:
        return asyncio.run(_loopback(at, bare, pages, repeats))


async def _loopback(at: str, bare: str, pages: int, repeats: int) -> list[Figure]:
    keys = bench_keys(pages)
    long_chain = [*keys, *bench_keys(8192 - pages, salt=1)]
    client = StoreClient(at, fingerprint=FINGERPRINT)
    for start in range(0, pages, BATCH):
        chunk = keys[start : start + BATCH]
        counts = await client.put_pages(chunk, [bench_value(key) for key in chunk], first_page=start)
        assert counts.stored + counts.present == len(chunk), counts
    small = bench_keys(8192, salt=2)
    for start in range(0, len(small), 512):
        chunk = small[start : start + 512]
        await client.put_pages(chunk, [bench_value(key, 256) for key in chunk], first_page=start)
    async with (
        grpc.aio.insecure_channel(bare, options=channel_options()) as to_bare,
        grpc.aio.insecure_channel(at, options=channel_options()) as to_node,
    ):
        stream: Any = to_bare.unary_stream(f"/{BARE}/Stream")
        empty: Any = to_bare.unary_unary(f"/{BARE}/Empty")
        stub = ServiceStub(to_node, STORE)
        request = store_pb2.GetPagesRequest(page_keys=b"".join(keys))
        frames = str(pages // FRAME_PAGES).encode()

        async def bare_stream() -> None:
            async for _ in stream(frames):
                pass

        async def get_frames() -> None:
            received = 0
            async for message in stub.GetPages(request):
                received += len(message)
            assert received >= pages * VALUE_BYTES

        async def get_verified() -> None:
            count = 0
            async for _ in client.get_pages(keys):
                count += 1
            assert count == pages

        async def bare_calls() -> None:
            for _ in range(10):
                await empty(b"")

        async def match(wanted: list[bytes], held: int) -> None:
            assert (await client.match(ROOT, wanted)).pages == held

        cases: dict[str, Case] = {
            "bare stream": lambda: seconds(bare_stream()),
            "frames": lambda: seconds(get_frames()),
            "client": lambda: seconds(get_verified()),
            "bare calls": lambda: seconds(bare_calls()),
            "match held": lambda: seconds(match(small, len(small))),
            "match partly": lambda: seconds(match(long_chain, pages)),
        }
        await interleaved(cases, 3)
        results = await interleaved(cases, repeats)
    await client.close()
    trips = [calls / 10 for calls in results["bare calls"]]
    rates = {
        f"{name}_MB_s": megabytes_per_s(pages * VALUE_BYTES, results[name])
        for name in ("bare stream", "frames", "client")
    }
    ms = {"trip_ms": sorted(trips)[len(trips) // 2] * 1e3}

    def in_trips(name: str) -> list[float]:
        return [own / trip for own, trip in zip(results[name], trips, strict=True)]

    return [
        figure(
            "GetPages over loopback, frames as sent / bare stream of as many bytes",
            speed_ratios(results, "frames", "bare stream"),
            predicted=0.95,
            limit=0.85,
            details=rates,
        ),
        figure(
            "GetPages through StoreClient, verified / the same bare stream",
            speed_ratios(results, "client", "bare stream"),
            predicted=0.88,
            limit=0.85,
            details=rates,
        ),
        figure(
            "MatchPrefix, 8,192 keys all held / bare unary round trip",
            in_trips("match held"),
            predicted=6.0,
            limit=10.0,
            at_least=False,
            details=ms,
        ),
        figure(
            f"MatchPrefix, 8,192 keys of which {pages} held / bare unary round trip",
            in_trips("match partly"),
            predicted=2.5,
            limit=10.0,
            at_least=False,
            details=ms,
        ),
    ]
