"""What is put, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PutItem:
    """A verified value to store under ``key``; ``page_index`` is its place in the chain.

    ``used_s``: store time of its last use, for a page carried forward; None: now.
    """

    key: bytes
    value: bytes | memoryview
    page_index: int = 0
    tenant: bytes = b""
    used_s: float | None = None


@dataclass
class PutCounts:
    """Outcome of a put, in pages; ``reason`` says why some were refused.

    Reasons of the tier: full, disk, queue, closed. Of the client: unavailable, timeout, busy, invalid.
    """

    stored: int = 0
    present: int = 0
    conflicts: int = 0
    refused: int = 0
    reason: str = ""
    retry_after_s: float = 0.0

    def add(self, other: PutCounts) -> None:
        """Sum up."""
        self.stored += other.stored
        self.present += other.present
        self.conflicts += other.conflicts
        self.refused += other.refused
        self.reason = self.reason or other.reason
        self.retry_after_s = max(self.retry_after_s, other.retry_after_s)
