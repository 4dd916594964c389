"""Ways out of a request that are easy to forget: each frees everything, and none is told as another."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.cluster.client import GenerationClient as Client
from cedar.cluster.directory import Worker
from cedar.cluster.retry import Failure
from cedar.cluster.stage_calls import PrefillCall, StageFailure
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb
from cedar.v1 import stages_pb2 as stages

from .in_process import Stack, collect, finished_of, idle, local_config, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Somebody leaves while others stay, and nobody may notice more than that."


def ask(max_tokens: int = 200, **more: Any) -> pb.GenerateRequest:
    sampling = common.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=TEXT, sampling=sampling, **more)


class Call:
    """A call's context, as far as the service looks at it."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("x-api-key", "key-a")]

    def time_remaining(self) -> float | None:
        return None


def held(stack: Stack) -> int:
    return sum(worker.status().pages_leased for worker in stack.decode)


async def test_a_stream_that_is_closed_holds_nothing_when_that_returns(stack: Stack) -> None:
    stream: Any = stack.gateway.service.Generate(ask(request_id="one"), Call())
    async for response in stream:
        if response.HasField("delta"):
            break
    assert held(stack)
    await stream.aclose()
    assert not held(stack)
    assert not stack.gateway.service.active
    again: Any = stack.gateway.service.Generate(ask(2, request_id="one"), Call())
    assert [response async for response in again][-1].HasField("finished"), "its id is free again"


async def test_a_gateway_that_goes_at_once_lets_the_stages_go(tmp_path: Path) -> None:
    async with running(local_config(), tmp_path) as stack, Client(stack.address, "key-a") as client:
        answer = asyncio.create_task(collect(client, ask()))
        while not held(stack):
            await asyncio.sleep(0.01)
        await stack.gateway.stop(drain_s=0)
        assert not held(stack), "waiting for a lease to end is the last resort"
        with pytest.raises(grpc.aio.AioRpcError):
            await answer
        await idle(stack)


async def test_prompts_in_preparation_are_bounded_and_have_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ("gateway.max_active_requests=2", "gateway.max_queued_requests=1", "deadlines.request_s=0.5")
    async with running(local_config(*limits), tmp_path) as stack, Client(stack.address, "key-a") as client:
        service = stack.gateway.service
        slow = threading.Event()
        real = service._prepare
        monkeypatch.setattr(service, "_prepare", lambda request: (slow.wait(5), real(request))[1])
        tasks = [asyncio.create_task(collect(client, ask(1))) for _ in range(5)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        slow.set()
        codes = [error.code().name for error in done if isinstance(error, grpc.aio.AioRpcError)]
        assert sorted(codes) == ["DEADLINE_EXCEEDED"] * 3 + ["RESOURCE_EXHAUSTED"] * 2
        assert service.admission.preparing == 0
        await idle(stack)


async def test_a_prefill_worker_that_vanishes_after_the_first_token_costs_only_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(local_config(), tmp_path) as stack, Client(stack.address, "key-a") as client:
        for_ever = asyncio.Event()

        async def wait(self: Any, timeout_s: float) -> None:
            if timeout_s:
                await for_ever.wait()

        monkeypatch.setattr("cedar.actors.store_writer.Receipt.wait", wait)
        seen = []
        async for response in client.generate(ask(30)):
            seen.append(response)
            if len(seen) == 3:  # frozen, as the gateway sees it: out of the directory, its call never ends
                await stack.announcers.pop(stack.prefills[0].address).stop()
                while stack.gateway.fleet.view.stage("prefill"):
                    await asyncio.sleep(0.01)
                monkeypatch.undo()
        end = finished_of(seen)
        assert (end.reason, end.completion_tokens) == (common.FINISH_REASON_LENGTH, 30)
        for_ever.set()
        await idle(stack)


async def test_a_closed_channel_is_a_failure_of_the_call_not_a_cancelled_request() -> None:
    server = grpc.aio.server()

    async def hang(request: Any, context: Any) -> Any:
        await asyncio.sleep(30)
        yield b""

    method: Any = grpc.unary_stream_rpc_method_handler(hang)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("cedar.v1.Prefill", {"Prefill": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        worker = Worker(stage="prefill", address=f"127.0.0.1:{port}", incarnation=1)
        for wait in (PrefillCall.admitted, PrefillCall.done):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            call = PrefillCall(channel, worker, stages.PrefillRequest(), 30)
            waiting = asyncio.create_task(wait(call))
            await asyncio.sleep(0.1)
            await channel.close(None)
            with pytest.raises(StageFailure) as failure:
                await asyncio.wait_for(waiting, 5)
            assert failure.value.failure == Failure(
                called="prefill", code=grpc.StatusCode.UNAVAILABLE, detail="the channel was closed"
            )
            await call.cancel()
    finally:
        await server.stop(0)
