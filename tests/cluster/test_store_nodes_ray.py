"""A store of two nodes on a real Ray: hits across turns, and a node that is killed and comes back."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cedar.actors.prompts import Prompt
from cedar.cluster.client import GenerationClient
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import collect, finished_of, tokens_of
from .ray_cluster import RayCluster
from .single_process import SingleProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REPLY_TOKENS = 6
SMALL = ("decode.autoscaling.min=1", "decode.autoscaling.max=1", "prefill.autoscaling.max=1")


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    monkeypatch.setenv(
        "CEDAR_STATE_DIR", str(tmp_path)
    )  # put back afterwards: another cluster may be running
    cluster = RayCluster(tmp_path, "gateway.port=0", "store.nodes=2", "store.lease_s=1", *SMALL)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


async def ask(cluster: RayCluster, ids: Sequence[int]) -> tuple[list[int], pb.Finished]:
    sampling = common.SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=common.TokenIds(ids=ids), sampling=sampling)
    async with GenerationClient(cluster.address) as client:
        responses = await collect(client, request)
    return tokens_of(responses), finished_of(responses)


def held(cluster: RayCluster) -> list[float]:
    """Pages on each node."""
    return [(report.store or {})["store_pages"] for report in cluster.workers("store")]


def prompt(ids: Sequence[int]) -> Prompt:
    return Prompt(ids=tuple(ids), images=(), files={})


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(count)]


async def test_two_nodes_serve_and_one_of_them_may_die(two_nodes: RayCluster, single: SingleProcess) -> None:
    cluster = two_nodes
    stored = 0
    for seed in range(8):  # which node holds what is different each time: until both hold something
        first = words(seed, 300)
        reply, end = await ask(cluster, first)
        assert end.traffic.pages_stored == end.traffic.pages_sealed == 9
        stored += end.traffic.pages_stored
        pages = held(cluster)
        assert (len(pages), sum(pages)) == (2, stored)
        if all(pages):
            break
    assert all(pages), f"all pages are on one node: {pages}"
    assert reply == single.cold(prompt(first), REPLY_TOKENS)

    second = [*first, *reply, *words(99, 20)]
    warm, end = await ask(cluster, second)
    assert end.sources.state_restored
    assert end.sources.hit_local_tokens + end.sources.hit_store_tokens >= 288
    kept = single.second_turn(prompt(first), reply, prompt(second), REPLY_TOKENS)
    assert warm == kept

    victim = cluster.workers("store")[0].entry
    os.kill(victim.pid, signal.SIGKILL)
    again, end = await ask(cluster, second)
    assert end.retries == 0
    hit = end.sources.hit_local_tokens + end.sources.hit_store_tokens
    if end.sources.state_restored:
        assert again == kept
    else:  # its window state died with the node
        expected = single.replayed if hit else lambda p, _, count: single.cold(p, count)
        assert again == expected(prompt(second), hit, REPLY_TOKENS)

    def back() -> bool:
        found = cluster.workers("store")
        return len(found) == 2 and all(r.store is not None and r.entry.pid != victim.pid for r in found)

    await asyncio.to_thread(cluster.wait, "both nodes are there again", back, 30.0)
    assert all(held(cluster)), "it has its pages again"
    other = words(100, 300)
    assert (await ask(cluster, other))[0] == single.cold(prompt(other), REPLY_TOKENS)
