"""At most N calls of a kind in flight; the next one is refused at once, with a delay to retry after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Busy(Exception):
    """Too many calls in flight."""

    def __init__(self, kind: str, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{limit} {kind} calls are in flight, retry after {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Admission:
    """Counts the calls of one kind. Used on the event loop's thread alone."""

    def __init__(self, kind: str, limit: int, retry_after_s: float) -> None:
        self._kind = kind
        self._limit = limit
        self._retry_after_s = retry_after_s
        self.in_flight = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Be one of the calls in flight, or Busy."""
        if self.in_flight >= self._limit:
            raise Busy(self._kind, self._limit, self._retry_after_s)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
