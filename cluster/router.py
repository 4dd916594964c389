"""Picks workers: locality first, load as the tie-break, fair among equals. Pure.

A *score* is made of comparable numbers, so that the choice can be read off a table:
workers that are draining, suspected, excluded or of another model are left out; the one that holds
most leading pages of the prompt wins, unless it is so much busier than the least busy one that
waiting costs more than computing; equals take turns.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cedar.cluster.directory import View, Worker


@dataclass(frozen=True, kw_only=True)
class RoutingPolicy:
    """``slack_requests``: a local worker may have this many requests more than the least busy one."""

    slack_requests: int = 4


@dataclass(frozen=True)
class Candidate:
    """A worker as routing sees it. ``pages``: leading pages of this prompt it held last. ``picked``: turn
    number of its last pick."""

    worker: Worker
    pages: int
    requests: int
    full: bool
    picked: int


def candidates(
    view: View,
    stage: str,
    *,
    pages: Mapping[str, int],
    in_flight: Mapping[str, int],
    picked: Mapping[str, int],
    excluded: Collection[tuple[str, int]] = (),
    fingerprint: bytes = b"",
    needed_pages: int = 0,
) -> list[Candidate]:
    """Workers that may be asked. ``in_flight``: requests this gateway has there now, by address.

    A heartbeat's load lags behind what was just sent; the larger of both is taken. ``excluded`` holds
    (address, incarnation) that just failed: a restarted process on the same port may be asked again.
    """
    found = []
    for worker in view.stage(stage):
        if (worker.address, worker.incarnation) in excluded:
            continue
        if fingerprint and worker.fingerprint and worker.fingerprint != fingerprint:
            continue
        if needed_pages and 0 < worker.load.pages_total < needed_pages:
            continue
        load = worker.load
        full = 0 < load.slots_total <= max(load.slots_leased, in_flight.get(worker.address, 0))
        requests = max(load.requests, in_flight.get(worker.address, 0))
        found.append(
            Candidate(worker, pages.get(worker.address, 0), requests, full, picked.get(worker.address, -1))
        )
    return found


def choose(found: Sequence[Candidate], policy: RoutingPolicy) -> Candidate | None:
    """The best candidate, None when there is none."""
    if not found:
        return None
    least = min(c.requests for c in found)
    room = any(not c.full for c in found)

    def rank(c: Candidate) -> tuple[bool, int, int, int, str]:
        local = 0 if c.requests > least + policy.slack_requests else c.pages
        return (c.full and room, -local, c.requests, c.picked, c.worker.address)

    return min(found, key=rank)


def choose_by_hash(
    view: View, stage: str, key: bytes, excluded: Collection[tuple[str, int]] = ()
) -> Worker | None:
    """Rendezvous hashing: the same key goes to the same worker, and few keys move when workers come or go."""
    ranked = sorted(
        (w for w in view.stage(stage) if (w.address, w.incarnation) not in excluded),
        key=lambda w: hashlib.sha256(key + w.address.encode()).digest(),
    )
    return ranked[0] if ranked else None


class Affinity:
    """Which workers held a page last, by page key; bounded, least recently used out first.

    A hint only: a wrong entry costs a transfer, never a wrong answer.
    """

    def __init__(self, limit_pages: int = 1 << 16) -> None:
        self._limit = limit_pages
        self._holders: OrderedDict[bytes, OrderedDict[str, None]] = OrderedDict()

    def record(self, page_keys: Sequence[bytes], address: str, holders: int = 4) -> None:
        """``address`` now holds these pages. Keeps the last ``holders`` workers of a page."""
        for key in page_keys:
            known = self._holders.setdefault(key, OrderedDict())
            known[address] = None
            known.move_to_end(address)
            while len(known) > holders:
                known.popitem(last=False)
            self._holders.move_to_end(key)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def leading(self, page_keys: Sequence[bytes]) -> dict[str, int]:
        """Leading pages of the chain that each worker held, by address; workers without any are absent."""
        if not page_keys:
            return {}
        counts = dict.fromkeys(self._holders.get(page_keys[0], ()), 1)
        alive = set(counts)
        for depth, key in enumerate(page_keys[1:], start=2):
            alive &= self._holders.get(key, OrderedDict()).keys()
            if not alive:
                break
            counts.update(dict.fromkeys(alive, depth))
        return counts

    def forget(self, address: str) -> None:
        """A worker is gone."""
        for known in self._holders.values():
            known.pop(address, None)

    def __len__(self) -> int:
        return len(self._holders)
