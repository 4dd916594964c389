"""What can go wrong in a stage, by whose fault it is, and the status each kind becomes on the wire.

Four kinds: the caller's fault (``InvalidRequest``, ``Duplicate``, ``NotFound``, ``OutOfRange``), unavailable
(``Busy``, ``Unavailable``, ``Mismatch``, ``DeadlinePassed``: try elsewhere or later), corrupt (``Corrupt``:
discard and compute again) and bug (``BooksError``: the worker turns unhealthy and is replaced).
"""

from __future__ import annotations

from typing import ClassVar


class StageError(Exception):
    """A request ends with this. ``stage``: who caused it (encoder, prefill, decode), "" for this worker."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, stage: str = "", retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.retry_after_ms = retry_after_ms


class InvalidRequest(StageError, ValueError):
    """The caller's fault: says the field, its value (unless it is None: not given) and the limit."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = "" if value is None else f"={value!r}"
        super().__init__(f"{field}{shown if len(shown) <= 201 else shown[:198] + '...'}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class NotFound(StageError):
    """No such request or image features here (never known, ended, or expired)."""

    code = "NOT_FOUND"


class Duplicate(StageError):
    """A request with this id is alive here."""

    code = "ALREADY_EXISTS"


class OutOfRange(StageError):
    """Tokens below the first one that this worker generated were asked for."""

    code = "OUT_OF_RANGE"


class Busy(StageError):
    """No room now; ``retry_after_ms`` says when to try again."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(StageError):
    """Draining, unreachable, or a stream that broke: try elsewhere."""

    code = "UNAVAILABLE"


class Mismatch(StageError):
    """Another model, another incarnation, or other state groups than the peer's: the caller's view is old."""

    code = "FAILED_PRECONDITION"


class DeadlinePassed(StageError):
    """A wait reached its deadline."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(StageError):
    """The request was cancelled while its handoff was under way."""

    code = "CANCELLED"


class Corrupt(StageError):
    """Bytes that are not what their checksum, key or header promises. Never used, always discarded."""

    code = "DATA_LOSS"


class BooksError(StageError):
    """A bug: pages, slots or tokens do not add up. The worker turns unhealthy."""

    code = "INTERNAL"


class ConfigError(ValueError):
    """A worker cannot start as configured: names the field, its value and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class PortInUse(ConfigError):
    """Another process listens on the configured port."""
