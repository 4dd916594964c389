"""What may go wrong around a request: whoever leaves, dies, refuses or lies, everything is freed and said."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from cedar.actors.config import DecodeConfig, EncoderConfig
from cedar.actors.decode_worker import DecodeWorker
from cedar.actors.encoder_worker import EncoderWorker
from cedar.actors.errors import PortInUse
from cedar.actors.wire_prompt import pack_ids
from cedar.v1 import common_pb2
from cedar.v1.common_pb2 import FinishReason
from cedar.v1.stages_pb2 import StreamRequest, WindowRef, WorkerStatusRequest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def failure_of(work: Any) -> tuple[StatusCode, str, dict[str, str]]:
    """Code, words and trailing metadata of the status that ``work`` ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await work
    error = failure.value
    return error.code(), error.details() or "", {k: str(v) for k, v in error.trailing_metadata() or ()}


async def until(condition: Any, seconds: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(0.002)


# ---- the client


async def test_a_client_that_is_gone_costs_one_lease(rig: Any, prompt: Any) -> None:
    async with rig(decode={"request_lease_s": 1.0}) as cluster:
        request = cluster.request(prompt(50, 40), 400)
        async for _ in cluster.prefill_events(request):
            pass
        stream = cluster.stub(cluster.decode.address, "Decode").Stream(
            StreamRequest(request_id=request.request_id)
        )
        await stream.read()
        stream.cancel()
        assert cluster.decode.status().slots_leased == 1
        await until(lambda: cluster.decode.counters["leases_expired"] == 1)
        await cluster.idle()
        _, end = await cluster.tokens(0, request.request_id)
        assert end.reason == FinishReason.FINISH_REASON_CANCELLED
        assert "nobody read" in end.detail


async def test_cancel_frees_before_it_returns_and_again_is_nothing(rig: Any, prompt: Any) -> None:
    async with rig() as cluster:
        request = cluster.request(prompt(50, 40), 400)
        async for _ in cluster.prefill_events(request):
            pass
        stream = asyncio.create_task(cluster.tokens(0, request.request_id))
        await until(lambda: cluster.decode.counters["tokens"] > 2)
        assert await cluster.cancel(0, request.request_id)
        status = cluster.decode.status()
        assert (status.pages_leased, status.slots_leased) == (0, 0)
        tokens, end = await stream
        assert end.reason == FinishReason.FINISH_REASON_CANCELLED
        assert end.tokens == len(tokens)
        assert not await cluster.cancel(0, request.request_id)
        assert not await cluster.cancel(0, "never heard of")
        assert cluster.decode.counters["unknown_requests"] == 1, "one that has ended is not unknown"


async def test_streams_break_and_resume_from_any_index(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(50, 40)
    async with rig() as cluster:
        request = cluster.request(ids, 8)
        async for _ in cluster.prefill_events(request):
            pass
        first = cluster.stub(cluster.decode.address, "Decode").Stream(
            StreamRequest(request_id=request.request_id)
        )
        seen = [(await first.read()).token.id for _ in range(3)]
        first.cancel()
        both = await asyncio.gather(*(cluster.tokens(0, request.request_id, start) for start in (3, 0)))
        expected = single.cold(ids, 8)
        assert seen + [token.id for token in both[0][0]] == expected
        assert [token.id for token in both[1][0]] == expected
        late, end = await cluster.tokens(0, request.request_id, 6)
        assert [token.index for token in late] == [6, 7]
        assert end.reason == FinishReason.FINISH_REASON_LENGTH
        code, _, _ = await failure_of(cluster.tokens(0, "nobody"))
        assert code is StatusCode.NOT_FOUND


@pytest.mark.parametrize("moment", ["queued", "computing"])
async def test_a_prefill_that_is_cancelled_frees_both_sides(rig: Any, prompt: Any, moment: str) -> None:
    async with rig() as cluster:
        engine = cluster.prefill.parts.engine
        ids = prompt(51, 300)
        call = cluster.stub(cluster.prefill.address, "Prefill").Prefill(cluster.request(ids, 20), timeout=60)
        if moment == "queued":
            async with engine.turn:
                await call.read()  # admitted, and waiting for its turn
                call.cancel()
                await until(lambda: not cluster.decode.status().slots_leased)
        else:
            await call.read()
            # Pages arrive at Decode while later ones are computed.
            await until(lambda: cluster.decode.pages.holds(cluster.keys(ids)[1]))
            assert not engine.pages.holds(cluster.keys(ids)[8])
            call.cancel()
        await cluster.idle()
        assert cluster.prefill.status().pages_cached < 9, "it stopped before the end"


async def test_a_deadline_that_passes_frees_everything(rig: Any, prompt: Any) -> None:
    async with rig() as cluster:
        async with cluster.prefill.parts.engine.turn:
            call = cluster.stub(cluster.prefill.address, "Prefill").Prefill(
                cluster.request(prompt(50, 40), 4), timeout=1.0
            )
            await call.read()
            code, _, _ = await failure_of(call.read())
            assert code is StatusCode.DEADLINE_EXCEEDED
            await until(lambda: not cluster.decode.status().slots_leased)
        await cluster.idle()


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"token_ids": b""}, "at least one token"),
    "a token out of range": ({"token_ids": pack_ids([5, 640])}, "vocabulary's size, 640"),
    "longer than the context": ({"token_ids": pack_ids([5] * 512)}, "context of 512"),
    "foreign keys": ({"root_key": b"\x01" * 32}, "page_keys"),
    "half a root": ({"root_key": b"\x01" * 31}, "root_key"),
    "half a key": ({"page_keys": b"\x01" * 31}, "page_keys"),
    "no max_tokens": ({"sampling": common_pb2.SamplingParams()}, "max_tokens"),
    "a wild temperature": (
        {"sampling": common_pb2.SamplingParams(max_tokens=1, temperature=-2)},
        "temperature",
    ),
    "an image beyond the prompt": (
        {"images": [common_pb2.ImageSpan(start=39, length=4, rows=1, columns=1, content_hash=b"\x01" * 32)]},
        r"images\[0\].start",
    ),
    "an image of another length": (
        {"images": [common_pb2.ImageSpan(start=3, length=5, rows=1, columns=1, content_hash=b"\x01" * 32)]},
        r"images\[0\].length",
    ),
    "no request id": ({"request_id": ""}, "request_id"),
    "no decode worker": ({"decode_address": ""}, "decode_address"),
    "half a window name": (
        {"window": WindowRef(page_key=b"\x01" * 32, tokens=3, digest=b"x")},
        "token_ids",
    ),
    "more generated than asked for": ({"prompt_tokens": 5}, "max_tokens"),
}


