"""The Prefill side of one handoff: a gRPC stream on which pages leave while later chunks compute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from cedar.actors.errors import Busy, Corrupt, DeadlinePassed, StageError, Unavailable
from cedar.actors.handoff import pages_frame, state_frames, token_frame
from cedar.actors.status import from_parts, from_status
from cedar.kvstore.frames import FRAME_BYTES, FrameKind, decode_frame, encode_frame
from cedar.kvstore.rpc import ServiceStub
from cedar.v1 import stages_pb2
from cedar.v1.common_pb2 import TokenEvent
from cedar.v1.stages_pb2 import HandoffDone, HandoffFailed, HandoffHeader, HandoffReply

T = TypeVar("T")

_DECODE = "decode"


class HandoffStream:
    """One request's way to its Decode worker, as an async context. Every wait ends after ``patience_s``.

    ``offer`` names pages that are complete; a task of its own seals and sends them, so that neither the
    network's thread nor the prompt's chunks wait for the peer. Leaving the context before ``finish`` tells
    Decode why, and Decode frees what it reserved.
    """

    def __init__(self, channel: grpc.aio.Channel, *, patience_s: float, heartbeat_s: float) -> None:
        self._stub = ServiceStub(channel, stages_pb2.DESCRIPTOR.services_by_name["Decode"])
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._call: Any = None
        self._queue: asyncio.Queue[tuple[int, Callable[[], bytes]] | None] = asyncio.Queue()
        self._sender: asyncio.Task[None] | None = None
        self._done = False
        self.missing: set[int] = set()
        self.pages_sent = 0
        self.page_bytes_sent = 0
        self.state_bytes_sent = 0

    async def __aenter__(self) -> HandoffStream:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._close(str(error) if isinstance(error, StageError) else "it broke off")

    async def open(self, header: HandoffHeader, timeout_s: float | None) -> None:
        """Ask for room. Busy when Decode has none, Mismatch when it is not the one meant, else Unavailable.

        ``timeout_s`` bounds the whole handoff: the time the request has left.
        """
        self._call = self._stub.Handoff(timeout=timeout_s)
        await self._wait(self._call.write(encode_frame(FrameKind.HANDOFF_HEADER, header)))
        reply = HandoffReply.FromString((await self._read(FrameKind.HANDOFF_REPLY)).meta)
        if not reply.accepted:
            words = f"decode has no room: {reply.refusal}"
            raise Busy(words, stage=_DECODE, retry_after_ms=reply.retry_after_ms)
        self.missing = set(reply.missing_pages)
        self._sender = asyncio.create_task(self._send())

    def offer(self, index: int, seal: Callable[[], bytes]) -> None:
        """Page ``index`` is complete; ``seal`` gives its stored value. Not sent if Decode holds the page."""
        if index in self.missing:
            self._queue.put_nowait((index, seal))

    def check(self) -> None:
        """Raise what broke the stream, if something did: no use in computing further."""
        if self._sender is not None and self._sender.done():
            self._sender.result()

    async def finish(self, record: bytes, tokens: int, first: TokenEvent) -> None:
        """Send what is left, the state record and the first token; wait until Decode has verified it all."""
        if self._sender is None:
            raise StageError("finish() before open()")
        self._queue.put_nowait(None)
        await self._sender
        for frame in state_frames(record, tokens):
            await self._wait(self._call.write(frame))
        self.state_bytes_sent = len(record)
        await self._wait(self._call.write(token_frame(first)))
        await self._wait(self._call.done_writing())
        done = HandoffDone.FromString((await self._read(FrameKind.HANDOFF_DONE)).meta)
        self._done = True
        if done.pages_received != self.pages_sent:
            raise Corrupt(f"decode received {done.pages_received} pages of {self.pages_sent}", stage=_DECODE)

    def stop_sending(self) -> None:
        """Touch no page any more: from here on the pages may be given away."""
        if self._sender is not None:
            self._sender.cancel()

    async def _close(self, reason: str) -> None:
        self.stop_sending()
        if self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender])
        if self._sender is not None and not self._sender.cancelled():
            self._sender.exception()  # whoever cares has had it from check() or finish()
        if self._call is None or self._done:
            return
        with suppress(StageError):
            frame = encode_frame(FrameKind.HANDOFF_FAILED, HandoffFailed(reason=reason))
            await self._wait(self._call.write(frame), within_s=1.0)
            await self._wait(self._call.done_writing(), within_s=1.0)
            await self._wait(self._call.read(), within_s=1.0)
        self._call.cancel()

    async def _send(self) -> None:
        ended = False
        while not ended:
            batch: list[tuple[int, bytes]] = []
            size = 0
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    entry = await self._queue.get()
            except TimeoutError:
                await self._wait(self._call.write(pages_frame([])))
                continue
            while True:
                if entry is None:
                    ended = True
                    break
                batch.append((entry[0], entry[1]()))
                size += len(batch[-1][1])
                if size >= FRAME_BYTES or self._queue.empty():
                    break
                entry = self._queue.get_nowait()
            if batch:
                await self._wait(self._call.write(pages_frame(batch)))
                self.pages_sent += len(batch)
                self.page_bytes_sent += size

    async def _read(self, kind: FrameKind) -> Any:
        message = await self._wait(self._call.read())
        if not isinstance(message, bytes):  # grpc.aio.EOF
            await self._raise_status()
        return decode_frame(message, expect=kind)

    async def _wait(self, step: Awaitable[T], within_s: float | None = None) -> T:
        seconds = self._patience_s if within_s is None else within_s
        try:
            async with asyncio.timeout(seconds):
                return await step
        except TimeoutError:
            raise DeadlinePassed(f"decode did not move for {seconds:g} s", stage=_DECODE) from None
        except grpc.aio.AioRpcError as error:
            raise from_status(error, _DECODE) from None
        except Exception as error:  # what gRPC raises on a call that has ended differs with the moment
            if not self._call.done():
                raise Unavailable(f"decode: {error}", stage=_DECODE) from None
            await self._raise_status()
            raise

    async def _raise_status(self) -> None:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            raise Unavailable("decode ended the handoff early", stage=_DECODE)
        raise from_parts(code, await self._call.details(), await self._call.trailing_metadata(), _DECODE)
