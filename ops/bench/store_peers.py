"""The same pages through peers on the same machine: Redis, the Mooncake store, and LMCache's local disk.

Get: 64 pages, pipelined. Put: 16 pages. What is equal and what is not:

* All clients check each page on arrival. The node reads it from the disk's cache and has checked it before;
  its puts are acknowledged when they are on disk.
* Redis answers from its own memory. Puts: appendonly, appendfsync always. By redis-py, and by a bare socket
  with one reused buffer, which is the least that any client can do.
* Mooncake (TCP) fetches from the memory of another process; its puts are to memory, and not measured.
* LMCache's local disk back end is a library that reads and writes files of its own, and does not flush them:
  beside it stands the tier in this process, and the node.

Mooncake and LMCache are found by ``CEDAR_BENCH_MOONCAKE`` and ``CEDAR_BENCH_LMCACHE``: Pythons that have
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import GIB, MIB, SsdConfig
from cedar.kvstore.header import verify_value
from cedar.kvstore.machine import keep_freed_memory
from cedar.kvstore.put import PutItem
from cedar.kvstore.ssd_tier import SsdTier

from .store_disk import BATCH, timed
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
from .store_rpc import MALLOC, Case, interleaved, node, seconds

PAGES = 64
Ask = Callable[[str, Sequence[bytes]], float]


class RedisClient(Protocol):
    """Puts and gets of many values at a time."""

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Store values; returns when they are durable."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | memoryview]:
        """Fetch values."""


def peers(directory: Path, *, repeats: int = 15) -> list[Figure]:
    """Ratios to each peer that is installed."""
    keep_freed_memory()  # as the cluster's workers
    figures: list[Figure] = []
    if shutil.which("redis-server") is not None:
        (directory / "redis").mkdir()
        with node(directory / "node") as at, redis(directory / "redis") as port:
            figures += asyncio.run(_against_redis(at, port, repeats))
    python = os.environ.get("CEDAR_BENCH_MOONCAKE")
    if python:
        with node(directory / "node2") as at, mooncake(python) as ask:
            figures += asyncio.run(_against_mooncake(at, ask, repeats))
    python = os.environ.get("CEDAR_BENCH_LMCACHE")
    if python:
        (directory / "lmcache").mkdir()
        with node(directory / "node3") as at, lmcache(python, directory / "lmcache") as ask:
            figures += asyncio.run(_against_lmcache(at, directory / "tier", ask, repeats))
    return figures


async def _filled(at: str, keys: list[bytes]) -> StoreClient:
    """A client of the node, which holds pages under these keys."""
    store = StoreClient(at, fingerprint=FINGERPRINT)
    for start in range(0, len(keys), BATCH):
        chunk = keys[start : start + BATCH]
        await store.put_pages(chunk, [bench_value(key) for key in chunk], first_page=start)
    return store


async def _get(store: StoreClient, keys: Sequence[bytes]) -> None:
    count = 0
    async for _ in store.get_pages(keys):  # verified by the client
        count += 1
    assert count == len(keys)


async def _against_lmcache(at: str, directory: Path, ask: Ask, repeats: int) -> list[Figure]:
    keys = bench_keys(PAGES)
    store = await _filled(at, keys)
    ask("put", keys)
    salts = iter(range(1, 1 << 30))
    tier = SsdTier(SsdConfig(directory=directory, capacity_bytes=8 * GIB, queue_bytes=64 * MIB))
    tier.put([PutItem(key, bench_value(key)) for key in keys]).result()
    room = memoryview(bytearray(PAGES * VALUE_BYTES))

    def get_from_tier() -> None:
        views = [room[i * VALUE_BYTES : (i + 1) * VALUE_BYTES] for i in range(PAGES)]
        run = tier.read_into(keys, len(room), lambda count, size: views)
        assert run is not None
        assert run.count == PAGES

    def put_to_tier() -> float:
        items = [PutItem(key, bench_value(key)) for key in bench_keys(BATCH, salt=next(salts))]

        def put() -> None:
            assert tier.put(items).result().stored == BATCH

        return timed(put)

    def put_to_peer() -> float:
        return ask("put", bench_keys(BATCH, salt=next(salts)))

    cases: dict[str, Case] = {
        "get node": lambda: seconds(_get(store, keys)),
        "get tier": lambda: asyncio.to_thread(timed, get_from_tier),
        "get LMCache": lambda: asyncio.to_thread(ask, "get", keys),
        "put tier": lambda: asyncio.to_thread(put_to_tier),
        "put LMCache": lambda: asyncio.to_thread(put_to_peer),
    }
    await interleaved(cases, 2)
    results = await interleaved(cases, repeats)
    await store.close()
    tier.close()
    gets = {
        f"{name}_MB_s": megabytes_per_s(PAGES * VALUE_BYTES, results[f"get {name}"])
        for name in ("tier", "node", "LMCache")
    }
    puts = {
        f"{name}_MB_s": megabytes_per_s(BATCH * VALUE_BYTES, results[f"put {name}"])
        for name in ("tier", "LMCache")
    }
    return [
        figure(
            f"get of {PAGES} pages: tier in this process, verified / LMCache's local disk",
            speed_ratios(results, "get tier", "get LMCache"),
            predicted=2.0,
            limit=1.0,
            details=gets,
        ),
        figure(
            f"get of {PAGES} pages: node over gRPC, verified / LMCache's local disk, no server",
            speed_ratios(results, "get node", "get LMCache"),
            predicted=0.9,
            details=gets,
        ),
        figure(
            f"put of {BATCH} pages: tier, on disk / LMCache's local disk, not flushed",
            speed_ratios(results, "put tier", "put LMCache"),
            predicted=0.5,
            details=puts,
        ),
    ]


async def _against_mooncake(at: str, ask: Ask, repeats: int) -> list[Figure]:
    keys = bench_keys(PAGES)
    store = await _filled(at, keys)
    ask("put", keys)

    cases: dict[str, Case] = {
        "node": lambda: seconds(_get(store, keys)),
        "Mooncake": lambda: asyncio.to_thread(ask, "get", keys),
    }
    await interleaved(cases, 2)
    results = await interleaved(cases, repeats)
    await store.close()
    rates = {f"{name}_MB_s": megabytes_per_s(PAGES * VALUE_BYTES, results[name]) for name in cases}
    return [
        figure(
            f"get of {PAGES} pages: node, verified / Mooncake store over TCP",
            speed_ratios(results, "node", "Mooncake"),
            predicted=1.2,
            limit=1.0,
            details=rates,
        )
    ]


@contextlib.contextmanager
def mooncake(python: str) -> Iterator[Ask]:
    """A Mooncake store; how long it takes to put or get values."""
    master = f"127.0.0.1:{free_port()}"
    binary = str(Path(python).parent / "mooncake_master")
    script = str(Path(__file__).parent / "store_mooncake.py")
    with contextlib.ExitStack() as stack:
        server = subprocess.Popen(
            [binary, f"--port={master.rpartition(':')[2]}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(server.wait, 30)
        stack.callback(server.terminate)
        time.sleep(1.5)
        asks = {
            role: stack.enter_context(asking(python, script, role, master)) for role in ("serve", "client")
        }
        yield asks["client"]


@contextlib.contextmanager
def lmcache(python: str, directory: Path) -> Iterator[Ask]:
    """LMCache's local disk back end in a process of its own; how long it takes to put or get values."""
    with asking(python, str(Path(__file__).parent / "store_lmcache.py"), str(directory)) as ask:
        yield ask


