"""A long life in minutes: a million puts, gets and expiries; memory stays flat, files within the limit.

Pages are small (4 KiB values) and the store's clock is turned by hand, so that an hour's worth of turnover
takes minutes: what grows with operations grows here as it would there.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path

from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.put import PutItem
from cedar.kvstore.ssd_tier import SsdTier

from .store_measure import Figure, bench_keys, bench_value, figure

SMALL_BYTES = 3968  # with its header and LMDB's own, one database page
CHAIN = 256
CAPACITY = 192 * MIB


def soak(
    directory: Path, *, operations: int = 1_000_000, told: Callable[[int, float, int], None] | None = None
) -> list[Figure]:
    """Put, get and expire until there were ``operations`` of them.

    ``told``: called now and then with operations so far, resident bytes, and bytes on disk.
    """
    clock = ManualClock()
    config = SsdConfig(
        directory=directory, capacity_bytes=CAPACITY, segment_bytes=CAPACITY // 24, ttl_s=3600.0,
        commit_values=CHAIN, reserve_bytes=MIB, usage_flush_s=60.0,
    )  # fmt: skip
    tier = SsdTier(config, clock=clock, background=False)
    rng = random.Random(0)
    done = gets = served = puts = refused = salt = 0
    recent: list[list[bytes]] = []
    resident: list[tuple[int, float]] = []
    highest = 0
    started_s = time.perf_counter()
    while done < operations:
        salt += 1
        keys = bench_keys(CHAIN, salt=salt)
        counts = tier.put([PutItem(k, bench_value(k, SMALL_BYTES), i) for i, k in enumerate(keys)]).result()
        puts += counts.stored
        refused += counts.refused
        recent.append(keys)
        if len(recent) > 250:
            recent.pop(0)
        for _ in range(2):
            chain = recent[int(rng.triangular(0, len(recent), len(recent)))]
            tier.match(chain)
            position = 0
            while position < CHAIN and (run := tier.read_run(chain[position:], 16 * SMALL_BYTES, len)):
                position += run[0].count
            served += position
            gets += CHAIN
        done = gets + puts + int(tier.counters["store_pages_evicted_expired"])
        done += int(tier.counters["store_pages_evicted_capacity"])
        clock.advance(2.0 if salt % 500 < 250 else 120.0)  # now room is short, now time
        tier.maintenance.tick()
        if salt % 6 == 0:
            highest = max(highest, int(tier.stats()["store_disk_bytes"]))
            resident.append((done, resident_bytes()))
            if told is not None and salt % 120 == 0:
                told(done, resident[-1][1], highest)
    seconds = time.perf_counter() - started_s
    tier.check_integrity()
    expired, evicted = (tier.counters[f"store_pages_evicted_{why}"] for why in ("expired", "capacity"))
    tier.close()
    # By two fifths memory is full of what it is meant to hold; from there on nothing may be added.
    sizes = [size for _, size in resident]
    early = sizes[2 * len(sizes) // 5 : len(sizes) // 2 + 1]
    late = sizes[9 * len(sizes) // 10 :]
    growth = (sum(late) / len(late)) / (sum(early) / len(early)) - 1
    details = {
        "operations": float(done), "seconds": seconds, "puts": float(puts), "gets": float(gets),
        "served": float(served), "expired": expired, "evicted": evicted, "refused": float(refused),
        "resident_MiB": late[-1] / MIB, "disk_MiB": highest / MIB,
    }  # fmt: skip
    return [
        figure(
            "soak of a million operations: growth of resident memory",
            [growth],
            predicted=0.02,
            limit=0.05,
            at_least=False,
            details=details,
        ),
        figure(
            "soak: most disk taken / capacity",
            [highest / CAPACITY],
            predicted=0.97,
            limit=1.0,
            at_least=False,
            details=details,
        ),
    ]


def resident_bytes() -> int:
    """Private memory of this process: mapped files are the kernel's; freed blocks are given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")