@pytest.mark.parametrize("fault", BAD_REQUESTS)
async def test_bad_requests_are_named(rig: Any, prompt: Any, fault: str) -> None:
    fields, words = BAD_REQUESTS[fault]
    async with rig() as cluster:
        request = cluster.request(prompt(50, 40), 4)
        for name in fields:
            request.ClearField(name)
        request.MergeFrom(type(request)(**fields))
        with pytest.raises(grpc.aio.AioRpcError, match=words) as failure:
            await cluster.generate(request)
        assert failure.value.code() is StatusCode.INVALID_ARGUMENT


# ---- room


async def test_decode_without_room_is_passed_on_with_its_delay(rig: Any, prompt: Any) -> None:
    async with rig(decode={"slots": 1}) as cluster:
        first = cluster.request(prompt(50, 40), 400)
        async for _ in cluster.prefill_events(first):
            pass
        code, words, metadata = await failure_of(cluster.generate(cluster.request(prompt(52, 40), 4)))
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert "every sequence slot is in use" in words
        assert metadata["cedar-stage"] == "decode"
        assert metadata["retry-after-ms"] == "10"
        assert cluster.prefill.status().pages_leased == 0
        await cluster.cancel(0, first.request_id)


async def test_more_than_the_memory_holds_is_refused_for_good(rig: Any, prompt: Any) -> None:
    async with rig(decode={"pages": 3}, prefill={"pages": 3}) as cluster:
        code, words, _ = await failure_of(cluster.generate(cluster.request(prompt(50, 40), 100)))
        assert code is StatusCode.INVALID_ARGUMENT
        assert "at most 96, the memory of this worker" in words
        code, words, _ = await failure_of(cluster.generate(cluster.request(prompt(50, 100), 1)))
        assert code is StatusCode.INVALID_ARGUMENT


async def test_prompts_wait_their_turn_and_the_queue_is_bounded(rig: Any, single: Any, prompt: Any) -> None:
    async with rig(prefill={"slots": 1, "max_queue": 2}) as cluster:
        engine = cluster.prefill.parts.engine
        await engine.turn.acquire()
        first = asyncio.create_task(cluster.generate(cluster.request(prompt(50, 40), 2)))
        await until(lambda: engine.slots.leased)
        gone = asyncio.create_task(cluster.generate(cluster.request(prompt(53, 40), 2)))
        await until(lambda: len(engine.waiting) == 1)
        third = asyncio.create_task(cluster.generate(cluster.request(prompt(52, 40), 2)))
        await until(lambda: len(engine.waiting) == 2)
        code, _, metadata = await failure_of(cluster.generate(cluster.request(prompt(54, 40), 2)))
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert metadata["cedar-stage"] == "prefill"
        gone.cancel()
        await until(lambda: len(engine.waiting) == 1)
        engine.turn.release()
        assert (await first).ids == single.cold(prompt(50, 40), 2)
        assert (await third).ids == single.cold(prompt(52, 40), 2)


