"""Errors to gRPC statuses and back. The one place that knows both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NoReturn

import grpc
from cedar.actors.errors import (
    Busy,
    Cancelled,
    Corrupt,
    DeadlinePassed,
    Duplicate,
    Mismatch,
    NotFound,
    OutOfRange,
    StageError,
    Unavailable,
)
from cedar.kvstore.errors import CorruptValue, FrameError
from cedar.kvstore.errors import InvalidRequest as BadField

_log = logging.getLogger(__name__)

RETRY_KEY: Final = "retry-after-ms"
STAGE_KEY: Final = "cedar-stage"

Context = grpc.aio.ServicerContext[Any, Any]

_BY_CODE: Final[dict[str, type[StageError]]] = {
    kind.code: kind
    for kind in (
        NotFound, Duplicate, OutOfRange, Busy, Unavailable, Mismatch, DeadlinePassed, Cancelled, Corrupt
    )
}  # fmt: skip


class PeerRefused(StageError):
    """A peer called this worker's request invalid; the caller's fault is passed on with the peer's words."""

    code = "INVALID_ARGUMENT"


def as_stage_error(error: BaseException) -> StageError | None:
    """The stage error that an exception of a neighbouring package stands for, or None for a bug."""
    if isinstance(error, StageError):
        return error
    if isinstance(error, CorruptValue | FrameError):
        return Corrupt(str(error))
    if isinstance(error, BadField):
        return PeerRefused(str(error))
    from cedar.model.errors import InputError

    return PeerRefused(str(error)) if isinstance(error, InputError) else None


def from_status(error: grpc.aio.AioRpcError, stage: str) -> StageError:
    """What a failed call to a worker of ``stage`` means to the request that made it."""
    return from_parts(error.code(), error.details(), error.trailing_metadata(), stage)


def from_parts(code: grpc.StatusCode, details: str | None, metadata: Any, stage: str) -> StageError:
    """The same, from the parts of a status."""
    words = f"{stage}: {details or code.name}"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return PeerRefused(words, stage=stage)
    retry = next((int(value) for key, value in metadata or () if key == RETRY_KEY), None)
    return _BY_CODE.get(code.name, Unavailable)(words, stage=stage, retry_after_ms=retry)


async def abort(context: Context, error: StageError, stage: str) -> NoReturn:
    """End the call with the error's status; ``stage`` is this worker's, unless the error names another."""
    metadata = [(STAGE_KEY, error.stage or stage)]
    if error.retry_after_ms is not None:
        metadata.append((RETRY_KEY, str(error.retry_after_ms)))
    await context.abort(grpc.StatusCode[error.code], str(error), tuple(metadata))
    raise AssertionError("abort returned")


class Answering:
    """Around a handler's body: every way out of it is one status. ``on_bug`` hears of what nobody foresaw."""

    def __init__(self, context: Context, stage: str, on_bug: Callable[[BaseException], None]) -> None:
        self._context = context
        self._stage = stage
        self._on_bug = on_bug

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        known = as_stage_error(error)
        if known is None or known.code == "INTERNAL":
            _log.error("a request ended with a bug", exc_info=error)
            self._on_bug(error)
            known = known or StageError(f"internal error: {type(error).__name__}: {error}")
        await abort(self._context, known, self._stage)
