"""A thin client of the Generation service. gRPC only, no Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

import grpc
from cedar.kvstore.rpc import ServiceStub, channel_options
from cedar.v1 import generation_pb2 as pb

GENERATION = pb.DESCRIPTOR.services_by_name["Generation"]
MESSAGE_BYTES = 256 << 20


class GenerationClient:
    """``address``: "host:port" of a gateway. Raises ``grpc.aio.AioRpcError`` with the gateway's status."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> GenerationClient:
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options(MESSAGE_BYTES))
        self._stub = ServiceStub(self._channel, GENERATION)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer as it comes. Leaving the loop early cancels the request."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def cancel(self, request_id: str) -> bool:
        """End a request; when this returns it holds nothing any more. False when there is none of this id."""
        answer = await self._stub.Cancel(pb.CancelRequest(request_id=request_id), metadata=self._metadata)
        return bool(answer.found)

    async def get_model(self) -> pb.GetModelResponse:
        """What is served."""
        answer: pb.GetModelResponse = await self._stub.GetModel(pb.GetModelRequest(), metadata=self._metadata)
        return answer