async def test_waiting_for_room_ends(rig: Any, prompt: Any) -> None:
    async with rig(prefill={"slots": 1, "queue_timeout_s": 0.1}) as cluster:
        async with cluster.prefill.parts.engine.turn:
            first = asyncio.create_task(cluster.generate(cluster.request(prompt(50, 40), 2)))
            await until(lambda: cluster.prefill.parts.engine.slots.leased)
            code, _, _ = await failure_of(cluster.generate(cluster.request(prompt(52, 40), 2)))
            assert code is StatusCode.DEADLINE_EXCEEDED
        await first


# ---- the other workers


async def test_an_old_view_of_decode_is_refused(rig: Any, prompt: Any) -> None:
    async with rig() as cluster:
        request = cluster.request(prompt(50, 40), 4)
        request.decode_incarnation += 1
        code, words, metadata = await failure_of(cluster.generate(request))
        assert code is StatusCode.FAILED_PRECONDITION
        assert "incarnation" in words
        assert metadata["cedar-stage"] == "decode"


async def test_a_decode_worker_that_is_not_there(rig: Any, prompt: Any) -> None:
    async with rig() as cluster:
        request = cluster.request(prompt(50, 40), 4)
        request.decode_address = "127.0.0.1:1"
        code, _, metadata = await failure_of(cluster.generate(request))
        assert code is StatusCode.UNAVAILABLE
        assert metadata["cedar-stage"] == "decode"


async def test_a_decode_worker_that_dies_during_prefill(rig: Any, prompt: Any) -> None:
    async with rig() as cluster:
        async with cluster.prefill.parts.engine.turn:
            work = asyncio.create_task(cluster.generate(cluster.request(prompt(50, 40), 4)))
            await until(lambda: cluster.decode.status().slots_leased)
            await cluster.decode.stop(0)
        code, _, metadata = await failure_of(work)
        assert code is StatusCode.UNAVAILABLE
        assert metadata["cedar-stage"] == "decode"
        cluster.prefill.assert_idle()


async def test_a_decode_worker_that_stops_sends_its_readers_elsewhere(rig: Any, prompt: Any) -> None:
    async with rig() as cluster:
        request = cluster.request(prompt(50, 40), 400)
        async for _ in cluster.prefill_events(request):
            pass
        stream = asyncio.create_task(cluster.tokens(0, request.request_id))
        await until(lambda: cluster.decode.counters["tokens"] > 2)
        await cluster.decode.stop(0)
        code, words, _ = await failure_of(stream)
        assert code is StatusCode.UNAVAILABLE
        assert "stopping" in words
        cluster.decode.assert_idle()


async def test_a_draining_worker_ends_what_runs_and_takes_nothing_new(
    rig: Any, single: Any, prompt: Any
) -> None:
    async with rig() as cluster:
        work = asyncio.create_task(cluster.generate(cluster.request(prompt(50, 40), 8)))
        await until(lambda: cluster.decode.counters["tokens"])
        draining = asyncio.create_task(cluster.decode.drain(20))
        await asyncio.sleep(0)
        code, words, metadata = await failure_of(cluster.generate(cluster.request(prompt(52, 40), 2)))
        assert code is StatusCode.UNAVAILABLE
        assert "draining" in words
        assert metadata["cedar-stage"] == "decode"
        assert (await work).ids == single.cold(prompt(50, 40), 8)
        assert await draining
        assert cluster.decode.status().draining


async def test_a_prefill_that_waits_long_is_not_taken_for_dead(rig: Any, single: Any, prompt: Any) -> None:
    async with rig(prefill={"heartbeat_s": 0.1}, decode={"handoff_idle_s": 1.0}) as cluster:
        async with cluster.prefill.parts.engine.turn:
            work = asyncio.create_task(cluster.generate(cluster.request(prompt(50, 40), 2)))
            await until(lambda: cluster.decode.status().slots_leased)
            await asyncio.sleep(1.5)
        assert (await work).ids == single.cold(prompt(50, 40), 2)


# ---- bugs and poison


class Faulty:
    """The network, with one method of it replaced."""

    def __init__(self, network: Any, **methods: Any) -> None:
        self._network = network
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._network, name)


