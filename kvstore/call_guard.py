"""The one place where the node's errors become gRPC statuses.

| error                        | status             |                                       |
|------------------------------|--------------------|---------------------------------------|
| InvalidRequest, FrameError   | INVALID_ARGUMENT   | the field, its value, the limit        |
| CorruptValue in a put        | INVALID_ARGUMENT   | which check failed                     |
| Busy, Refused                | RESOURCE_EXHAUSTED | ``retry-after-ms`` in trailing metadata |
| NotHeld                      | NOT_FOUND          |                                       |
| StoreClosed                  | UNAVAILABLE        | the node is stopping                   |
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
from cedar.kvstore.admission import Busy
from cedar.kvstore.errors import CorruptValue, InvalidRequest, NotHeld, Refused, StoreClosed
from google.protobuf.message import DecodeError

RETRY_AFTER: Final = "retry-after-ms"
_CAUGHT: Final = (InvalidRequest, CorruptValue, DecodeError, Busy, Refused, StoreClosed, NotHeld)


def guarded(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A unary method whose errors end the call with the right status."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except _CAUGHT as error:
            await _abort(self, context, error)

    return call


def guarded_stream(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """The same for a method that streams its answers."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except _CAUGHT as error:
            await _abort(self, context, error)

    return call


async def _abort(service: Any, context: Any, error: Exception) -> NoReturn:
    if isinstance(error, (Busy, Refused)):
        service.counters.add("store_requests_busy")
        delay_ms = str(max(int(error.retry_after_s * 1000), 1))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((RETRY_AFTER, delay_ms),))
    if isinstance(error, NotHeld):
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error.args[0]))
    if isinstance(error, StoreClosed):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    service.counters.add("store_requests_invalid")
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error) or type(error).__name__)
    raise AssertionError("abort returned")
