"""What can go wrong in the store, by whose fault it is."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """The caller's fault: says the field, the value and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class FrameError(InvalidRequest):
    """Bytes that are not a frame, or frames that do not make up a record."""


class CorruptValue(Exception):
    """A stored value that is not what its key promises: a miss, never an answer.

    ``reason`` is one of: short, magic, version, flags, length, key, fingerprint, tokens, checksum.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"corrupt value: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason


class NotInMemory(Exception):
    """A read that must not wait would have to: the caller reads again where waiting is allowed."""


class StoreLocked(RuntimeError):
    """Another process owns the store's directory."""


class NotHeld(KeyError):
    """What was asked for is not held here."""


class NodeUnreachable(RuntimeError):
    """A store node does not answer an operator, or not as asked."""


class StoreClosed(RuntimeError):
    """The tier has been closed."""


class Refused(RuntimeError):
    """A put that the store will not take now: full, over a limit, or its disk failed. Gets go on."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(f"refused: {reason}; retry after {retry_after_s:g} s")
        self.reason = reason
        self.retry_after_s = retry_after_s
