"""What goes when: pure decisions over plain facts. ``maintenance`` carries them out.

| situation                                | decision                                                 |
|------------------------------------------|----------------------------------------------------------|
| segment written a TTL ago                | drop it                                                  |
| ... but some of its pages used since     | carry those forward first, within the rate limit         |
| hit in the last quarter of its life      | carry the page forward, within the rate limit            |
| usage above the high watermark           | drop the oldest closed segments, until below the low one |
| ... but some of its pages were hit       | carry the hottest forward first, a quarter of it at most |
| a tenant above its quota                 | drop its own coldest pages, until below 85 % of it       |
| disk fuller than the reserve             | capacity shrinks by as much, so the same rule applies    |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

CARRY_SHARE: Final = 0.25
"""Share of an evicted segment that may be carried forward, and the last share of life in which hits carry."""


@dataclass(frozen=True)
class SegmentFacts:
    """A segment as eviction sees it. ``written_s``: store time of its youngest row."""

    number: int
    bytes: int
    written_s: float
    open: bool


@dataclass(frozen=True)
class PageFacts:
    """A page as eviction sees it."""

    key: bytes
    size: int
    put_s: float
    used_s: float
    page_index: int
    ttl_s: float | None = None  # of its tenant; None: the tier's


def effective_capacity_bytes(
    capacity_bytes: int, *, usage_bytes: int, free_bytes: int, reserve_bytes: int
) -> int:
    """Bytes the tier may take: what is configured, or less when others fill the disk."""
    return max(min(capacity_bytes, usage_bytes + free_bytes - reserve_bytes), 0)


def expired_segments(segments: Iterable[SegmentFacts], now_s: float, ttl_s: float) -> list[int]:
    """Closed segments whose every page was written at least a TTL ago, oldest first."""
    past = [s for s in segments if not s.open and s.written_s + ttl_s <= now_s]
    return [s.number for s in sorted(past, key=lambda s: s.number)]


def segments_to_evict(
    segments: Iterable[SegmentFacts], *, usage_bytes: int, capacity_bytes: int, high: float, low: float
) -> list[int]:
    """Oldest closed segments to drop: none below the high watermark, else until below the low one."""
    if usage_bytes <= high * capacity_bytes:
        return []
    victims = []
    for segment in sorted(segments, key=lambda s: s.number):
        if usage_bytes <= low * capacity_bytes:
            break
        if not segment.open:
            victims.append(segment.number)
            usage_bytes -= segment.bytes
    return victims


def pages_still_in_use(pages: Iterable[PageFacts], now_s: float, ttl_s: float) -> list[bytes]:
    """Pages of an expired segment that were used within the TTL: heads of chains first."""
    used = [page for page in pages if page.used_s + (page.ttl_s or ttl_s) > now_s]
    return [page.key for page in sorted(used, key=lambda p: (-p.used_s, p.page_index))]


def pages_worth_keeping(pages: Sequence[PageFacts], budget_bytes: int) -> list[bytes]:
    """Pages of an evicted segment to carry forward: those that were hit, the most recent first.

    A hit uses every page from the head of its chain on, so no page of a chain was used after its parent was;
    with the shallower page first among equals, what does not fit the budget is cut from the tails.
    """
    kept = []
    for page in sorted(pages, key=lambda p: (-p.used_s, p.page_index)):
        if page.used_s > page.put_s and page.size <= budget_bytes:
            kept.append(page.key)
            budget_bytes -= page.size
    return kept


def in_last_quarter(written_s: float, now_s: float, ttl_s: float) -> bool:
    """Whether a segment last written at ``written_s`` has at most a quarter of its life left."""
    return now_s >= written_s + (1 - CARRY_SHARE) * ttl_s


def coldest_pages(pages: Iterable[PageFacts], excess_bytes: float) -> list[bytes]:
    """Pages of a tenant over its quota that go: the longest unused first, of a chain the tail first."""
    victims = []
    for page in sorted(pages, key=lambda p: (p.used_s, -p.page_index)):
        if excess_bytes <= 0:
            break
        victims.append(page.key)
        excess_bytes -= page.size
    return victims


class TokenBucket:
    """A rate limit in bytes a second that saves up at most ``burst_bytes``."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, now_s: float) -> None:
        self._rate = bytes_per_s
        self._burst = burst_bytes
        self._level = burst_bytes
        self._at_s = now_s

    def take(self, amount: int, now_s: float) -> bool:
        """Take ``amount`` if the bucket is not in debt; one item may be larger than what is left."""
        self._level = min(self._level + max(now_s - self._at_s, 0.0) * self._rate, self._burst)
        self._at_s = max(self._at_s, now_s)
        if self._level <= 0:
            return False
        self._level -= amount
        return True
