"""A store in a network namespace of its own, whose link is taken down and up again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.rpc import ServiceStub, service_descriptor, transport_options
from cedar.v1 import store_pb2

from . import store_child
from .store_child import ROOT, keys_of, value_of

KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 1.0, 1.0
PAGES = 20
PORT = 7070


def ip(*arguments: str) -> None:
    """Run iproute2. OSError when it will not."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass
class Link:
    """Two namespaces with a cable between them."""

    store: str
    client: str

    def up(self) -> None:
        ip("-n", self.store, "link", "set", "wire", "up")

    def down(self) -> None:
        ip("-n", self.store, "link", "set", "wire", "down")


@contextmanager
def cable(name: str) -> Iterator[Link]:
    """OSError where namespaces cannot be made."""
    link = Link(f"{name}s", f"{name}c")
    try:
        for namespace in (link.store, link.client):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        other = ("peer", "name", "wire", "netns", link.client)
        ip("-n", link.store, "link", "add", "wire", "type", "veth", *other)
        for namespace, address in ((link.store, "198.18.0.1/30"), (link.client, "198.18.0.2/30")):
            ip("-n", namespace, "addr", "add", address, "dev", "wire")
            ip("-n", namespace, "link", "set", "wire", "up")
        yield link
    finally:
        for namespace in (link.store, link.client):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@pytest.fixture
def link() -> Iterator[Link]:
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 here: a network cannot be cut")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(cable(f"cedar{os.getpid()}"))
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


def start(namespace: str, *command: str) -> subprocess.Popen[str]:
    path = ":".join([*(part for part in sys.path if part), str(Path(__file__).parents[2])])
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


async def line(process: subprocess.Popen[str], within_s: float = 30.0) -> Any:
    assert process.stdout is not None
    return json.loads(await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), within_s))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


async def test_a_partition_is_a_miss_and_heals(link: Link, tmp_path: Path) -> None:
    node = start(
        link.store, "-m", "cedar.kvstore.node", "--directory", str(tmp_path / "store"),
        "--host", "198.18.0.1", "--port", str(PORT), "--reserve-mib", "1",
        "--window-mib", "4", "--capacity-gib", "0.25",
    )  # fmt: skip
    client = None
    try:
        await line(node)
        client = start(link.client, "-m", "tests.faults.test_store_partition")
        assert await line(client) == {"matched": PAGES, "read": PAGES, "stored": PAGES}
        assert client.stdin is not None
        client.stdin.write("cut\n")
        client.stdin.flush()
        assert await line(client) == "holding"
        link.down()
        silent = await line(client)
        assert silent["status"] == "UNAVAILABLE"
        assert silent["after_s"] <= KEEPALIVE_S + KEEPALIVE_TIMEOUT_S + 1.0
        missed = await line(client)
        assert (missed["matched"], missed["read"], missed["stored"]) == (0, 0, 0)
        assert missed["slowest_s"] < 0.5 + 1.0
        link.up()
        healed = await line(client)
        assert (healed["matched"], healed["read"], healed["stored"]) == (PAGES, PAGES, PAGES)
        os.kill(node.pid, signal.SIGTERM)
        assert await asyncio.to_thread(node.wait, 20) == 0
    finally:
        for process in (node, client):
            if process is not None:
                end(process)


# ---- the client's side, in its namespace ----


async def ask(client: StoreClient) -> dict[str, Any]:
    """One of each call, and the longest that any took."""
    keys = keys_of(0, PAGES)
    slowest_s = 0.0
    began_s = time.monotonic()
    matched = (await client.match(ROOT, keys)).pages
    slowest_s = max(slowest_s, time.monotonic() - began_s)
    began_s = time.monotonic()
    received = [bytes(value) async for _, value in client.get_pages(keys)]
    slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert received == [value_of(key) for key in keys[: len(received)]]
    began_s = time.monotonic()
    counts = await client.put_pages(keys, [value_of(key) for key in keys])
    slowest_s = max(slowest_s, time.monotonic() - began_s)
    stored = counts.stored + counts.present
    return {"matched": matched, "read": len(received), "stored": stored, "slowest_s": slowest_s}


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def main() -> None:
    """Put a chain, hold an idle stream while the link goes down, then ask as a user does."""
    address = f"198.18.0.1:{PORT}"
    config = ClientConfig(
        match_timeout_s=0.5, stall_timeout_s=0.5, put_timeout_s=0.5, breaker_max_open_s=0.5,
        keepalive_s=KEEPALIVE_S, keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
    )  # fmt: skip
    client = StoreClient(address, fingerprint=store_child.FINGERPRINT, config=config)
    keys = keys_of(0, PAGES)
    await client.put_pages(keys, [value_of(key) for key in keys])
    found = await ask(client)
    del found["slowest_s"]
    say(found)
    await asyncio.to_thread(sys.stdin.readline)
    options = transport_options(keepalive_s=KEEPALIVE_S, keepalive_timeout_s=KEEPALIVE_TIMEOUT_S)
    async with grpc.aio.insecure_channel(address, options=options.channel) as channel:
        stub = ServiceStub(channel, service_descriptor("cedar.v1.Store"))
        call = stub.PutPages(_nothing(), timeout=60)  # waits for frames that do not come
        await stub.Stats(store_pb2.StatsRequest(), timeout=5)
        say("holding")
        began_s = time.monotonic()
        try:
            await call
        except grpc.aio.AioRpcError as error:
            say({"status": error.code().name, "after_s": time.monotonic() - began_s})
    say(await ask(client))
    ends_s = time.monotonic() + 20
    found = await ask(client)
    while found["stored"] < PAGES and time.monotonic() < ends_s:
        await asyncio.sleep(0.1)
        found = await ask(client)
    say(found)
    await client.close()


async def _nothing() -> Any:
    await asyncio.sleep(3600)
    yield b""


if __name__ == "__main__":
    asyncio.run(main())
