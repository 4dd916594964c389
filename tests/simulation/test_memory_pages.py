"""The simulation's page store and the real one give the same answers to the same histories."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.errors import StoreClosed
from cedar.kvstore.put import PutItem
from cedar.kvstore.ssd_tier import SsdTier
from cedar.kvstore.stats import Counters
from memory_pages import Disk, MemoryPages
from store_model import Tenant, make_tenant, value

HISTORIES = int(os.environ.get("CEDAR_SIM_HISTORIES", "3"))
STEPS = 60
COMPARED = (
    "store_puts_stored",
    "store_puts_present",
    "store_puts_conflict",
    "store_pages_read",
    "store_read_bytes",
    "store_page_misses",
    "store_page_expired",
)


class Pair:
    """The two stores side by side, on one clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.disk = Disk()
        self.config = SsdConfig(
            directory=folder,
            capacity_bytes=64 * MIB,
            segment_bytes=8 * MIB,
            reserve_bytes=MIB,
            commit_wait_s=0.0,
            ttl_s=3600.0,
            usage_flush_s=1e-9,
        )
        self.open()

    def open(self) -> None:
        self.counters = Counters(), Counters()
        self.real = SsdTier(self.config, clock=self.clock, counters=self.counters[0], background=False)
        self.fake = MemoryPages(self.config, self.clock, self.counters[1], self.disk, lambda work: work())

    def restart(self) -> None:
        self.close()
        self.open()

    def close(self) -> None:
        self.real.close()
        self.fake.close()

    def same(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call both; their answers must be equal."""
        real = getattr(self.real, method)(*arguments, **keywords)
        fake = getattr(self.fake, method)(*arguments, **keywords)
        assert real == fake, f"{method}: the real store says {real}, the simulated one {fake}"
        return real


def _same_put(
    pair: Pair,
    tenant: Tenant,
    keys: list[bytes],
    start: int = 0,
    version: int = 0,
    idle_s: float | None = None,
) -> None:
    """Put pages, which were used ``idle_s`` ago (None: now)."""
    answers = []
    for store in (pair.real, pair.fake):
        used_s = None if idle_s is None else store.now_s() - idle_s
        items = [
            PutItem(key, value(key, version), start + number, tenant.domain, used_s)
            for number, key in enumerate(keys)
        ]
        answers.append(store.put(items).result(10))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_histories_are_answered_alike(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    pair = Pair(tmp_path / "store")
    tenants = [make_tenant("one", [(0, 12), (5, 20)]), make_tenant("two", [(0, 9)])]
    everything = [key for tenant in tenants for chain in tenant.chains for key in chain]
    for _ in range(STEPS):
        tenant = rng.choice(tenants)
        chain = rng.choice(tenant.chains)
        start = rng.randrange(len(chain))
        keys = chain[start : start + rng.randint(1, 8)]
        step = rng.choice(
            ["put"] * 4 + ["read"] * 3 + ["match"] * 2 + ["purge", "time", "restart", "look", "take"]
        )
        if step == "put":
            idle_s = None if rng.random() < 0.7 else rng.uniform(0, 500)
            _same_put(pair, tenant, keys, start, rng.choice([0, 0, 0, 1]), idle_s)
        elif step == "read":
            size = rng.choice([1, 400, 100_000])
            join = lambda views: b"".join(map(bytes, views))  # noqa: E731
            if rng.random() < 0.5:
                pair.same("read_run", keys, size, join, use=rng.random() < 0.5)
            else:
                _same_read_into(pair, keys, size, use=rng.random() < 0.5)
        elif step == "match":
            pair.same("match", chain, tenant.domain)
        elif step == "purge":
            real, fake = pair.real.purge(tenant.domain), pair.fake.purge(tenant.domain)
            assert set(fake[0]) <= set(real[0]), (
                "copies that were carried forward may be counted more than once"
            )
        elif step == "time":
            pair.clock.advance(rng.choice([1.0, 60.0, 1000.0]))
        elif step == "restart":
            pair.restart()
        elif step == "take":
            gone = rng.sample(keys, rng.randint(1, len(keys)))
            pair.real.remove(gone).result(10)
            pair.fake.remove(gone).result(0)
        else:
            pair.same("get", keys[0])
            pair.same("why_unsound", keys[0])
            pair.same("keys_held", tenant=rng.choice([b"", tenant.domain]))
        pair.same("held", everything)
        for key in keys:
            _same_facts(pair, key)
        listed = [
            sorted(key for part in store.listing(7) for key in part) for store in (pair.real, pair.fake)
        ]
        assert listed[0] == listed[1]
        assert pair.same("tenant_bytes") is not None
    for name in COMPARED:
        assert pair.counters[0][name] == pair.counters[1][name], name
    pair.real.check_integrity(deep=True)
    pair.fake.check_integrity(deep=True)
    pair.close()


def _same_read_into(pair: Pair, keys: list[bytes], size: int, *, use: bool) -> None:
    """Read into memory of the caller's, from both."""
    answers = []
    for store in (pair.real, pair.fake):
        given: list[memoryview] = []

        def place(count: int, value_bytes: int, given: list[memoryview] = given) -> list[memoryview]:
            given += [memoryview(bytearray(value_bytes)) for _ in range(count)]
            return given

        run = store.read_into(keys, size, place, use=use)
        answers.append((run, [bytes(view) for view in given[: run.count]] if run else None))
    assert answers[0] == answers[1]


def _same_facts(pair: Pair, key: bytes) -> None:
    real, fake = pair.real.facts(key), pair.fake.facts(key)
    assert (real is None) == (fake is None)
    if real is not None and fake is not None:
        assert real[:2] == fake[:2]
        # Over a restart a use is remembered to within a grain, and of a page that was removed meanwhile too.
        assert real[2] <= fake[2] + pair.config.usage_grain_s


def _flip_on_disk(folder: Path, content: bytes, position: int) -> None:
    """Flip a bit of these bytes, in whichever files they are."""
    found = 0
    for path in folder.rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if (start := data.find(content)) >= 0:
            data[start + position] ^= 1
            with path.open("r+b") as file:
                file.write(data)
            found += 1
    assert found


def test_a_damaged_page_is_lost_in_both(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "store")
    tenant = make_tenant("one", [(0, 6)])
    (keys,) = tenant.chains
    _same_put(pair, tenant, keys)
    pair.disk.damage(keys[2], 120)
    _flip_on_disk(tmp_path, value(keys[2], 0), 120)
    assert pair.same("why_unsound", keys[2]) == "checksum"
    assert pair.same("match", keys) == 6, "it looks sound until it is read"
    read = pair.same("read_run", keys, 100_000, len)
    assert read is not None
    assert read[1] == 2
    assert pair.same("lost", keys[2])
    assert pair.same("held", keys) == [True, True, False, True, True, True]
    _same_put(pair, tenant, keys)
    assert pair.same("match", keys) == 6
    pair.close()
    for store in (pair.real, pair.fake):
        with pytest.raises(StoreClosed):
            store.put([])
