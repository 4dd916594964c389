"""kill -9 of real nodes at random points, round after round: while they start, put, evict, stop.

What was acknowledged is intact; where the store is too small for it, intact or gone; never wrong.
``CEDAR_KILL_ROUNDS`` sets how many rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import ClientConfig

from . import store_nursery
from .store_child import ROOT, keys_of, value_of

ROUNDS = int(os.environ.get("CEDAR_KILL_ROUNDS", "60"))
PAGES = 8
SIZE = 3392
PATIENT = ClientConfig(match_timeout_s=10, stall_timeout_s=10, put_timeout_s=20, stats_timeout_s=10)
WINDOW = b"window state" * 1000


class Nursery:
    """Nodes that can be started in a tenth of a second."""

    def __init__(self, directory: Path) -> None:
        self._out = directory / "out"
        environment = {**os.environ, "PYTHONPATH": ":".join(part for part in sys.path if part)}
        command = [sys.executable, store_nursery.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._nodes: set[int] = set()

    def start(self, *argv: str) -> int:
        self._out.unlink(missing_ok=True)
        pid = int(
            self._order({"argv": [*argv, "--reserve-mib", "1", "--window-mib", "4"], "out": str(self._out)})
        )
        self._nodes.add(pid)
        return pid

    async def address(self) -> str:
        """Of the node just started. AssertionError when it does not serve within half a minute."""
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            text = self._out.read_text() if self._out.exists() else ""
            if text.endswith("\n"):
                return str(json.loads(text)["address"])
            await asyncio.sleep(0.01)
        raise AssertionError("the node does not start")

    def wait(self, pid: int) -> int:
        self._nodes.discard(pid)
        return int(self._order({"wait": pid}))

    def close(self) -> None:
        for pid in list(self._nodes):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _order(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@contextmanager
def nursery(directory: Path) -> Iterator[Nursery]:
    made = Nursery(directory)
    try:
        yield made
    finally:
        made.close()


async def put_some(client: StoreClient, salt: int, acked: list[int], chains: int = 12) -> None:
    for number in range(salt, salt + chains):
        keys = keys_of(number, PAGES)
        counts = await client.put_pages(keys, [value_of(key, SIZE) for key in keys], tenant=b"tenant")
        if counts.stored == PAGES:
            acked.append(number)
            await client.put_window(keys[-1], PAGES * 32 + 1, keys[0], WINDOW, tenant=b"tenant")
        elif counts.reason in ("unavailable", "timeout"):
            return


async def check(client: StoreClient, chains: list[int], *, all_there: bool) -> int:
    """Every page that comes is right; pages that came, at most all."""
    found = 0
    for salt in chains:
        keys = keys_of(salt, PAGES)
        received = 0
        async with aclosing(client.get_pages(keys)) as pages:
            async for index, value in pages:
                assert bytes(value) == value_of(keys[index], SIZE), f"page {index} of chain {salt} is wrong"
                received += 1
        if all_there:
            assert received == PAGES, f"chain {salt} was acknowledged, {received} of {PAGES} pages are left"
        found += received
        window = await client.get_window(keys[-1], PAGES * 32 + 1, keys[0])
        assert window in (None, WINDOW)
    return found


@pytest.mark.timeout(60 + 5 * ROUNDS)
@pytest.mark.parametrize("size", ["roomy", "too small"])
async def test_acknowledged_pages_are_intact_or_gone_never_wrong(size: str, tmp_path: Path) -> None:
    rng = random.Random(71)
    roomy = size == "roomy"
    # A store that is too small evicts all the time, and is killed while it does.
    room = (
        ("--capacity-gib", "4", "--segment-mib", "4")
        if roomy
        else ("--capacity-gib", "0.004", "--segment-mib", "1")
    )
    argv = ("--directory", str(tmp_path / "store"), *room)
    acked: list[int] = []
    phases: dict[str, int] = {}
    with nursery(tmp_path) as nodes:
        for number in range(ROUNDS // 2):
            pid = nodes.start(*argv)
            phase = rng.choice(("starting", "putting", "putting", "acknowledged", "stopping"))
            phases[phase] = phases.get(phase, 0) + 1
            if phase == "starting":
                await asyncio.sleep(rng.uniform(0, 0.2))
                os.kill(pid, signal.SIGKILL)
                nodes.wait(pid)
                continue
            client = StoreClient(await nodes.address(), config=PATIENT)
            sample = acked[-10:] + rng.sample(acked, min(6, len(acked)))
            await check(client, sample, all_there=roomy)
            first = 1000 + number * 100
            if phase == "acknowledged":
                await put_some(client, first, acked, chains=2)
            else:
                puts = [
                    asyncio.create_task(put_some(client, first + writer * 50, acked)) for writer in range(2)
                ]
                await asyncio.sleep(rng.uniform(0.0, 0.12))
                if phase == "stopping":
                    os.kill(pid, signal.SIGTERM)
                    await asyncio.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            if phase != "acknowledged":
                await asyncio.gather(*puts)
            nodes.wait(pid)
            await client.close()
        pid = nodes.start(*argv)
        client = StoreClient(await nodes.address(), config=PATIENT)
        found = await check(client, acked, all_there=roomy)
        assert (await client.match(ROOT, keys_of(acked[-1], PAGES))).pages == PAGES
        stats = await client.stats()
        await client.close()
        os.kill(pid, signal.SIGTERM)
        assert nodes.wait(pid) == 0
    assert stats["store_values_corrupt"] == 0
    if roomy:
        assert stats["store_segments_damaged"] == 0
        assert found == len(acked) * PAGES
    print(f"{size}: {ROUNDS // 2} rounds {phases}, {len(acked)} chains acknowledged, {found} pages found")
