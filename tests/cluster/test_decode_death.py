"""A Decode worker's process is killed mid-stream; the stream goes on with the same tokens."""

import asyncio
import os
import signal

import pytest
from cedar.actors.prompts import PromptTools
from cedar.cluster.client import GenerationClient
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import finished_of, tokens_of
from .pictures import picture
from .ray_cluster import RayCluster
from .single_process import SingleProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TOKENS = 48


async def test_killing_a_decode_process_is_a_pause(
    ray_cluster: RayCluster, tools: PromptTools, single: SingleProcess
) -> None:
    sampling = common.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    text = "A story that does not end when the machine that tells it does."
    request = pb.GenerateRequest(text=text, images=[picture(21)], sampling=sampling)
    expected = single.cold(tools.prepare(request), TOKENS)
    seen: list[pb.GenerateResponse] = []
    killed = 0
    async with GenerationClient(ray_cluster.address) as client:
        async for response in client.generate(request):
            seen.append(response)
            if len(tokens_of(seen)) == 12 and not killed:
                killed = await asyncio.to_thread(busy_decode_pid, ray_cluster)
                os.kill(killed, signal.SIGKILL)
    assert tokens_of(seen) == expected
    assert [r.delta.token.index for r in seen if r.delta.HasField("token")] == list(range(TOKENS))
    assert finished_of(seen).retries == 1

    def replaced() -> bool:
        reports = ray_cluster.workers("decode")
        return len([r for r in reports if r.status is not None and r.status.pid != killed]) == 2

    await asyncio.to_thread(ray_cluster.wait, "Serve replaces the replica", replaced, 90.0)
    await asyncio.to_thread(ray_cluster.wait, "idle", ray_cluster.idle, 10.0)


def busy_decode_pid(cluster: RayCluster) -> int:
    (busy,) = [r.status for r in cluster.workers("decode") if r.status is not None and r.status.active]
    return int(busy.pid)
