"""Counters with fixed names, safe to add to from any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

COUNTERS: Final = {
    "store_match_requests": "MatchPrefix calls answered",
    "store_match_keys": "page keys asked for in them",
    "store_match_pages": "pages reported as held in them",
    "store_pages_read": "pages served",
    "store_read_bytes": "bytes of values served",
    "store_page_misses": "reads that ended at a page which is not held",
    "store_page_expired": "reads that ended at a page past its time",
    "store_values_corrupt": "stored values that failed verification",
    "store_segments_damaged": "segments whose index was not whole, or that could not be opened",
    "store_pages_found_by_record": "pages found at a start although their index did not have them",
    "store_puts_stored": "pages stored",
    "store_puts_present": "pages put again with the same bytes",
    "store_puts_conflict": "pages put again with other bytes; the first stays",
    "store_puts_refused": "pages refused, for any reason",
    "store_puts_refused_full": "of these: capacity or free disk",
    "store_puts_refused_disk": "of these: a commit failed, or one failed moments ago",
    "store_puts_refused_quota": "of these: the tenant was over its quota",
    "store_puts_refused_queue": "of these: the commit queue stayed full",
    "store_put_bytes": "bytes of values stored",
    "store_commits": "group commits",
    "store_commit_values": "values in them",
    "store_commit_seconds": "time from the first write of each to the end of its sync; they overlap",
    "store_commit_failures": "commits that the disk failed",
    "store_pages_carried": "pages copied forward into a younger segment",
    "store_pages_evicted_expired": "pages dropped past their time",
    "store_pages_evicted_capacity": "pages dropped for room",
    "store_segments_dropped": "segments dropped",
    "store_pages_evicted_quota": "pages dropped because their tenant was over its quota",
    "store_erase_failures": "segments in which removed values could not be taken off the disk",
    "store_dead_readers": "reader slots of dead processes found in an index",
    "store_maintenance_failures": "maintenance rounds that ended in an error",
    "store_window_puts": "window records stored",
    "store_window_hits": "window records served",
    "store_window_misses": "window records asked for and not held",
    "store_window_refused": "window records refused",
    "store_window_evicted_ttl": "window records dropped past their time",
    "store_window_evicted_budget": "window records dropped for room",
    "store_purges": "purges of tenants carried out",
    "store_copies_refused_purged": "pages from other nodes refused because their tenant was purged since",
    "store_pages_copied_out": "pages copied to a second node because they are hit often",
    "store_pages_moved_in": "pages that came from their earlier owner in the background",
    "store_pages_read_through": "pages fetched from another node because a client asked for them",
    "store_pages_sent_to_peers": "pages sent to other nodes, for whatever reason",
    "store_matches_read_through": "MatchPrefix calls that asked other nodes too",
    "store_peer_fetches": "fetches from other nodes",
    "store_peer_fetches_joined": "fetches that found an equal one under way and shared it",
    "store_peer_failures": "calls to other nodes that failed",
    "store_requests_busy": "calls refused because too many were in flight",
    "store_requests_invalid": "calls refused as invalid",
}


class Counters:
    """The counters of one node. An unknown name is a KeyError."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0.0)
        self._lock = threading.Lock()
        self.observer = Observer()

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def snapshot(self) -> dict[str, float]:
        """All counters by name."""
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True)
class PageUse:
    """A page that was served: whose, and how long ago it was stored."""

    tenant: bytes
    age_s: float


class Observer:
    """Told of single events of a node, for what sums do not say; this one does not listen. Any thread.

    ``tier`` is "ssd" or "window"; ``tenant`` its domain, empty where nobody knows it.
    """

    def looked_up(self, tier: str, tenant: bytes, asked: int, held: int, tokens: int | None = None) -> None:
        """``held`` of ``asked`` leading pages were found; for a window record, the position it is of."""

    def served(self, tier: str, uses: Sequence[PageUse], size: int, page_tokens: int = 0) -> None:
        """Pages of ``size`` bytes each were served."""

    def stored(self, tier: str, tenant: bytes, size: int, page_tokens: int = 0) -> None:
        """``size`` bytes were stored."""

    def evicted(self, tier: str, cause: str, pages: int, ttl_left_s: Sequence[float] = ()) -> None:
        """Pages were dropped, with so much of their time left."""

    def quarantined(self, reason: str) -> None:
        """A stored value failed verification."""

    def committed(self, values: int, seconds: float) -> None:
        """A group commit is on disk."""

    def refused(self, reason: str, pages: int) -> None:
        """Puts were refused."""
