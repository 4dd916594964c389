"""The same pages through peers on the same machine: Redis, by its own Python client too, and Mooncake.

Get: 64 pages, pipelined, each verified on arrival (with Mooncake neither side verifies more than it does by
itself). Put: 16 pages, acknowledged when durable (Redis: appendonly, appendfsync always); Mooncake's are in
memory only, so its put is no peer of a durable one. Both peers serve from memory, the node from LMDB.
Mooncake (TCP, fetched from another process) is found by ``CEDAR_BENCH_MOONCAKE``: a Python that imports it.
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
from cedar.kvstore.header import verify_value

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
from .store_rpc import Case, interleaved, node, seconds

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
    figures: list[Figure] = []
    if shutil.which("redis-server") is not None:
        (directory / "redis").mkdir()
        with node(directory / "node") as at, redis(directory / "redis") as port:
            figures += asyncio.run(_against_redis(at, port, repeats))
    python = os.environ.get("CEDAR_BENCH_MOONCAKE")
    if python:
        with node(directory / "node2") as at, mooncake(python) as ask:
            figures += asyncio.run(_against_mooncake(at, ask, repeats))
    return figures


async def _against_mooncake(
    at: str, ask: Callable[[str, Sequence[bytes]], float], repeats: int
) -> list[Figure]:
    keys = bench_keys(PAGES)
    store = StoreClient(at, fingerprint=FINGERPRINT)
    for start in range(0, PAGES, BATCH):
        chunk = keys[start : start + BATCH]
        await store.put_pages(chunk, [bench_value(key) for key in chunk], first_page=start)
    ask("put", keys)

    async def get_from_node() -> None:
        async for _ in store.get_pages(keys):
            pass

    cases: dict[str, Case] = {
        "node": lambda: seconds(get_from_node()),
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
        roles = {}
        for role in ("serve", "client"):
            child = subprocess.Popen(
                [python, script, role, master], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            stack.callback(_end, child)
            roles[role] = child
            assert child.stdout is not None
            while child.stdout.readline().strip() != "ready":
                if child.poll() is not None:
                    raise RuntimeError(f"Mooncake's {role} process has ended")
        client = roles["client"]

        def ask(verb: str, keys: Sequence[bytes]) -> float:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(" ".join([verb, str(VALUE_BYTES), *(key.hex() for key in keys)]) + "\n")
            client.stdin.flush()
            took_s = float(client.stdout.readline())
            if took_s < 0:
                raise RuntimeError(f"Mooncake: {verb} failed")
            return took_s

        yield ask


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
    values = [bench_value(key) for key in keys]
    store = StoreClient(at, fingerprint=FINGERPRINT)
    for start in range(0, PAGES, BATCH):
        await store.put_pages(keys[start : start + BATCH], values[start : start + BATCH], first_page=start)
    next(iter(clients.values())).put(keys, values)
    salts = iter(range(1, 1 << 30))

    async def get_from_node() -> None:
        count = 0
        async for _ in store.get_pages(keys):  # verified by the client
            count += 1
        assert count == PAGES

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

    cases: dict[str, Case] = {"get node": lambda: seconds(get_from_node()), "put node": put_to_node}
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
