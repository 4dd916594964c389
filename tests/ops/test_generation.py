"""One stream through a real gRPC server that plays the gateway: printing, JSON, errors, interruption."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.ops.conversation_file import Turn
from cedar.ops.exits import CommandError, Exit
from cedar.ops.generation import Reply, conversation_message, stream_reply
from cedar.v1 import common_pb2, generation_pb2, generation_pb2_grpc


class Gateway(generation_pb2_grpc.GenerationServicer):
    """Answers with fixed words, or with a status, or never stops."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.endless = False

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.status is not None:
            await context.abort(*self.status)
        yield generation_pb2.GenerateResponse(started=generation_pb2.Started(request_id=request.request_id))
        for index, text in enumerate(["Hel", "lo", "\x1b[2J"]):
            token = common_pb2.TokenEvent(index=index, id=100 + index)
            yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(token=token, text=text))
        while self.endless:
            await asyncio.sleep(0.01)
        finished = generation_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, completion_tokens=3)
        finished.sources.prompt_tokens = 40
        finished.sources.hit_store_tokens = 32
        finished.times.ttft_s = 0.25
        finished.times.decode_s = 0.02
        yield generation_pb2.GenerateResponse(finished=finished)

    async def Cancel(
        self, request: generation_pb2.CancelRequest, context: Any
    ) -> generation_pb2.CancelResponse:
        self.cancelled.append(request.request_id)
        return generation_pb2.CancelResponse(found=True)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Gateway, str]]:
    gateway, server = Gateway(), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield gateway, f"127.0.0.1:{port}"
    await server.stop(None)


def ask(text: str = "hi") -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=text)


async def test_text_streams_and_cannot_steer_the_terminal(served: tuple[Gateway, str]) -> None:
    _, address = served
    out = io.StringIO()
    reply = await stream_reply(ask(), address, out)
    assert out.getvalue() == "Hello\\x1b[2J\n"
    assert reply.text == "Hello\x1b[2J"
    assert reply.ids == [100, 101, 102]
    assert not reply.failed
    assert reply.summary() == (
        "[40 prompt tokens, 32 of them cached; 3 generated (stop); first token 250.0 ms; 10.0 ms a token]"
    )


def test_summary_leaves_out_what_was_not_measured() -> None:
    finished = generation_pb2.Finished(
        reason=common_pb2.FINISH_REASON_STOP_STRING, completion_tokens=3, retries=1
    )
    summary = Reply("r", finished=finished).summary()
    assert "a token" not in summary, "a stop string's end comes without Decode's time"
    assert summary.endswith("; 1 stage run again after a failure]")


async def test_json_is_one_object_a_line(served: tuple[Gateway, str]) -> None:
    _, address = served
    out = io.StringIO()
    await stream_reply(ask(), address, out, as_json=True)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["event"] for record in records] == ["started", "delta", "delta", "delta", "finished"]
    assert records[1]["text"] == "Hel"
    assert records[1]["token"]["id"] == 100
    assert records[-1]["reason"] == "FINISH_REASON_STOP"
    assert records[-1]["sources"]["hit_local_tokens"] == 0


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, Exit.USAGE),
        (grpc.StatusCode.UNAUTHENTICATED, Exit.USAGE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Exit.BUSY),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Exit.DEADLINE),
        (grpc.StatusCode.INTERNAL, Exit.FAILED),
    ],
)
async def test_statuses_become_exit_codes(
    served: tuple[Gateway, str], status: grpc.StatusCode, code: Exit
) -> None:
    gateway, address = served
    gateway.status = (status, "prompt: 9000 tokens (limit 512)")
    with pytest.raises(CommandError, match="9000 tokens") as raised:
        await stream_reply(ask(), address, io.StringIO())
    assert raised.value.code is code


async def test_nobody_there() -> None:
    with pytest.raises(CommandError) as raised:
        await stream_reply(ask(), "127.0.0.1:1", io.StringIO(), timeout_s=5)
    assert raised.value.code is Exit.UNREACHABLE


async def test_cancelling_the_task_cancels_the_request(served: tuple[Gateway, str]) -> None:
    gateway, address = served
    gateway.endless = True
    out = io.StringIO()
    task = asyncio.create_task(stream_reply(ask(), address, out))
    while "lo" not in out.getvalue():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.cancelled == [gateway.requests[0].request_id]


async def test_ctrl_c_cancels_in_the_cluster_and_exits_130(
    served: tuple[Gateway, str], cedar_command: list[str]
) -> None:
    gateway, address = served
    gateway.endless = True
    command = [*cedar_command, "generate", "hi", "--address", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not gateway.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        out, err = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
    assert process.returncode == 130, err
    assert "Hello" in out
    assert err == "cedar: interrupted\n"
    assert gateway.cancelled == [gateway.requests[0].request_id]


async def test_a_conversation_file_grows_by_both_sides(served: tuple[Gateway, str], tmp_path: Path) -> None:
    gateway, address = served
    talk, image = tmp_path / "talk.json", tmp_path / "cat.png"
    image.write_bytes(b"not really a png")
    command = [sys.executable, "-m", "cedar.ops.cli", "generate", "what?", "--image", str(image)]
    command += ["--conversation", str(talk), "--address", address, "--seed", "5", "--max-tokens", "9"]
    for _ in range(2):
        finished = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr
        assert "40 prompt tokens" in finished.stderr
    roles = [message.role for message in gateway.requests[1].conversation.messages]
    assert roles == ["user", "assistant", "user"]
    assert gateway.requests[1].conversation.messages[0].content[0].image == b"not really a png"
    assert gateway.requests[0].sampling.seed == 5
    assert gateway.requests[0].sampling.max_tokens == 9
    assert len(json.loads(talk.read_text())) == 4


def test_a_reply_without_an_end_counts_as_failed() -> None:
    assert Reply("x").failed
    assert Reply("x").summary() == "[no end was received]"


def test_conversation_parts_keep_their_order() -> None:
    message = conversation_message([Turn("user", (b"image", "text", b"image 2"))], thinking=True)
    kinds = [part.WhichOneof("part") for part in message.messages[0].content]
    assert kinds == ["image", "text", "image"]
    assert message.thinking
