"""What dies, and what the client sees of it: nothing but time. Real workers, in one process."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.cluster.client import GenerationClient as Client
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import IMAGE, Stack, collect, finished_of, idle, local_config, running, status_of, tokens_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "A stream that goes on whatever happens to the machines behind it, one and all."


def ask(text: str = TEXT, max_tokens: int = 24, **more: Any) -> pb.GenerateRequest:
    sampling = common.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more.pop("sampling", {}))
    return pb.GenerateRequest(text=text, sampling=sampling, **more)


async def collect_and(
    client: Client, request: pb.GenerateRequest, tokens: int, then: Callable[[], Awaitable[None]]
) -> list[pb.GenerateResponse]:
    """The whole answer; after so many tokens something happens."""
    seen: list[pb.GenerateResponse] = []
    happened = False
    async for response in client.generate(request):
        seen.append(response)
        if len(tokens_of(seen)) == tokens and not happened:
            happened = True
            await then()
    return seen


async def test_a_dead_decode_worker_is_a_pause(stack: Stack, client: Client) -> None:
    request = ask(images=[IMAGE], sampling={"temperature": 1.2, "seed": 11})
    await collect(client, request)  # from here on the prompt's pages are hits
    expected = tokens_of(await collect(client, request))
    seen = await collect_and(client, request, 9, stack.kill_decoding)
    assert tokens_of(seen) == expected
    assert [r.delta.token.index for r in seen if r.delta.HasField("token")] == list(range(24))
    end = finished_of(seen)
    assert (end.retries, end.completion_tokens) == (1, 24)


async def test_dying_after_the_last_token_leaves_a_whole_answer(stack: Stack, client: Client) -> None:
    from cedar.cluster import request_life

    real = request_life.decode_stream

    async def without_an_end(*facts: Any) -> Any:
        async for response in real(*facts):
            if response.HasField("end"):
                raise request_life.broken("decode", facts[1], "died")
            yield response

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_life, "decode_stream", without_an_end)
        end = finished_of(await collect(client, ask()))
    assert (end.reason, end.completion_tokens) == (common.FINISH_REASON_LENGTH, 24)
    assert end.retries == 0


async def test_a_draining_decode_worker_gives_its_streams_away(stack: Stack, client: Client) -> None:
    await collect(client, ask())
    expected = tokens_of(await collect(client, ask()))

    async def drain() -> None:
        worker = stack.decoding()
        await stack.announcers.pop(worker.address).stop()
        await worker.stop(drain_s=0.05)
        stack.decode.remove(worker)

    assert tokens_of(await collect_and(client, ask(), 5, drain)) == expected


async def test_a_dead_prefill_worker_is_retried_elsewhere(tmp_path: Path) -> None:
    async with running(local_config(), tmp_path) as stack, Client(stack.address, "key-a") as client:
        await stack.add_prefill()
        await collect(client, ask())
        request = ask(TEXT * 5)
        task = asyncio.create_task(collect(client, request))
        while not (busy := [w for w in stack.prefills if w.status().active]):
            await asyncio.sleep(0.002)
        await stack.kill(busy[0])
        stack.prefills.remove(busy[0])
        end = finished_of(await task)
        assert end.completion_tokens == 24
        await idle(stack)


async def test_a_dead_encoder_is_told_within_a_bound(tmp_path: Path) -> None:
    config = local_config("deadlines.worker_s=0.5")
    async with running(config, tmp_path) as stack, Client(stack.address, "key-a") as client:
        await stack.kill(stack.encoder)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(client, ask(images=[IMAGE]))
        assert status_of(caught)[0] == "UNAVAILABLE"
        assert "encoder" in status_of(caught)[1]
        assert finished_of(await collect(client, ask())).completion_tokens == 24, "text needs no encoder"
        await idle(stack)


async def test_a_dead_store_is_a_miss(stack: Stack, client: Client) -> None:
    await collect(client, ask())
    await stack.kill_store(0)
    end = finished_of(await collect(client, ask("Another " + TEXT)))
    assert end.completion_tokens == 24
    assert end.sources.computed_tokens == end.sources.prompt_tokens


async def test_without_its_directory_the_gateway_goes_on(stack: Stack, client: Client) -> None:
    stack.directory.reachable = False
    await asyncio.sleep(0.3)
    assert finished_of(await collect(client, ask())).completion_tokens == 24
    assert stack.gateway.fleet.view_age_s > 0
    stack.directory.reachable = True
    stack.directory.restart()
    await asyncio.sleep(0.05)
    assert finished_of(await collect(client, ask())).completion_tokens == 24


async def test_features_that_expired_are_encoded_again(stack: Stack, client: Client) -> None:
    real = stack.gateway.fleet.pick
    forgotten = 0

    def forget_then_pick(stage: str, *facts: Any) -> Any:
        nonlocal forgotten
        if stage == "prefill" and not forgotten:  # the image has been encoded, and nobody has fetched it
            forgotten = stack.forget_features()
        return real(stage, *facts)

    stack.gateway.fleet.pick = forget_then_pick  # type: ignore[method-assign]
    end = finished_of(await collect(client, ask(images=[IMAGE])))
    assert forgotten == 1
    assert (end.completion_tokens, end.retries, end.traffic.images_encoded) == (24, 1, 2)


async def test_a_gateway_that_goes_away_finishes_what_it_has(tmp_path: Path) -> None:
    async with running(local_config(), tmp_path) as stack, Client(stack.address, "key-a") as client:
        answer = asyncio.create_task(collect(client, ask(max_tokens=40)))
        while not stack.gateway.service.active:
            await asyncio.sleep(0.01)
        leaving = asyncio.create_task(stack.gateway.stop(drain_s=30))
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(client, ask())
        assert status_of(caught)[0] == "UNAVAILABLE"
        assert finished_of(await answer).completion_tokens == 40
        await leaving
        await idle(stack)


async def test_all_workers_busy_waits_and_counts(tmp_path: Path) -> None:
    config = local_config("decode.slots=1")
    async with running(config, tmp_path) as stack, Client(stack.address, "key-a") as client:
        seen_waiting = 0
        tasks = [asyncio.create_task(collect(client, ask(f"{n} {TEXT}"))) for n in range(4)]
        while not all(task.done() for task in tasks):
            seen_waiting = max(seen_waiting, stack.gateway.service.waiting["decode"])
            await asyncio.sleep(0.01)
        assert all(finished_of(task.result()).retries == 0 for task in tasks), "busy is no failure"
        assert seen_waiting >= 1
        await idle(stack)
