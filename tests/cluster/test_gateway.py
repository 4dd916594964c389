"""The gateway over real workers: what a client is told, and that nothing is held afterwards."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.cluster.client import GenerationClient
from cedar.cluster.usage import prompt_tokens_balance
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import (
    IMAGE,
    Stack,
    collect,
    finished_of,
    idle,
    local_config,
    running,
    status_of,
    text_of,
    tokens_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The quick brown fox jumps over the lazy dog, again and again and again."


def ask(text: str = TEXT, max_tokens: int = 8, **more: Any) -> pb.GenerateRequest:
    sampling = common.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more.pop("sampling", {}))
    return pb.GenerateRequest(text=text, sampling=sampling, **more)


def conversation(*turns: tuple[str, list[Any]]) -> pb.Conversation:
    messages = [
        pb.Message(role=role, content=[{"image": p} if isinstance(p, bytes) else {"text": p} for p in parts])
        for role, parts in turns
    ]
    return pb.Conversation(messages=messages)


async def test_a_request_streams_and_accounts(stack: Stack, client: GenerationClient) -> None:
    responses = await collect(client, ask(images=[IMAGE], request_id="mine"))
    assert responses[0].started.request_id == "mine"
    assert [r.delta.token.index for r in responses[1:-1]] == list(range(8))
    end = finished_of(responses)
    assert (end.reason, end.completion_tokens, end.retries) == (common.FINISH_REASON_LENGTH, 8, 0)
    assert prompt_tokens_balance(end.sources)
    assert end.sources == responses[0].started.sources
    page_tokens = stack.gateway.service._tools.page_tokens
    assert end.traffic.pages_sent == end.sources.prompt_tokens // page_tokens
    assert end.traffic.images_encoded == 1
    assert end.times.ttft_s > 0
    assert end.times.encoder_s > 0


async def test_the_three_ways_to_give_a_prompt_agree(stack: Stack, client: GenerationClient) -> None:
    text = await collect(client, ask(images=[IMAGE]))
    tools = stack.gateway.service._tools
    image_id = tools.prepare(ask(images=[IMAGE])).ids[1]
    ids = list(tools.prepare(ask()).ids)
    token_ids = [ids[0], image_id, *ids[1:]]
    request = pb.GenerateRequest(
        token_ids=common.TokenIds(ids=token_ids), images=[IMAGE], sampling=ask().sampling
    )
    assert tokens_of(await collect(client, request)) == tokens_of(text)
    talk = pb.GenerateRequest(
        conversation=conversation(("user", [IMAGE, "what is it?"])), sampling=ask().sampling
    )
    assert len(tokens_of(await collect(client, talk))) == 8


async def test_sampling_is_keyed_by_seed(client: GenerationClient) -> None:
    def warm(seed: int) -> pb.GenerateRequest:
        return ask(max_tokens=12, sampling={"temperature": 1.5, "seed": seed, "logprobs": 2})

    await collect(client, warm(7))  # from here on all have the same hit
    one, again, other = [await collect(client, warm(seed)) for seed in (7, 7, 8)]
    assert tokens_of(one) == tokens_of(again) != tokens_of(other)
    tokens = [r.delta.token for r in one if r.delta.HasField("token")]  # text held back comes without one
    assert len(tokens) == 12
    assert all(len(token.top) == 2 for token in tokens)


async def test_a_second_turn_hits_what_the_first_left(stack: Stack, client: GenerationClient) -> None:
    for number in range(3):
        first = ask(f"{number}: {TEXT}", max_tokens=40)
        reply = tokens_of(await collect(client, first))
        ids = [*stack.gateway.service._tools.prepare(first).ids, *reply[:-1], 9, 8, 7]
        second = pb.GenerateRequest(token_ids=common.TokenIds(ids=ids), sampling=ask().sampling)
        end = finished_of(await collect(client, second))
        assert prompt_tokens_balance(end.sources)
        if end.sources.state_restored:  # a store that was too slow to take the state is a miss, no error
            break
    assert end.sources.state_restored
    assert end.sources.replayed_tokens == 0
    assert end.sources.computed_tokens <= 4


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        pytest.param(pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt", id="no prompt"),
        pytest.param(
            pb.GenerateRequest(token_ids=common.TokenIds()),
            "INVALID_ARGUMENT",
            "at least one token",
            id="empty",
        ),
        pytest.param(
            pb.GenerateRequest(token_ids=common.TokenIds(ids=[5, 640])),
            "INVALID_ARGUMENT",
            "640",
            id="id range",
        ),
        pytest.param(ask(TEXT * 40), "INVALID_ARGUMENT", "512", id="too long"),
        pytest.param(ask(images=[b"GIF89a nonsense"]), "INVALID_ARGUMENT", "image", id="corrupt image"),
        pytest.param(ask(images=[b"no image at all"]), "INVALID_ARGUMENT", "image", id="not an image"),
        pytest.param(ask(images=[IMAGE[: len(IMAGE) // 2]]), "INVALID_ARGUMENT", "image", id="half an image"),
        pytest.param(ask(images=[IMAGE] * 33), "INVALID_ARGUMENT", "images: 33 (at most 32)", id="images"),
        pytest.param(
            ask(images=[b"x" * 5_000_000]), "INVALID_ARGUMENT", "at most 4194304 bytes", id="image bytes"
        ),
        pytest.param(
            ask(max_tokens=257), "INVALID_ARGUMENT", "sampling.max_tokens: 257 (at most 256)", id="output"
        ),
        pytest.param(ask(sampling={"top_p": 1.5}), "INVALID_ARGUMENT", "top_p", id="top_p"),
        pytest.param(ask(sampling={"temperature": -1}), "INVALID_ARGUMENT", "temperature", id="temperature"),
        pytest.param(ask(sampling={"stop_ids": [9999]}), "INVALID_ARGUMENT", "stop_ids", id="stop ids"),
        pytest.param(ask(sampling={"stop": [""]}), "INVALID_ARGUMENT", "stop", id="empty stop string"),
        pytest.param(ask(request_id="a#b"), "INVALID_ARGUMENT", "request_id", id="request id"),
        pytest.param(
            pb.GenerateRequest(conversation=conversation(("robot", ["hi"]))),
            "INVALID_ARGUMENT",
            "role",
            id="role",
        ),
    ],
)
async def test_bad_input_is_named(shared: Stack, request_: pb.GenerateRequest, code: str, said: str) -> None:
    async with GenerationClient(shared.address, api_key="key-a") as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(client, request_)
    assert status_of(caught)[0] == code
    assert said in status_of(caught)[1]
    await idle(shared)


@pytest.mark.parametrize("key", [None, "unknown"])
async def test_strangers_are_not_served(shared: Stack, key: str | None) -> None:
    async with GenerationClient(shared.address, api_key=key) as client:
        for call in (collect(client, ask()), client.cancel("x")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert status_of(caught)[0] == "UNAUTHENTICATED"


async def test_tenants_share_nothing(shared: Stack) -> None:
    text = "Something that two tenants both say, word for word, long enough for a page."
    ends = []
    for key in ("key-a", "key-a", "key-b"):
        async with GenerationClient(shared.address, api_key=key) as client:
            ends.append(finished_of(await collect(client, ask(text))))
    hits = [end.sources.hit_local_tokens + end.sources.hit_store_tokens for end in ends]
    assert hits[0] == 0
    assert hits[1] > 0
    assert hits[2] == 0


async def test_tenants_may_use_the_same_request_id(shared: Stack) -> None:
    async def one(key: str) -> pb.Finished:
        async with GenerationClient(shared.address, api_key=key) as client:
            return finished_of(await collect(client, ask(request_id="same")))

    ends = await asyncio.gather(one("key-a"), one("key-b"))
    assert [end.completion_tokens for end in ends] == [8, 8]


async def test_stop_strings_cut_the_text_and_free_the_request(shared: Stack) -> None:
    async with GenerationClient(shared.address, api_key="key-a") as client:
        whole = text_of(await collect(client, ask(max_tokens=24)))
        stop = next(piece for piece in (whole[5:8], whole[6:9]) if "\ufffd" not in piece)
        responses = await collect(client, ask(max_tokens=24, sampling={"stop": [stop]}))
    end = finished_of(responses)
    assert (end.reason, end.stop) == (common.FINISH_REASON_STOP_STRING, stop)
    assert text_of(responses) == whole[: whole.index(stop)]
    assert end.completion_tokens < 24
    await idle(shared)


async def test_stop_ids_end_it_in_the_worker(shared: Stack) -> None:
    async with GenerationClient(shared.address, api_key="key-a") as client:
        tokens = tokens_of(await collect(client, ask(max_tokens=8)))
        responses = await collect(client, ask(max_tokens=8, sampling={"stop_ids": [tokens[3]]}))
    assert finished_of(responses).reason == common.FINISH_REASON_STOP
    assert tokens_of(responses) == tokens[: tokens.index(tokens[3]) + 1]


async def test_a_client_that_leaves_frees_everything(shared: Stack) -> None:
    async with GenerationClient(shared.address, api_key="key-a") as client:
        stream = client.generate(ask(max_tokens=200))
        async for response in stream:
            if response.HasField("delta"):
                break
        assert any(worker.status().pages_leased for worker in shared.decode)
        await stream.aclose()  # type: ignore[attr-defined]
    await idle(shared)


async def test_cancel_ends_the_stream_with_its_account(shared: Stack) -> None:
    async with GenerationClient(shared.address, api_key="key-a") as client:
        assert not await client.cancel("long")
        seen = []
        async for response in client.generate(ask(max_tokens=200, request_id="long")):
            seen.append(response)
            if len(seen) == 3:
                async with GenerationClient(shared.address, api_key="key-b") as other:
                    assert not await other.cancel("long"), "another tenant's"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await collect(client, ask(request_id="long"))
                assert "request_id" in status_of(caught)[1]
                assert await client.cancel("long")
                assert not any(worker.status().pages_leased for worker in shared.decode)
    assert finished_of(seen).reason == common.FINISH_REASON_CANCELLED
    await idle(shared)


async def test_a_deadline_frees_everything(shared: Stack) -> None:
    async with GenerationClient(shared.address, api_key="key-a") as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in client.generate(ask(max_tokens=200), timeout_s=0.5)]
    assert status_of(caught)[0] == "DEADLINE_EXCEEDED"
    await idle(shared)


async def test_the_gateways_own_deadline_is_told(tmp_path: Path) -> None:
    async with running(local_config("deadlines.request_s=0.4"), tmp_path) as stack:
        async with GenerationClient(stack.address, api_key="key-a") as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(client, ask(max_tokens=200))
        assert status_of(caught) == ("DEADLINE_EXCEEDED", "the request's deadline has passed")
        await idle(stack)


async def test_more_than_may_wait_is_refused_with_a_delay(tmp_path: Path) -> None:
    config = local_config("gateway.max_active_requests=1", "gateway.max_queued_requests=1")
    async with running(config, tmp_path) as stack, GenerationClient(stack.address, api_key="key-a") as client:
        tasks = [asyncio.create_task(collect(client, ask(max_tokens=20))) for _ in range(5)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in done if isinstance(error, grpc.aio.AioRpcError)]
        assert len(refused) >= 1
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata() or ())["retry-after-ms"]) >= 100  # type: ignore[call-overload]
        served = [finished_of(answer) for answer in done if isinstance(answer, list)]
        assert len(served) + len(refused) == 5
        assert len(served) >= 1
        await idle(stack)


async def test_more_than_a_worker_holds_waits_for_it(tmp_path: Path) -> None:
    config = local_config("decode.slots=1", "prefill.slots=1")
    async with running(config, tmp_path) as stack, GenerationClient(stack.address, api_key="key-a") as client:
        requests = [ask(f"{n} {TEXT}", max_tokens=6) for n in range(6)]
        answers = await asyncio.gather(*(collect(client, request) for request in requests))
        assert all(finished_of(answer).completion_tokens == 6 for answer in answers)
        await idle(stack)


async def test_get_model(shared: Stack) -> None:
    async with GenerationClient(shared.address) as client:
        model = await client.get_model()
    assert (model.name, model.page_tokens, model.context_tokens, model.vocabulary) == (
        "cedar-tiny",
        32,
        512,
        640,
    )
    assert len(model.fingerprint) == 32
    assert model.vision
