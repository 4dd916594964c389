from __future__ import annotations

import random
from typing import Any

import pytest
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import WindowConfig
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.machine import memory_bytes
from cedar.kvstore.stats import Counters
from cedar.kvstore.window_tier import NAME_BYTES, WindowName, WindowTier
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

PAGE, OTHER = b"p" * 32, b"o" * 32


def make(clock: ManualClock, **changes: Any) -> WindowTier:
    return WindowTier(WindowConfig(**{"budget_bytes": 10_000, "ttl_s": 60} | changes), clock, Counters())


def name(tokens: int, page: bytes = PAGE, digest: int = 0) -> WindowName:
    return WindowName(page, tokens, bytes([digest]) * 32)


def put(tier: WindowTier, which: WindowName, record: bytes) -> bool:
    if not tier.promise(len(record)):
        return False
    tier.put(which, record, b"c" * 16)
    tier.check_integrity()
    return True


def test_put_get_delete_are_accounted_to_the_byte(clock: ManualClock):
    tier = make(clock)
    assert put(tier, name(5), b"x" * 100)
    assert tier.used_bytes == 100 + NAME_BYTES
    assert tier.get(name(5)) == (b"x" * 100, b"c" * 16)
    assert tier.get(name(6)) is None
    assert put(tier, name(5), b"y" * 50)  # replaced
    assert tier.used_bytes == 50 + NAME_BYTES
    assert tier.delete(name(5))
    assert not tier.delete(name(5))
    assert tier.used_bytes == 0
    tier.check_integrity()


def test_names_come_longest_first_for_the_pages_asked_for(clock: ManualClock):
    tier = make(clock)
    for tokens, page in ((5, PAGE), (9, PAGE), (7, OTHER), (8, b"z" * 32)):
        assert put(tier, name(tokens, page), b"r")
    assert put(tier, name(9, PAGE, digest=1), b"r")
    assert [n.tokens for n in tier.names([PAGE, OTHER], 10)] == [9, 9, 7, 5]
    assert [n.tokens for n in tier.names([PAGE, OTHER], 3)] == [9, 9, 7]
    assert tier.names([b"?" * 32], 10) == []


def test_records_live_a_ttl_from_their_last_use(clock: ManualClock):
    tier = make(clock)
    assert put(tier, name(1), b"a")
    assert put(tier, name(2), b"b")
    clock.advance(40)
    assert tier.get(name(1)) is not None
    clock.step_wall(-86_400)  # of no interest
    clock.advance(40)
    assert tier.get(name(2)) is None
    assert [n.tokens for n in tier.names([PAGE], 10)] == [1]
    assert tier.get(name(1)) is not None
    tier.expire()
    assert len(tier) == 1
    tier.check_integrity()
    clock.advance(60)
    tier.expire()
    assert tier.used_bytes == 0
    tier.check_integrity()


def test_least_recently_used_make_room(clock: ManualClock):
    tier = make(clock, budget_bytes=3 * (1000 + NAME_BYTES))
    for tokens in (1, 2, 3):
        assert put(tier, name(tokens), bytes(1000))
    assert tier.get(name(1)) is not None
    assert put(tier, name(4), bytes(1000))
    assert [n.tokens for n in tier.names([PAGE], 9)] == [4, 3, 1]
    assert put(tier, name(5), bytes(2256))
    assert [n.tokens for n in tier.names([PAGE], 9)] == [5, 4]


def test_arriving_records_hold_their_room(clock: ManualClock):
    tier = make(clock, budget_bytes=2 * (1000 + NAME_BYTES))
    assert put(tier, name(1), bytes(1000))
    assert tier.promise(1000)
    assert tier.promise(1000)
    assert len(tier) == 0  # made room
    assert not tier.promise(1000)  # promised room is not taken back
    tier.put(name(2), bytes(1000), b"c" * 16)
    tier.retract(1000)
    assert tier.promised_bytes == 0
    tier.check_integrity()
    assert put(tier, name(3), bytes(1000))


def test_what_can_never_fit_is_refused_and_costs_nobody(clock: ManualClock):
    tier = make(clock, max_record_bytes=5000)
    assert put(tier, name(1), bytes(1000))
    assert not tier.promise(5001)
    assert not make(clock, budget_bytes=1000).promise(1000)
    assert len(tier) == 1


def test_one_page_key_holds_a_bounded_number(clock: ManualClock):
    tier = make(clock, max_records_per_key=3)
    for tokens in range(1, 6):
        assert put(tier, name(tokens), b"r")
    assert [n.tokens for n in tier.names([PAGE], 9)] == [5, 4, 3]
    one = make(clock, max_records_per_key=1)
    for tokens in range(1, 4):
        assert put(one, name(tokens), b"r")
    assert [n.tokens for n in one.names([PAGE], 9)] == [3]


def test_the_default_budget_is_a_tenth_of_memory():
    assert WindowConfig().budget_bytes == memory_bytes() // 10


def test_impossible_configurations_are_named():
    with pytest.raises(InvalidRequest, match="ttl_s"):
        WindowConfig(ttl_s=0)


class WindowMachine(RuleBasedStateMachine):
    """Against a model: a record is as put or gone, never another; budget and time are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.tier = make(self.clock, budget_bytes=5000, max_records_per_key=4)
        self.model: dict[WindowName, tuple[bytes, float]] = {}

    names = st.builds(name, st.integers(1, 5), st.sampled_from([PAGE, OTHER]), st.integers(0, 1))

    @rule(which=names, size=st.integers(1, 3000), seed=st.integers(0, 99))
    def put(self, which: WindowName, size: int, seed: int) -> None:
        record = random.Random(seed).randbytes(size)
        if put(self.tier, which, record):
            self.model[which] = (record, self.clock.monotonic_s())

    @rule(which=names)
    def get(self, which: WindowName) -> None:
        found = self.tier.get(which)
        if found is not None:
            record, used_s = self.model[which]
            assert found[0] == record
            assert self.clock.monotonic_s() < used_s + 60
            self.model[which] = (record, self.clock.monotonic_s())

    @rule(which=names)
    def delete(self, which: WindowName) -> None:
        self.tier.delete(which)
        self.model.pop(which, None)
        assert self.tier.get(which) is None

    @rule(seconds=st.floats(0, 50))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.tier.expire()

    @invariant()
    def books_balance(self) -> None:
        self.tier.check_integrity()
        assert set(self.tier.names([PAGE, OTHER], 99)) <= set(self.model)


TestWindowMachine = WindowMachine.TestCase
