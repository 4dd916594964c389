"""What to do when a stage call fails: a table, not code paths. Pure.

Rows are read top down; the first that fits decides. ``action``:

- ``fail``: tell the client, with this status;
- ``elsewhere``: give the request to another worker, this one excluded;
- ``wait``: everybody is busy: come back after the delay that the worker named;
- ``encode``: the image features are gone: encode again, then as ``elsewhere`` without excluding anyone;
- ``resume``: Decode died: submit prompt and tokens so far to another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpc import StatusCode

Action = Literal["fail", "elsewhere", "wait", "encode", "resume"]
Stage = Literal["encoder", "prefill", "decode"]

CALLER = frozenset({StatusCode.INVALID_ARGUMENT, StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A stage call that failed. ``called``: the stage that was called; ``blamed``: the one that caused it,
    if it said."""

    called: Stage
    code: StatusCode
    blamed: Stage | None = None
    retry_after_ms: int | None = None
    detail: str = ""

    @property
    def cause(self) -> Stage:
        """The stage to exclude."""
        return self.blamed or self.called


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do. ``exclude``: the stage whose worker is not asked again; ``suspect``: tell the directory
    too."""

    action: Action
    exclude: Stage | None = None
    suspect: bool = False
    delay_ms: int = 0
    status: StatusCode = StatusCode.INTERNAL


def plan(failure: Failure, *, attempts: int, max_attempts: int, streamed: bool, remaining_s: float) -> Plan:
    """``attempts``: made so far; ``streamed``: tokens have reached the client; ``remaining_s``: to the
    deadline."""
    code = failure.code
    if code in CALLER:
        return Plan(action="fail", status=code)
    if remaining_s <= 0:
        return Plan(action="fail", status=StatusCode.DEADLINE_EXCEEDED)
    if code is StatusCode.RESOURCE_EXHAUSTED:
        # Busy is not a failure: it uses no attempt, and ends with the deadline.
        delay = failure.retry_after_ms or 100
        if delay / 1000 >= remaining_s:
            return Plan(action="fail", status=StatusCode.RESOURCE_EXHAUSTED, delay_ms=delay)
        return Plan(action="wait", exclude=failure.cause, delay_ms=delay)
    if attempts >= max_attempts:
        return Plan(action="fail", status=_last_status(code))
    if code is StatusCode.NOT_FOUND and failure.cause == "encoder":
        return Plan(action="encode")
    gone = code in (StatusCode.UNAVAILABLE, StatusCode.FAILED_PRECONDITION)
    # A stage that reports its peer as unreachable may itself be the one cut off: only the caller's own view
    # suspects.
    suspect = gone and failure.blamed in (None, failure.called)
    action: Action = "resume" if failure.called == "decode" and streamed else "elsewhere"
    return Plan(action=action, exclude=failure.cause, suspect=suspect)


def _last_status(code: StatusCode) -> StatusCode:
    if code in (StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL, StatusCode.DATA_LOSS):
        return code
    return StatusCode.UNAVAILABLE
