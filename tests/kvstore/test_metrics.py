"""Metrics: fixed names, one table, one registry a node, and numbers that equal what requests report."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.client import StoreClient
from cedar.kvstore.metrics import MAX_TENANTS, METRICS, PromptMetrics, StoreMetrics, hit_rate, metrics_table
from cedar.kvstore.node import PortInUse
from cedar.v1 import common_pb2

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def samples(metrics: Any) -> dict[str, float]:
    """Every sample by its text, as a scrape would show it."""
    lines = [line for line in metrics.exposition().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def registered(metrics: Any) -> set[str]:
    return {
        family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()
    }


def some_sources(rng: random.Random) -> common_pb2.PromptSources:
    parts = [rng.choice([0, rng.randrange(5000)]) for _ in range(4)]
    local, store, state, computed = parts
    return common_pb2.PromptSources(
        prompt_tokens=sum(parts),
        hit_local_tokens=local,
        hit_store_tokens=store,
        state_tokens=state,
        computed_tokens=computed,
        replayed_tokens=rng.randrange(128),
        state_restored=rng.random() < 0.5,
    )


def test_the_page_lists_exactly_the_registered_metrics() -> None:
    listed = set(re.findall(r"^\| `(cedar_\w+)` \|", PAGE.read_text("utf-8"), re.MULTILINE))
    made = registered(StoreMetrics(dict, dict)) | registered(PromptMetrics(32))
    assert listed == made == {metric.name for metric in METRICS}
    assert metrics_table() in PAGE.read_text("utf-8")


def test_hit_rate_is_what_the_requests_report() -> None:
    rng = random.Random(5)
    metrics = PromptMetrics(32)
    reported: dict[str, common_pb2.PromptSources] = {}
    for _ in range(500):
        tenant = rng.choice(["a", "b", "c"])
        sources = some_sources(rng)
        metrics.admitted(tenant, sources)
        total = reported.setdefault(tenant, common_pb2.PromptSources())
        for field in ("prompt", "hit_local", "hit_store", "state", "computed", "replayed"):
            name = f"{field}_tokens"
            setattr(total, name, getattr(total, name) + getattr(sources, name))
    for tenant, total in reported.items():
        assert metrics.totals(tenant) == total
        assert hit_rate(metrics.totals(tenant)) == hit_rate(total)
    assert metrics.totals().prompt_tokens == sum(total.prompt_tokens for total in reported.values())
    found = samples(metrics)
    shown = {k: v for k, v in found.items() if k.startswith("cedar_prompt_tokens_total")}
    missed = sum(v for k, v in shown.items() if 'source="computed"' in k)
    assert 1 - missed / sum(shown.values()) == pytest.approx(hit_rate(metrics.totals()))
    assert sum(v for k, v in found.items() if k.startswith("cedar_prompts_total")) == 500


def test_an_empty_prompt_has_no_rate() -> None:
    assert hit_rate(common_pb2.PromptSources()) == 0.0


def test_tenants_are_bounded() -> None:
    metrics = PromptMetrics(32)
    for number in range(MAX_TENANTS + 20):
        metrics.admitted(f"tenant-{number}", common_pb2.PromptSources(prompt_tokens=1, computed_tokens=1))
    found = samples(metrics)
    assert found['cedar_prompt_tokens_total{source="computed",tenant="other"}'] == 20
    assert (
        len([k for k in found if k.startswith('cedar_prompt_tokens_total{source="computed"')])
        == MAX_TENANTS + 1
    )


async def test_a_node_counts_by_tier_and_tenant(running_node: Any, chains: Any) -> None:
    tenant = b"\xab" * 32
    label = "ab" * 6
    async with running_node(metrics_port=0) as node:
        client = StoreClient(node.address, fingerprint=chains.fingerprint)
        keys = chains.keys(6)
        values = [chains.value(key) for key in keys]
        size = len(values[0])
        await client.put_pages(keys[:4], values[:4], tenant=tenant)
        assert [i async for i, _ in client.get_pages(keys[:4])] == [0, 1, 2, 3]
        await client.match(chains.root(), keys)
        await client.match(chains.root("b"), chains.keys(3, tenant="b"))
        await client.match(chains.root(), chains.keys(5, salt=9), tenant=tenant)  # nothing of it is here
        await client.put_window(keys[3], 130, b"d" * 32, b"record" * 100)
        await client.get_window(keys[3], 130, b"d" * 32)
        await client.get_window(keys[2], 99, b"d" * 32)
        await client.get_window(keys[2], 98, b"d" * 32, tenant=tenant)
        url = f"http://127.0.0.1:{node.metrics_port}/metrics"

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())

        text = await asyncio.get_running_loop().run_in_executor(None, scrape)
        found = {
            n: float(v) for n, _, v in (line.rpartition(" ") for line in text.splitlines()) if n[:1] != "#"
        }
        lookups = "cedar_store_lookup_pages_total"
        assert found[f'{lookups}{{result="hit",tenant="{label}",tier="ssd"}}'] == 4
        assert found[f'{lookups}{{result="miss",tenant="{label}",tier="ssd"}}'] == 2 + 5
        assert found[f'{lookups}{{result="miss",tenant="unknown",tier="ssd"}}'] == 3
        tokens = "cedar_store_lookup_tokens_total"
        assert found[f'{tokens}{{result="hit",tenant="{label}",tier="ssd"}}'] == 4 * 32
        assert found[f'{tokens}{{result="hit",tenant="unknown",tier="window"}}'] == 130 % 32
        assert found[f'{lookups}{{result="miss",tenant="unknown",tier="window"}}'] == 1
        assert found[f'{lookups}{{result="miss",tenant="{label}",tier="window"}}'] == 1
        assert found[f'cedar_store_read_bytes_total{{tenant="{label}",tier="ssd"}}'] == 4 * size
        assert found[f'cedar_store_written_bytes_total{{tenant="{label}",tier="ssd"}}'] == 4 * size
        assert found[f'cedar_store_tenant_bytes{{tenant="{label}"}}'] == 4 * size
        assert found["cedar_store_pages"] == 4
        assert found["cedar_store_window_records"] == 1
        assert found["cedar_store_commit_values_sum"] == 4
        assert found['cedar_store_hit_age_seconds_count{tier="ssd"}'] == 4
        assert found["cedar_store_replication_lag_seconds"] == 0
        await client.close()


def test_tokens_are_counted_from_the_first_look_up(open_tier: Any, chains: Any) -> None:
    for restarted in (False, True):
        tier = open_tier()
        metrics = StoreMetrics(tier.stats, tier.tenant_bytes, tier.page_tokens())
        tier.counters.observer = metrics
        if not restarted:
            open_tier.put(tier, chains.items(chains.keys(2)))
        metrics.looked_up("ssd", b"tenant", 3, 2)
        found = samples(metrics)
        for name in [name for name in found if name.startswith("cedar_store_lookup_pages_total")]:
            assert found[name.replace("_pages_", "_tokens_")] == 32 * found[name] > 0
        tier.close()


async def test_two_nodes_have_two_registries(running_node: Any, chains: Any, tmp_path: Path) -> None:
    async with (
        running_node(metrics_port=0) as one,
        running_node(metrics_port=0, ssd={"directory": tmp_path / "second"}) as two,
    ):
        client = StoreClient(one.address, fingerprint=chains.fingerprint)
        keys = chains.keys(2)
        await client.put_pages(keys, [chains.value(key) for key in keys])
        assert samples(one.metrics)["cedar_store_pages"] == 2
        assert samples(two.metrics)["cedar_store_pages"] == 0
        await client.close()
        with pytest.raises(PortInUse, match="metrics"):
            async with running_node(metrics_port=one.metrics_port, ssd={"directory": tmp_path / "third"}):
                pass


def test_evictions_quarantines_and_refusals(open_tier: Any, chains: Any, clock: Any) -> None:
    tier = open_tier(ttl_s=3600.0, capacity_bytes=8 << 20, segment_bytes=1 << 20)
    metrics = StoreMetrics(tier.stats, tier.tenant_bytes)
    tier.counters.observer = metrics
    for salt in range(8):
        open_tier.put(tier, chains.items(chains.keys(100, salt=salt)))
    bad = chains.keys(100, salt=0)[7]
    entry = tier._index.get(bad)
    with open(entry.segment.path / "values.dat", "r+b") as file:
        file.seek(entry.offset + 200)
        file.write(b"\0\0\0\0")
    assert tier.get(bad) is None
    clock.advance(1800.0)
    for salt in range(8, 36):
        open_tier.put(tier, chains.items(chains.keys(100, salt=salt)))
        tier.maintenance.tick()
    clock.advance(2 * 3600.0)
    tier.maintenance.tick()
    found = samples(metrics)
    assert found['cedar_store_quarantined_pages_total{reason="checksum"}'] == 1
    capacity = found['cedar_store_evicted_pages_total{cause="capacity",tier="ssd"}']
    expired = found['cedar_store_evicted_pages_total{cause="expired",tier="ssd"}']
    assert capacity == tier.counters["store_pages_evicted_capacity"] > 0
    assert expired == tier.counters["store_pages_evicted_expired"] > 0
    left = "cedar_store_evicted_ttl_left_seconds"
    assert found[f'{left}_count{{cause="capacity"}}'] == capacity
    assert 1000 < found[f'{left}_sum{{cause="capacity"}}'] / capacity <= 3600
    assert found[f'{left}_sum{{cause="expired"}}'] == 0
