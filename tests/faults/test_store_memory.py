"""Memory that runs short, and a soak: descriptors, threads and memory stay flat."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import threading
import time
from contextlib import aclosing
from pathlib import Path

from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.node import StoreNode

from .conftest import TierStarter
from .store_child import ROOT, keys_of, value_of

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def memory_of(pid: int) -> tuple[int, int]:
    """(address space, resident) bytes of a process."""
    taken, resident = Path(f"/proc/{pid}/statm").read_text().split()[:2]
    return int(taken) * PAGE_BYTES, int(resident) * PAGE_BYTES


def own_memory() -> int:
    """Resident bytes of this process that are not pages of files: those are the kernel's to take back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_a_tier_short_of_memory_goes_on(start_tier: TierStarter) -> None:
    """Neither maps nor the index have room: values are read into buffers, and the index waits."""
    tier = start_tier()
    assert tier("put", 0, 20)["stored"] == 20
    resource.prlimit(tier.pid, resource.RLIMIT_AS, (memory_of(tier.pid)[0] + 2 * MIB, resource.RLIM_INFINITY))
    acked, refused = [0], 0
    for salt in range(1, 24):
        counts = tier("put", salt, 20)
        assert counts["stored"] in (0, 20)
        if counts["stored"]:
            acked.append(salt)
        else:
            refused += 1
            time.sleep(0.06)
        tier("tick")
        assert tier("get", acked[-1], 20) == [20, 0, 0]
    assert tier("write_indices") > 0, "the limit was met"
    for salt in acked:
        assert tier("get", salt, 20) == [20, 0, 0]
    resource.prlimit(tier.pid, resource.RLIMIT_AS, NO_LIMIT)
    time.sleep(0.06)
    assert tier("put", 99, 20)["stored"] == 20, "it heals by itself"
    assert tier("write_indices") == 0
    for salt in (*acked, 99):
        assert tier("get", salt, 20) == [20, 0, 0]
    tier("check")


async def test_window_records_stay_within_their_budget(tmp_path: Path) -> None:
    """Ten times what fits."""
    budget = 24 * MIB
    node = StoreNode(
        NodeConfig(
            ssd=SsdConfig(directory=tmp_path / "store", capacity_bytes=64 * MIB, reserve_bytes=MIB),
            window=WindowConfig(budget_bytes=budget),
        )
    )
    client = StoreClient(await node.start(), config=ClientConfig(window_timeout_s=10))
    try:
        keys = keys_of(0, 240)
        record = random.Random(1).randbytes(MIB - 4096)
        before = own_memory()
        for start in range(0, 240, 8):
            stored = await asyncio.gather(
                *(client.put_window(key, 33, key, record) for key in keys[start : start + 8])
            )
            assert all(stored) or node.counters["store_window_refused"]
            assert node.windows.stats()["store_window_bytes"] <= budget
        assert own_memory() - before <= budget + 64 * MIB
        assert await client.get_window(keys[-1], 33, keys[-1]) == record
        assert node.counters["store_window_evicted_budget"] > 150
        node.windows.check_integrity()
    finally:
        await client.close()
        await node.stop(0.2)


def held(node: StoreNode) -> tuple[int, int, int]:
    """(descriptors besides those of segments, threads, descriptors of segments for each one there is)"""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    of_segments = sum("/segments/" in link for link in links)
    each = of_segments // max(len(node.ssd._segments.all()), 1)
    return len(links) - of_segments, threading.active_count(), each


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


async def mixed_load(client: StoreClient, rng: random.Random, first: int, until_s: float) -> int:
    """Puts, gets, matches, windows; one call in twenty is wrong, left half-way, or for nothing."""
    done = 0
    while time.monotonic() < until_s:
        salt = first + rng.randrange(200)
        keys = keys_of(salt, 8)
        fault = rng.random() < 0.05
        action = rng.randrange(4)
        if action == 0:
            values = [value_of(key) for key in keys]
            if fault:
                values[3] = values[2]
            await client.put_pages(keys, values, tenant=b"tenant")
        elif action == 1:
            async with aclosing(client.get_pages(keys)) as pages:
                async for index, value in pages:
                    assert bytes(value) == value_of(keys[index])
                    if fault:
                        break
        elif action == 2:
            await client.match(ROOT, keys[1:] if fault else keys)
        else:
            await client.put_window(keys[-1], 300, keys[0], value_of(keys[0]) * (2000 if fault else 1))
            window = await client.get_window(keys[-1], 300, keys[0])
            assert window is None or window == value_of(keys[0])
        done += 1
    return done


async def test_nothing_leaks(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CEDAR_SOAK_S", "6"))  # longer by hand
    capacity = 24 * MIB
    node = StoreNode(
        NodeConfig(
            ssd=SsdConfig(
                directory=tmp_path / "store", capacity_bytes=capacity, segment_bytes=2 * MIB,
                reserve_bytes=MIB, ttl_s=4.0, maintenance_s=0.2, quarantine_bytes=MIB,
            ),
            window=WindowConfig(budget_bytes=4 * MIB, ttl_s=1.0),
        )
    )  # fmt: skip
    address = await node.start()
    patient = ClientConfig(match_timeout_s=10, stall_timeout_s=10, window_timeout_s=10)
    clients = [StoreClient(address, config=patient) for _ in range(3)]
    rng = random.Random(8)
    try:

        async def load(share: float) -> int:
            until_s = time.monotonic() + seconds * share
            return sum(
                await asyncio.gather(
                    *(mixed_load(client, rng, 200 * number, until_s) for number, client in enumerate(clients))
                )
            )

        await load(0.4)
        gc.collect()
        before, resident = held(node), own_memory()
        operations = await load(0.6)
        gc.collect()
        after = held(node)
        assert operations > 30, "the load did not run"
        assert after[0] <= before[0] + 2, f"descriptors {before[0]} -> {after[0]}"
        assert after[1] <= before[1] + 2, f"threads {before[1]} -> {after[1]}"
        assert after[2] <= 4, f"{after[2]} descriptors a segment"
        grown = own_memory() - resident
        assert grown <= 0.05 * resident + 16 * MIB, f"{grown / MIB:.1f} MiB more after {operations} calls"
        assert node.ssd.stats()["store_disk_bytes"] <= capacity + 2 * MIB
        assert node.counters["store_segments_dropped"] > 0
        assert node.counters["store_values_corrupt"] == 0
        assert (await clients[0].stats())["store_reads_in_flight"] == 0
        node.ssd.check_integrity()
        node.windows.check_integrity()
    finally:
        for client in clients:
            await client.close()
        await node.stop(0.5)