@contextlib.contextmanager
def asking(*command: str) -> Iterator[Ask]:
    """A peer's process that says "ready" and then answers commands with seconds; see ``store_mooncake``."""
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **MALLOC},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout

    def ask(verb: str, keys: Sequence[bytes]) -> float:
        stdin.write(" ".join([verb, str(VALUE_BYTES), *(key.hex() for key in keys)]) + "\n")
        stdin.flush()
        took_s = float(stdout.readline())
        if took_s < 0:
            raise RuntimeError(f"{command[1]}: {verb} failed")
        return took_s

    try:
        while (line := stdout.readline()).strip() != "ready":
            if not line:
                raise RuntimeError(f"{' '.join(command)} has ended")
        yield ask
    finally:
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()
    child.wait(30)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def _against_redis(at: str, port: int, repeats: int) -> list[Figure]:
    clients: dict[str, RedisClient] = {"Redis by plain socket": SocketClient(port)}
    with contextlib.suppress(ImportError):
        clients["Redis by redis-py"] = LibraryClient(import_module("redis"), port)
    keys = bench_keys(PAGES)
    store = await _filled(at, keys)
    next(iter(clients.values())).put(keys, [bench_value(key) for key in keys])
    salts = iter(range(1, 1 << 30))

    async def put_to_node() -> float:
        batch = bench_keys(BATCH, salt=next(salts))
        sealed = [bench_value(key) for key in batch]
        return await seconds(store.put_pages(batch, sealed))

    def get_from(client: RedisClient) -> float:
        def work() -> None:
            for key, value in zip(keys, client.get(keys), strict=True):
                verify_value(value, page_key=key)

        return timed(work)

    def put_to(client: RedisClient) -> float:
        batch = bench_keys(BATCH, salt=next(salts))
        sealed = [bench_value(key) for key in batch]
        return timed(lambda: client.put(batch, sealed))

    cases: dict[str, Case] = {"get node": lambda: seconds(_get(store, keys)), "put node": put_to_node}
    for name, client in clients.items():
        cases[f"get {name}"] = lambda client=client: asyncio.to_thread(get_from, client)  # type: ignore[misc]
        cases[f"put {name}"] = lambda client=client: asyncio.to_thread(put_to, client)  # type: ignore[misc]
    await interleaved(cases, 2)
    results = await interleaved(cases, repeats)
    await store.close()
    figures = []
    for name in clients:
        for what, pages, predicted in (("get", PAGES, 0.9), ("put", BATCH, 1.5)):
            rates = {
                f"{who}_MB_s": megabytes_per_s(pages * VALUE_BYTES, results[f"{what} {who}"])
                for who in ("node", name)
            }
            figures.append(
                figure(
                    f"{what} of {pages} pages, verified: node / {name}"
                    if what == "get"
                    else f"durable put of {pages} pages: node / {name}",
                    speed_ratios(results, f"{what} node", f"{what} {name}"),
                    predicted=predicted,
                    limit=1.0 if what == "get" and name.endswith("redis-py") else None,
                    details=rates,
                )
            )
    return figures


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[int]:
    """A Redis that writes every batch to disk before it answers; its port."""
    port = free_port()
    options = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", str(directory)]
    child = subprocess.Popen(
        ["redis-server", "--bind", "127.0.0.1", "--port", str(port), *options], stdout=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        child.wait(30)


class SocketClient:
    """The least a client can do: one buffer, filled by ``recv_into``."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(PAGES * (VALUE_BYTES + 64))

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Pipelined SETs."""
        for key, value in zip(keys, values, strict=True):
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)))
            self._socket.sendall(value)
            self._socket.sendall(b"\r\n")
        answers = self._read(5 * len(keys))
        assert bytes(answers) == b"+OK\r\n" * len(keys)

    def get(self, keys: Sequence[bytes]) -> list[bytes | memoryview]:
        """Pipelined GETs of values of one size."""
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(k), k) for k in keys))
        head = b"$%d\r\n" % VALUE_BYTES
        each = len(head) + VALUE_BYTES + 2
        data = self._read(each * len(keys))
        return [data[each * i + len(head) : each * (i + 1) - 2] for i in range(len(keys))]

    def _read(self, count: int) -> memoryview:
        view = memoryview(self._buffer)[:count]
        position = 0
        while position < count:
            received = self._socket.recv_into(view[position:])
            if not received:
                raise ConnectionError("Redis has gone")
            position += received
        return view


class LibraryClient:
    """redis-py, pipelined, as its manual says."""

    def __init__(self, module: Any, port: int) -> None:
        self._redis = module.Redis("127.0.0.1", port)

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Pipelined SETs."""
        with self._redis.pipeline(transaction=False) as pipe:
            for key, value in zip(keys, values, strict=True):
                pipe.set(key, value)
            pipe.execute()

    def get(self, keys: Sequence[bytes]) -> list[bytes | memoryview]:
        """Pipelined GETs."""
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.get(key)
            found: list[bytes | memoryview] = pipe.execute()
            return found
