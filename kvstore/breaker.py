"""A circuit breaker: after several failures in a row a store is left alone for a while, longer each time."""

from __future__ import annotations


class Breaker:
    """Counts outcomes; time is an argument."""

    def __init__(self, *, failures: int, open_s: float, max_open_s: float) -> None:
        self._limit = failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._failures = 0
        self._open_s = open_s
        self._until_s = float("-inf")

    def allows(self, now_s: float) -> bool:
        """Whether a call may be tried: always while closed; while open only once the pause is over."""
        return now_s >= self._until_s

    def succeeded(self) -> None:
        """A call went well: start over."""
        self._failures = 0
        self._open_s = self._first_open_s
        self._until_s = float("-inf")

    def failed(self, now_s: float) -> None:
        """A call failed. The probe after a pause needs to fail only once to open it again."""
        self._failures += 1
        if self._failures >= self._limit:
            self._until_s = now_s + self._open_s
            self._open_s = min(self._open_s * 2, self._max_open_s)
