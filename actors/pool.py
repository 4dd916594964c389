"""Who owns which page and which window slot of one worker's memory. Pure bookkeeping: no torch, no clock.

A page slot is *free*, *leased* (by one or more requests), or *cached*: sealed under its page key, leased by
nobody, and evictable in least-recently-used order. A sealed page is shared by every request whose chain
holds its key. Every reuse of a slot raises its generation, so a reference that outlived its lease is found
(``BooksError``) instead of reading another request's bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cedar.actors.errors import BooksError


class PageRef(NamedTuple):
    """A page slot as leased: valid until released."""

    slot: int
    generation: int


class PageLease(NamedTuple):
    """One page of a reservation; ``held``: it is sealed already and must not be written."""

    ref: PageRef
    held: bool


class PagePool:
    """Page slots ``0 .. total-1`` of one memory."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total={total}: at least 1 page")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._generations = [0] * total
        self._leases = [0] * total
        self._keys: list[bytes | None] = [None] * total
        self._by_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Sealed pages that nobody leases; they are given up when room is needed."""
        return len(self._cached)

    @property
    def leased(self) -> int:
        """Slots that at least one request holds."""
        return self.total - len(self._free) - len(self._cached)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading pages of a chain are held here."""
        for count, key in enumerate(keys):
            if key not in self._by_key:
                return count
        return len(keys)

    def holds(self, key: bytes) -> bool:
        """Whether a sealed page with this key is here."""
        return key in self._by_key

    def reserve(self, keys: Sequence[bytes | None]) -> list[PageLease] | None:
        """Lease one page for each entry, all or nothing; None when there is no room.

        An entry with a key that is held shares that page; every other entry gets a fresh slot, for which
        cached pages outside this reservation are evicted, oldest first.
        """
        shared = [self._by_key.get(key) if key is not None else None for key in keys]
        distinct = {slot for slot in shared if slot is not None}
        evictable = len(self._cached) - sum(1 for slot in distinct if slot in self._cached)
        if sum(1 for slot in shared if slot is None) > len(self._free) + evictable:
            return None
        for kept in distinct:
            self._cached.pop(kept, None)
        leases = []
        for slot in shared:
            taken = self._take() if slot is None else slot
            self._leases[taken] += 1
            leases.append(PageLease(PageRef(taken, self._generations[taken]), slot is not None))
        return leases

    def seal(self, ref: PageRef, key: bytes) -> bool:
        """Name a leased page, which is complete and never written again.

        False when another slot holds this key already: that copy stays the shared one, and this one goes
        back to the free slots when its lease ends.
        """
        self.check(ref)
        if self._keys[ref.slot] is not None:
            raise BooksError(f"page slot {ref.slot} is sealed twice")
        if key in self._by_key:
            return False
        self._keys[ref.slot] = key
        self._by_key[key] = ref.slot
        return True

    def release(self, refs: Sequence[PageRef]) -> None:
        """End one lease of each page. Later pages of a chain become the first to be evicted."""
        for ref in reversed(refs):
            self.check(ref)
            self._leases[ref.slot] -= 1
            if self._leases[ref.slot] == 0:
                if self._keys[ref.slot] is None:
                    self._free.append(ref.slot)
                else:
                    self._cached[ref.slot] = None

    def check(self, ref: PageRef) -> None:
        """BooksError unless ``ref`` is a lease that has not ended."""
        if self._generations[ref.slot] != ref.generation or self._leases[ref.slot] < 1:
            raise BooksError(
                f"page slot {ref.slot}: lease of generation {ref.generation} has ended "
                f"(now generation {self._generations[ref.slot]}, {self._leases[ref.slot]} leases)"
            )

    def drop_cached(self) -> int:
        """Give up every page that nobody leases; returns how many."""
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return count

    def check_integrity(self) -> None:
        """BooksError unless every slot is one of free, cached and leased, and every key names its page."""
        free, cached = set(self._free), set(self._cached)
        leased = {slot for slot, count in enumerate(self._leases) if count > 0}
        problems = [
            ("a slot is free twice", len(free) != len(self._free)),
            ("free, cached and leased overlap", bool(free & cached or free & leased or cached & leased)),
            ("free + cached + leased != total", len(free) + len(cached) + len(leased) != self.total),
            ("a negative lease count", any(count < 0 for count in self._leases)),
            ("a free slot has a key", any(self._keys[slot] is not None for slot in free)),
            ("a cached slot has no key", any(self._keys[slot] is None for slot in cached)),
            ("keys and slots differ", {k: s for s, k in enumerate(self._keys) if k} != self._by_key),
        ]
        failed = [name for name, wrong in problems if wrong]
        if failed:
            raise BooksError(f"page pool: {'; '.join(failed)}")

    def _take(self) -> int:
        slot = self._free.pop() if self._free else self._evict()
        self._generations[slot] += 1
        return slot

    def _evict(self) -> int:
        slot, _ = self._cached.popitem(last=False)
        key = self._keys[slot]
        if key is None:
            raise BooksError(f"cached page slot {slot} has no key")
        del self._by_key[key]
        self._keys[slot] = None
        self.evictions += 1
        return slot


class SlotRef(NamedTuple):
    """A window slot as leased: valid until released."""

    slot: int
    generation: int


class SlotPool:
    """Slots for window rings and compressor tails: one a request, never shared, nothing kept after it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total={total}: at least 1 slot")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._generations = [0] * total
        self._taken: set[int] = set()

    @property
    def leased(self) -> int:
        """Slots in use."""
        return len(self._taken)

    def reserve(self) -> SlotRef | None:
        """Lease a slot; None when all are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._generations[slot] += 1
        self._taken.add(slot)
        return SlotRef(slot, self._generations[slot])

    def check(self, ref: SlotRef) -> None:
        """BooksError unless ``ref`` is a lease that has not ended."""
        if ref.slot not in self._taken or self._generations[ref.slot] != ref.generation:
            raise BooksError(f"window slot {ref.slot}: lease of generation {ref.generation} has ended")

    def release(self, ref: SlotRef) -> None:
        """End the lease."""
        self.check(ref)
        self._taken.remove(ref.slot)
        self._free.append(ref.slot)

    def check_integrity(self) -> None:
        """BooksError unless every slot is exactly one of free and leased."""
        if sorted([*self._free, *self._taken]) != list(range(self.total)):
            raise BooksError(
                f"slot pool: {len(self._free)} free and {len(self._taken)} leased of {self.total}"
            )
