"""Drives one Generation stream for the command line: prints as it comes, cancels when interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

import grpc
from cedar.v1 import common_pb2, generation_pb2

from .conversation_file import Turn
from .exits import CommandError, Exit
from .screen import emit_json, printable, seconds

if TYPE_CHECKING:
    from cedar.cluster.client import GenerationClient

CANCEL_TIMEOUT_S = 5.0
FAILED_REASONS = (common_pb2.FINISH_REASON_FAILED, common_pb2.FINISH_REASON_CANCELLED)


@dataclass
class Reply:
    """One answer. ``finished`` is None until the stream has ended."""

    request_id: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: generation_pb2.Finished | None = None

    @property
    def failed(self) -> bool:
        """Whether the request ended in a failure rather than an answer."""
        return self.finished is None or self.finished.reason in FAILED_REASONS

    def summary(self) -> str:
        """One line: tokens, where the prompt came from, times."""
        if self.finished is None:
            return "[no end was received]"
        sources, times = self.finished.sources, self.finished.times
        found = sources.hit_local_tokens + sources.hit_store_tokens + sources.state_tokens
        parts = [
            f"{sources.prompt_tokens} prompt tokens, {found} of them cached",
            f"{self.finished.completion_tokens} generated ({reason_name(self.finished.reason)})",
            f"first token {seconds(times.ttft_s)}",
        ]
        if self.finished.completion_tokens > 1 and times.decode_s > 0:  # not told of a stop string's end
            parts.append(f"{seconds(times.decode_s / (self.finished.completion_tokens - 1))} a token")
        if self.finished.retries:
            stages = "stage" if self.finished.retries == 1 else "stages"
            parts.append(f"{self.finished.retries} {stages} run again after a failure")
        return "[" + "; ".join(parts) + "]"


def reason_name(reason: common_pb2.FinishReason) -> str:
    """``stop``, ``length``, ..."""
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower().replace("_", " ")


def conversation_message(turns: Sequence[Turn], *, thinking: bool) -> generation_pb2.Conversation:
    """The wire form of a conversation."""
    messages = []
    for turn in turns:
        parts = [
            generation_pb2.ContentPart(text=part)
            if isinstance(part, str)
            else generation_pb2.ContentPart(image=part)
            for part in turn.content
        ]
        messages.append(generation_pb2.Message(role=turn.role, content=parts))
    return generation_pb2.Conversation(messages=messages, thinking=thinking)


async def stream_reply(
    request: generation_pb2.GenerateRequest,
    address: str,
    out: TextIO,
    *,
    as_json: bool = False,
    timeout_s: float | None = None,
    api_key: str | None = None,
) -> Reply:
    """Send ``request`` to ``address`` and print the answer to ``out`` as it comes.

    When the task is cancelled (Ctrl-C under ``asyncio.run``) the request is cancelled in the cluster
    before this returns. gRPC failures become ``CommandError`` with the exit code of their kind.
    """
    from cedar.cluster.client import GenerationClient

    request.request_id = request.request_id or uuid.uuid4().hex
    reply = Reply(request.request_id)
    async with GenerationClient(address, api_key) as client:
        try:
            async for event in events(client, request, timeout_s):
                _take(event, reply, out, as_json=as_json)
        except asyncio.CancelledError:
            with contextlib.suppress(grpc.RpcError, asyncio.TimeoutError):
                await asyncio.wait_for(client.cancel(request.request_id), CANCEL_TIMEOUT_S)
            raise
        except grpc.aio.AioRpcError as error:
            raise explained(error, address) from None
        finally:
            if reply.text and not as_json:
                out.write("\n")
                out.flush()
    return reply


async def events(
    client: GenerationClient, request: generation_pb2.GenerateRequest, timeout_s: float | None
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """The stream of one request, closed when the caller leaves it."""
    stream = client.generate(request, timeout_s=timeout_s)
    async with contextlib.aclosing(stream):
        async for event in stream:
            yield event


def _take(event: generation_pb2.GenerateResponse, reply: Reply, out: TextIO, *, as_json: bool) -> None:
    kind = event.WhichOneof("event")
    if kind == "delta":
        reply.ids.append(event.delta.token.id)
        reply.text += event.delta.text
        if not as_json:
            out.write(printable(event.delta.text))
            out.flush()
    elif kind == "finished":
        reply.finished = event.finished
    if as_json and kind is not None:
        from google.protobuf.json_format import MessageToDict

        record = MessageToDict(
            getattr(event, kind), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        emit_json({"event": kind, **record}, out)


def explained(error: grpc.aio.AioRpcError, address: str) -> CommandError:
    """What a failed call means to the user of a command."""
    code = error.code()
    detail = error.details() or code.name
    if code is grpc.StatusCode.UNAVAILABLE:
        return CommandError(f"{address} does not answer: {detail}", Exit.UNREACHABLE)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CommandError(f"the cluster is full: {detail}", Exit.BUSY)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CommandError(f"the deadline passed: {detail}", Exit.DEADLINE)
    if code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.OUT_OF_RANGE,
    ):
        return CommandError(detail, Exit.USAGE)
    return CommandError(f"{code.name}: {detail}", Exit.FAILED)
