"""The gateway's calls to the stages, and how their failures are read.

Every failure becomes a ``StageFailure``, whose ``Failure`` the retry table judges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from cedar.cluster.directory import Worker
from cedar.cluster.retry import Failure, Stage
from cedar.kvstore.rpc import ServiceStub
from cedar.v1 import stages_pb2 as pb

ENCODE = pb.DESCRIPTOR.services_by_name["Encode"]
PREFILL = pb.DESCRIPTOR.services_by_name["Prefill"]
DECODE = pb.DESCRIPTOR.services_by_name["Decode"]
WORKER = pb.DESCRIPTOR.services_by_name["Worker"]
STAGES = ("encoder", "prefill", "decode")
CANCEL_TIMEOUT_S = 2.0
END_OF_STREAM: Any = grpc.aio.EOF


class StageFailure(Exception):
    """A stage call failed. ``worker``: the one that was called."""

    def __init__(self, failure: Failure, worker: Worker) -> None:
        super().__init__(f"{failure.called} at {worker.address}: {failure.code.name}: {failure.detail}")
        self.failure = failure
        self.worker = worker


def read_failure(called: Stage, error: grpc.aio.AioRpcError) -> Failure:
    """What a status says: its code, who is to blame (``cedar-stage``), when to come back
    (``retry-after-ms``)."""
    entries: Any = error.trailing_metadata() or ()
    metadata = {str(key): value for key, value in entries}
    blamed = metadata.get("cedar-stage")
    delay = metadata.get("retry-after-ms")
    return Failure(
        called=called,
        code=error.code(),
        blamed=cast(Stage, blamed) if blamed in STAGES else None,
        retry_after_ms=int(delay) if isinstance(delay, str) and delay.isdigit() else None,
        detail=error.details() or "",
    )


def broken(
    called: Stage, worker: Worker, detail: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
) -> StageFailure:
    """A call that went wrong without a status of its own."""
    return StageFailure(Failure(called=called, code=code, detail=detail), worker)


async def encode(
    channel: grpc.aio.Channel,
    worker: Worker,
    image: bytes,
    content_hash: bytes,
    *,
    tenant: bytes,
    timeout_s: float,
) -> pb.EncodeResponse:
    """Run the vision tower on one image. The features stay at the worker, for this tenant alone."""
    request = pb.EncodeRequest(image=image, content_hash=content_hash, tenant=tenant)
    try:
        response: pb.EncodeResponse = await ServiceStub(channel, ENCODE).Encode(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise StageFailure(read_failure("encoder", error), worker) from error
    return response


class PrefillCall:
    """One running Prefill. ``admitted()`` and ``done()`` may be awaited in any order, or not at all;
    ``cancel()`` frees it."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: Worker, request: pb.PrefillRequest, timeout_s: float
    ) -> None:
        self.worker = worker
        self._call = ServiceStub(channel, PREFILL).Prefill(request, timeout=timeout_s)
        self._admitted: asyncio.Future[pb.PrefillAdmitted] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name="prefill-call")

    async def admitted(self) -> pb.PrefillAdmitted:
        """The prompt has room and its sources are final. Raises ``StageFailure``."""
        waited: list[asyncio.Future[Any]] = [self._admitted, self._reader]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._admitted.done():
            return self._admitted.result()
        await self.done()
        raise broken("prefill", self.worker, "ended without admitting the prompt", grpc.StatusCode.INTERNAL)

    async def done(self) -> pb.PrefillDone:
        """The prompt has been handed over. Raises ``StageFailure``."""
        return await asyncio.shield(self._reader)

    async def failure(self, within_s: float) -> StageFailure | None:
        """How it failed, if it fails within this time."""
        await asyncio.wait({self._reader}, timeout=within_s)
        if self._reader.done() and not self._reader.cancelled():
            error = self._reader.exception()
            return error if isinstance(error, StageFailure) else None
        return None

    async def cancel(self) -> None:
        """Stop it, if it still runs. The worker frees pages and slot when it sees this."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> pb.PrefillDone:
        try:
            async for event in self._call:
                if event.HasField("admitted"):
                    if not self._admitted.done():
                        self._admitted.set_result(event.admitted)
                elif event.HasField("done"):
                    done: pb.PrefillDone = event.done
                    return done
        except grpc.aio.AioRpcError as error:
            raise StageFailure(read_failure("prefill", error), self.worker) from error
        except asyncio.CancelledError:
            reader = asyncio.current_task()
            if reader is None or reader.cancelling():
                raise
            # gRPC cancels the calls of a channel that is closed, as those to workers no longer known are.
            raise broken("prefill", self.worker, "the channel was closed") from None
        raise broken("prefill", self.worker, "ended without a result")


async def decode_stream(
    channel: grpc.aio.Channel,
    worker: Worker,
    request_id: str,
    from_index: int,
    first_s: float,
    silence_s: float,
) -> AsyncGenerator[pb.StreamResponse, None]:
    """Tokens from ``from_index`` on, then one end. ``first_s``: patience for the first answer,
    ``silence_s`` for
    the others. Raises ``StageFailure`` when the stream breaks; the call is closed on every way out."""
    call: Any = ServiceStub(channel, DECODE).Stream(
        pb.StreamRequest(request_id=request_id, from_index=from_index)
    )
    patience_s = first_s
    try:
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    response = await call.read()
            except TimeoutError:
                raise broken("decode", worker, f"silent for {patience_s:g} s") from None
            if response is END_OF_STREAM:
                raise broken("decode", worker, "the stream ended without its last message")
            yield response
            if response.HasField("end"):
                return
            patience_s = silence_s
    except grpc.aio.AioRpcError as error:
        raise StageFailure(read_failure("decode", error), worker) from error
    finally:
        call.cancel()


async def cancel_decode(channel: grpc.aio.Channel, request_id: str) -> None:
    """Free what the Decode worker holds for a request. A worker that cannot be reached frees it by its
    lease."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await ServiceStub(channel, DECODE).Cancel(
            pb.DecodeCancelRequest(request_id=request_id), timeout=CANCEL_TIMEOUT_S
        )
