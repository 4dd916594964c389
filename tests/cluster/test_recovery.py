"""Processes that Ray replaces: the directory and the store. Requests go on meanwhile."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from cedar.cluster.client import GenerationClient
from cedar.cluster.processes import of_session
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import collect, finished_of
from .ray_cluster import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


async def answer(cluster: RayCluster, text: str) -> pb.Finished:
    sampling = common.SamplingParams(max_tokens=4, ignore_eos=True)
    async with GenerationClient(cluster.address) as client:
        return finished_of(await collect(client, pb.GenerateRequest(text=text, sampling=sampling)))


def process_named(cluster: RayCluster, title: str) -> int:
    """The process that Ray gave this title; 0 when there is none."""
    for process in of_session(cluster.state.ray_temp_dir):
        line = Path(f"/proc/{process.pid}/cmdline")
        if line.exists() and line.read_bytes().startswith(title.encode()):
            return process.pid
    return 0


async def test_a_killed_directory_comes_back_and_fills_up(ray_cluster: RayCluster) -> None:
    victim = process_named(ray_cluster, "ray::DirectoryActor")
    assert victim
    os.kill(victim, signal.SIGKILL)
    assert (await answer(ray_cluster, "While nobody knows who is alive.")).completion_tokens == 4

    def full_again() -> bool:
        gateways = ray_cluster.workers("gateway")
        counters = gateways[0].status.counters if gateways and gateways[0].status else {}
        alive = process_named(ray_cluster, "ray::DirectoryActor") not in (0, victim)
        return alive and counters.get("workers") == 6 and counters.get("directory_age_s") == 0

    await asyncio.to_thread(ray_cluster.wait, "everyone is registered again", full_again, 60.0)
    assert (await answer(ray_cluster, "And after that.")).completion_tokens == 4


async def test_a_killed_store_is_a_miss_and_comes_back_with_its_pages(ray_cluster: RayCluster) -> None:
    text = "Long enough to fill a page or two of what the store will keep for us, come what may."
    await answer(ray_cluster, text)
    (before,) = ray_cluster.workers("store")
    assert before.store is not None
    os.kill(before.entry.pid, signal.SIGKILL)
    assert (await answer(ray_cluster, "Nothing but a miss.")).completion_tokens == 4

    def back() -> bool:
        stores = ray_cluster.workers("store")
        return len(stores) == 1 and stores[0].entry.pid != before.entry.pid and stores[0].store is not None

    await asyncio.to_thread(ray_cluster.wait, "the store is back", back, 60.0)
    (after,) = ray_cluster.workers("store")
    assert after.store is not None
    assert after.store["store_pages"] >= before.store["store_pages"] > 0

    # The workers find its new address with their next heartbeats.
    deadline_s = asyncio.get_running_loop().time() + 20
    more = " Then a new thought, long enough to be a page of its own, and one more, and one more."
    while (await answer(ray_cluster, text + more)).traffic.pages_stored == 0:
        assert asyncio.get_running_loop().time() < deadline_s, "the workers have not found the store again"
        more += "!" * 40
