"""Page and slot books, against a model that forgets nothing."""

from __future__ import annotations

from typing import Any

import pytest
from cedar.actors.errors import BooksError
from cedar.actors.pool import PageLease, PagePool, PageRef, SlotPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

TOTAL = 7
KEYS = [bytes([i]) * 4 for i in range(10)]


class Pages(RuleBasedStateMachine):
    """Requests lease pages by key or fresh, seal them, and leave; the model tracks who holds which bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.requests: list[list[PageLease]] = []
        self.sealed: dict[PageRef, bytes] = {}
        self.ended: list[PageRef] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4), fresh=st.integers(0, 5))
    def reserve(self, keys: list[bytes], fresh: int) -> None:
        before = (self.pool.free, self.pool.cached, self.pool.leased)
        held = [key for key in keys if self.pool.holds(key)]
        leases = self.pool.reserve([*keys, *[None] * fresh])
        if leases is None:
            assert (self.pool.free, self.pool.cached, self.pool.leased) == before
            return
        assert [lease.held for lease in leases] == [key in held for key in keys] + [False] * fresh
        for key, lease in zip(keys, leases, strict=False):
            if lease.held:
                assert self.sealed[lease.ref] == key
        fresh_slots = [lease.ref for lease in leases if not lease.held]
        assert len(set(fresh_slots)) == len(fresh_slots)
        in_use = {lease.ref.slot for request in self.requests for lease in request}
        assert not in_use & {ref.slot for ref in fresh_slots}
        self.requests.append(leases)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def seal(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.requests))
        open_pages = [lease.ref for lease in request if not lease.held and lease.ref not in self.sealed]
        if not open_pages:
            return
        ref, key = open_pages[0], data.draw(st.sampled_from(KEYS))
        taken = not self.pool.holds(key)
        assert self.pool.seal(ref, key) is taken
        if taken:
            self.sealed[ref] = key

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        request = self.requests.pop(index)
        self.pool.release([lease.ref for lease in request])
        still = {lease.ref for other in self.requests for lease in other}
        self.ended += [lease.ref for lease in request if lease.ref not in still]

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()
        assert self.pool.cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free + self.pool.cached + self.pool.leased == TOTAL
        leased = {lease.ref.slot for request in self.requests for lease in request}
        assert self.pool.leased == len(leased)

    @invariant()
    def ended_leases_are_found(self) -> None:
        live = {lease.ref for request in self.requests for lease in request}
        for ref in self.ended:
            if ref not in live:
                with pytest.raises(BooksError):
                    self.pool.check(ref)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_cached_pages_leave_oldest_chain_last_page_first() -> None:
    pool = PagePool(3)
    chain = pool.reserve([None, None, None])
    assert chain is not None
    for lease, key in zip(chain, KEYS, strict=False):
        assert pool.seal(lease.ref, key)
    pool.release([lease.ref for lease in chain])
    assert pool.leading(KEYS) == 3
    fresh = pool.reserve([None])
    assert fresh is not None
    assert pool.leading(KEYS) == 2, "the end of a chain is of no use without its beginning"


def test_hits_are_never_evicted_for_their_own_reservation() -> None:
    pool = PagePool(2)
    first = pool.reserve([None, None])
    assert first is not None
    pool.seal(first[0].ref, KEYS[0])
    pool.seal(first[1].ref, KEYS[1])
    pool.release([lease.ref for lease in first])
    assert pool.reserve([KEYS[0], KEYS[1], None]) is None
    assert pool.cached == 2
    again = pool.reserve([KEYS[0], None])
    assert again is not None
    assert again[0].held
    assert not again[1].held
    assert pool.evictions == 1


def test_a_second_release_and_a_second_seal_are_bugs() -> None:
    pool = PagePool(2)
    leases = pool.reserve([None])
    assert leases is not None
    pool.seal(leases[0].ref, KEYS[0])
    with pytest.raises(BooksError, match="sealed twice"):
        pool.seal(leases[0].ref, KEYS[1])
    pool.release([leases[0].ref])
    with pytest.raises(BooksError, match="has ended"):
        pool.release([leases[0].ref])


def test_slots_are_leased_once_and_known_by_generation() -> None:
    pool = SlotPool(2)
    first, second = pool.reserve(), pool.reserve()
    assert first is not None
    assert second is not None
    assert pool.reserve() is None
    pool.release(first)
    third = pool.reserve()
    assert third is not None
    assert third.slot == first.slot
    with pytest.raises(BooksError, match="has ended"):
        pool.release(first)
    pool.check_integrity()
    assert pool.leased == 2
