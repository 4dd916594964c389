"""A picture and a prompt go through three pools and come back as the single process's tokens."""

import random
from collections.abc import Sequence

import pytest
from cedar.actors.prompts import PromptTools
from cedar.cluster.client import GenerationClient
from cedar.cluster.usage import prompt_tokens_balance
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import collect, finished_of, tokens_of
from .pictures import picture
from .ray_cluster import RayCluster
from .single_process import SingleProcess

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REPLY_TOKENS = 20
CONVERSATIONS = {
    "one": ("What is in this picture?", picture(1)),
    "two": ("And in this one, at the left?", picture(2)),
}


def first_turn(text: str, image: bytes) -> pb.GenerateRequest:
    message = pb.Message(role="user", content=[{"image": image}, {"text": text}])
    return pb.GenerateRequest(conversation=pb.Conversation(messages=[message]), sampling=greedy())


def next_turn(ids: Sequence[int], images: Sequence[bytes]) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=common.TokenIds(ids=ids), images=images, sampling=greedy())


def greedy() -> common.SamplingParams:
    return common.SamplingParams(temperature=0, max_tokens=REPLY_TOKENS, ignore_eos=True)


def more(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(count)]


async def talk(cluster: RayCluster, request: pb.GenerateRequest) -> tuple[list[int], pb.Finished]:
    async with GenerationClient(cluster.address) as client:
        responses = await collect(client, request)
    return tokens_of(responses), finished_of(responses)


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_cold_then_a_second_turn_on_kept_state(
    ray_cluster: RayCluster, tools: PromptTools, single: SingleProcess, name: str
) -> None:
    text, image = CONVERSATIONS[name]
    request = first_turn(text, image)
    prompt = tools.prepare(request)
    reply, end = await talk(ray_cluster, request)
    assert reply == single.cold(prompt, REPLY_TOKENS)
    assert end.sources.computed_tokens == len(prompt.ids)
    assert end.traffic.images_encoded == 1

    second = next_turn([*prompt.ids, *reply, *more(5, 45)], [image])
    second_prompt = tools.prepare(second)
    answer, end = await talk(ray_cluster, second)
    assert end.sources.state_restored
    assert end.sources.replayed_tokens == 0
    assert end.sources.state_tokens > 0
    assert prompt_tokens_balance(end.sources)
    assert end.traffic.images_encoded == 0, "its features are inside the state"
    assert answer == single.second_turn(prompt, reply, second_prompt, REPLY_TOKENS)


async def test_without_window_state_the_second_turn_replays(
    ray_cluster: RayCluster, tools: PromptTools, single: SingleProcess
) -> None:
    request = first_turn("A third conversation, about this picture.", picture(3))
    prompt = tools.prepare(request)
    reply, _ = await talk(ray_cluster, request)
    # The window tier of this cluster holds one record: another request's pushes this one out.
    await talk(ray_cluster, first_turn("Something else entirely.", picture(4)))
    second = next_turn([*prompt.ids, *reply, *more(6, 45)], [picture(3)])
    second_prompt = tools.prepare(second)
    answer, end = await talk(ray_cluster, second)
    hit_tokens = end.sources.hit_local_tokens + end.sources.hit_store_tokens
    assert not end.sources.state_restored
    assert end.sources.replayed_tokens == tools.window_tokens
    assert hit_tokens == (len(prompt.ids) + REPLY_TOKENS - 1) // tools.page_tokens * tools.page_tokens
    assert prompt_tokens_balance(end.sources)
    assert answer == single.replayed(second_prompt, hit_tokens, REPLY_TOKENS)
