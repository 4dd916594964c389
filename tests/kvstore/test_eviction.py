from __future__ import annotations

from cedar.kvstore.eviction import (
    PageFacts,
    SegmentFacts,
    TokenBucket,
    effective_capacity_bytes,
    expired_segments,
    in_last_quarter,
    pages_still_in_use,
    pages_worth_keeping,
    segments_to_evict,
)
from hypothesis import given
from hypothesis import strategies as st

segments = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100), st.booleans()), max_size=12).map(
    lambda rows: [SegmentFacts(n, size, age, open_) for n, (size, age, open_) in enumerate(rows)]
)


def test_capacity_shrinks_as_others_fill_the_disk():
    assert effective_capacity_bytes(100, usage_bytes=40, free_bytes=1000, reserve_bytes=10) == 100
    assert effective_capacity_bytes(100, usage_bytes=40, free_bytes=30, reserve_bytes=10) == 60
    assert effective_capacity_bytes(100, usage_bytes=40, free_bytes=0, reserve_bytes=10) == 30
    assert effective_capacity_bytes(100, usage_bytes=5, free_bytes=0, reserve_bytes=10) == 0


@given(segments, st.integers(0, 1200))
def test_eviction_stops_between_the_watermarks(facts: list[SegmentFacts], capacity: int):
    usage = sum(s.bytes for s in facts)
    victims = segments_to_evict(facts, usage_bytes=usage, capacity_bytes=capacity, high=0.9, low=0.6)
    closed = [s.number for s in facts if not s.open]
    assert victims == closed[: len(victims)]  # the oldest, never the open one
    if usage <= 0.9 * capacity:
        assert victims == []
    else:
        left = usage - sum(s.bytes for s in facts if s.number in victims)
        assert left <= 0.6 * capacity or victims == closed
        if victims:  # the last one was needed
            assert left + next(s.bytes for s in facts if s.number == victims[-1]) > 0.6 * capacity


@given(segments, st.integers(0, 200))
def test_only_closed_segments_past_their_time_expire(facts: list[SegmentFacts], now: int):
    expired = expired_segments(facts, now, 50)
    assert expired == [s.number for s in facts if not s.open and s.written_s + 50 <= now]


def page(name: str, put: float, used: float, index: int, size: int = 10) -> PageFacts:
    return PageFacts(name.encode(), size, put, used, index)


def test_the_hottest_are_kept_and_chains_lose_their_tails():
    pages = [page(f"hot{i}", 0, 9, i) for i in (2, 0, 3, 1)] + [page("warm", 0, 5, 0), page("cold", 0, 0, 0)]
    assert pages_worth_keeping(pages, 30) == [b"hot0", b"hot1", b"hot2"]
    assert pages_worth_keeping(pages, 1000)[-1] == b"warm"
    assert b"cold" not in pages_worth_keeping(pages, 1000)


@given(
    chains=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=5),
    budget=st.integers(0, 300),
)
def test_no_page_outlives_its_parent(chains: list[list[int]], budget: int):
    """A hit uses a chain from its head, so uses never grow along it."""
    pages, parents = [], {}
    for number, uses in enumerate(chains):
        for index, used in enumerate(sorted(uses, reverse=True)):
            pages.append(page(f"{number}.{index}", 0, used, index))
            if index:
                parents[f"{number}.{index}".encode()] = f"{number}.{index - 1}".encode()
    kept = set(pages_worth_keeping(pages, budget))
    assert len(kept) * 10 <= budget
    assert all(parents[key] in kept for key in kept if key in parents)


def test_pages_used_within_their_time_survive_an_expired_segment():
    pages = [page("old", 0, 1, 0), page("tail", 0, 60, 1), page("head", 0, 60, 0)]
    assert pages_still_in_use(pages, 100, 50) == [b"head", b"tail"]


def test_the_last_quarter():
    assert not in_last_quarter(0, 74.9, 100)
    assert in_last_quarter(0, 75, 100)


def test_a_token_bucket_lends_one_item_and_fills_at_its_rate():
    bucket = TokenBucket(10, 20, now_s=0)
    assert bucket.take(50, 0)
    assert not bucket.take(1, 1)
    assert not bucket.take(1, 3)
    assert bucket.take(10, 4)
    assert not bucket.take(1, 0)  # a clock that steps back gives nothing
    assert bucket.take(1, 1000)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 5)), max_size=50))
def test_a_token_bucket_keeps_its_rate(steps: list[tuple[int, float]]):
    bucket = TokenBucket(10, 20, now_s=0)
    now = taken = 0.0
    for amount, wait in steps:
        now += wait
        if bucket.take(amount, now):
            taken += amount
    assert taken <= 20 + 10 * now + 30