async def test_a_bug_in_the_engine_sends_readers_elsewhere_and_ends_the_worker(
    rig: Any, prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(check_idle=False) as cluster:
        memory = cluster.decode.memory

        def broken(*_: Any) -> Any:
            raise RuntimeError("a kernel went wrong")

        bad = replace(memory, network=Faulty(memory.network, decode=broken))
        cluster.decode.engine._memory = bad
        work = cluster.generate(cluster.request(prompt(50, 40), 4))
        code, words, _ = await failure_of(work)
        assert code is StatusCode.UNAVAILABLE
        assert "a kernel went wrong" in words
        assert not cluster.decode.healthy()
        cluster.decode.assert_idle()
        assert await serving(cluster, "decode") == health_pb2.HealthCheckResponse.NOT_SERVING
        code, words, _ = await failure_of(cluster.generate(cluster.request(prompt(52, 40), 4)))
        assert code is StatusCode.UNAVAILABLE
        assert "has failed" in words


async def test_logits_that_are_not_finite_end_their_own_request_only(
    rig: Any, single: Any, prompt: Any
) -> None:
    async with rig() as cluster:
        memory = cluster.decode.memory
        poisoned = prompt(55, 41)

        def decode(kv: Any, sequences: Any) -> torch.Tensor:
            logits: torch.Tensor = memory.network.decode(kv, sequences)
            for row, sequence in enumerate(sequences):
                if sequence.ids[:41] == poisoned and len(sequence.ids) > 43:
                    logits[row, 7] = float("nan")
            return logits

        cluster.decode.engine._memory = replace(memory, network=Faulty(memory.network, decode=decode))
        good, bad = await asyncio.gather(
            cluster.generate(cluster.request(prompt(50, 40), 8)),
            cluster.generate(cluster.request(poisoned, 8)),
        )
        assert good.ids == single.cold(prompt(50, 40), 8)
        assert bad.end.reason == FinishReason.FINISH_REASON_FAILED
        assert "not finite" in bad.end.detail
        assert 0 < len(bad.ids) < 8


async def test_a_prompt_that_poisons_the_logits_leaves_the_prefill_worker_whole(
    rig: Any, single: Any, prompt: Any
) -> None:
    async with rig() as cluster:
        engine = cluster.prefill.parts.engine
        memory = engine.memory

        def finish(kv: Any, sequence: Any) -> torch.Tensor:
            return memory.network.finish_prefill(kv, sequence) * float("nan")  # type: ignore[no-any-return]

        engine.memory = replace(memory, network=Faulty(memory.network, finish_prefill=finish))
        code, _, _ = await failure_of(cluster.generate(cluster.request(prompt(50, 40), 4)))
        assert code is StatusCode.DATA_LOSS
        engine.memory = memory
        reply = await cluster.generate(cluster.request(prompt(56, 40), 2))
        assert reply.ids == single.cold(prompt(56, 40), 2)


# ---- starting


async def serving(cluster: Any, worker: str) -> int:
    address = {"decode": cluster.decode, "prefill": cluster.prefill}[worker].address
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return int(answer.status)


async def test_workers_answer_for_themselves(rig: Any, network: Any) -> None:
    async with rig() as cluster:
        for worker in cluster.workers:
            assert worker.address.startswith("127.0.0.1:")
            status = await cluster.stub(worker.address, "Worker").GetStatus(WorkerStatusRequest(), timeout=5)
            assert status.stage == worker.stage
            assert 0 < status.incarnation < 1 << 63
            assert status.fingerprint == network.fingerprint
            assert (status.page_tokens, status.pages_total, status.slots_total) == (32, 40, 4)
            assert await serving(cluster, worker.stage) == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use_is_named(rig: Any, network: Any) -> None:
    async with rig() as cluster:
        port = int(cluster.decode.address.rpartition(":")[2])
        taken = DecodeWorker(DecodeConfig(checkpoint="x", port=port, pages=4, slots=1), network=network)
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            await taken.start()
        await taken.stop(0)


async def test_a_thread_that_does_not_come_back_is_unhealthy(rig: Any) -> None:
    async with rig(decode={"stuck_s": 0.05}) as cluster:
        go = threading.Event()
        stuck = asyncio.create_task(cluster.decode._thread.call(lambda: go.wait(10)))
        await until(lambda: not cluster.decode.healthy())
        go.set()
        await stuck
        await until(lambda: cluster.decode.healthy())


async def test_a_checkpoint_that_is_not_there_is_named() -> None:
    worker = EncoderWorker(EncoderConfig(checkpoint="/nowhere/at/all"))
    with pytest.raises(ValueError, match="/nowhere/at/all"):
        await worker.start()
    await worker.stop(0)
