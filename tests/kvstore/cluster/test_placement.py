"""Placement: few pages move, weights are honoured, every process agrees."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter

import pytest
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import Member, MemberList
from cedar.kvstore.placement import Placement, Run, by_holder, run_of, runs_of
from hypothesis import given, settings
from hypothesis import strategies as st

TAGS = [hashlib.sha256(b"run %d" % i).digest()[:4] for i in range(4000)]
names = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=9, unique=True)


@settings(max_examples=25, deadline=None)
@given(names, st.text(min_size=13, max_size=14))
def test_a_join_moves_only_what_the_new_node_wins(nodes: list[str], newcomer: str) -> None:
    before = Placement(dict.fromkeys(nodes, 1.0))
    after = Placement(dict.fromkeys([*nodes, newcomer], 1.0))
    moved = 0
    for tag in TAGS[:1000]:
        old, new = before.ranked(tag), after.ranked(tag)
        assert tuple(name for name in new if name != newcomer) == old, "the others keep their order"
        moved += new[0] == newcomer
    expected = 1000 / (len(nodes) + 1)
    assert abs(moved - expected) < 6 * (expected * (1 - 1 / (len(nodes) + 1))) ** 0.5 + 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.25, 8.0), min_size=2, max_size=6))
def test_weights_are_honoured(weights: list[float]) -> None:
    placement = Placement({f"node-{i}": weight for i, weight in enumerate(weights)})
    owned = Counter(placement.ranked(tag)[0] for tag in TAGS)
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        sigma = (share * (1 - share) * len(TAGS)) ** 0.5
        assert abs(owned[f"node-{i}"] - share * len(TAGS)) < 6 * sigma + 1


@settings(max_examples=20, deadline=None)
@given(st.floats(1.1, 4.0))
def test_more_weight_only_takes_and_never_gives(factor: float) -> None:
    before = Placement({"a": 1.0, "b": 1.0, "c": 1.0})
    after = Placement({"a": factor, "b": 1.0, "c": 1.0})
    for tag in TAGS[:500]:
        old, new = before.ranked(tag)[0], after.ranked(tag)[0]
        assert new in (old, "a")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_must_be_numbers_above_zero(weight: float) -> None:
    with pytest.raises(InvalidRequest, match="weight"):
        Placement({"a": weight})


def test_every_process_agrees() -> None:
    code = (
        "from cedar.kvstore.placement import Placement\n"
        "p = Placement({'a': 1.0, 'b': 2.0, 'c': 0.5})\n"
        "print(' '.join(p.ranked(bytes([i, 7, 7, 7]))[0] for i in range(64)))"
    )
    here = Placement({"c": 0.5, "a": 1.0, "b": 2.0})  # in another order
    expected = " ".join(here.ranked(bytes([i, 7, 7, 7]))[0] for i in range(64))
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == expected


def test_golden_ranking() -> None:
    """Changing the score moves every page of every store: these orders must stay."""
    placement = Placement({"a": 1.0, "b": 1.0, "c": 1.0})
    got = ["".join(placement.ranked(bytes([i, 0, 0, 0]))) for i in range(8)]
    assert got == GOLDEN


GOLDEN = ["acb", "acb", "cba", "abc", "abc", "cba", "bac", "cba"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=4, max_size=4), st.integers(1, 20)), max_size=12))
def test_runs_cover_the_keys_in_order(parts: list[tuple[bytes, int]]) -> None:
    keys = [tag + bytes([i]) * 28 for tag, count in parts for i in range(count)]
    runs = runs_of(keys)
    assert [p for run in runs for p in range(run.start, run.end)] == list(range(len(keys)))
    assert all(run_of(keys[p]) == run.tag for run in runs for p in range(run.start, run.end))
    odd = list(range(1, len(keys), 2))
    assert [p for run in runs_of(keys, odd) for p in range(run.start, run.end)] == odd
    groups = by_holder(runs, lambda tag: tag[0] % 3)
    assert sorted(p for positions in groups.values() for p in positions) == list(range(len(keys)))
    assert all(positions == sorted(positions) for positions in groups.values())


def test_runs_of_nothing() -> None:
    assert runs_of([]) == []
    assert runs_of([b"a" * 32]) == [Run(b"aaaa", 0, 1)]


@settings(max_examples=40, deadline=None)
@given(st.permutations(list(range(6))), st.integers(2, 6), st.sets(st.integers(0, 5), max_size=2))
def test_whoever_owned_a_run_before_is_asked(order: list[int], count: int, draining: set[int]) -> None:
    """Nodes join one after another; for each run the owner knows every node that ever was its owner."""
    members = MemberList(0)
    owners: dict[bytes, list[str]] = {tag: [] for tag in TAGS[:60]}
    for node in order[:count]:
        members = members.with_member(Member(f"n{node}", f"h:{node}", joined_epoch=members.epoch + 1))
        for tag in owners:
            owner = members.owner(tag)
            assert owner is not None
            if owner.node_id not in owners[tag]:
                owners[tag].append(owner.node_id)
    for node in draining & set(order[: count - 1]):
        member = members.find(f"n{node}")
        assert member is not None
        members = members.with_member(
            Member(member.node_id, member.address, state="draining", joined_epoch=member.joined_epoch)
        )
    for tag, earlier in owners.items():
        owner = members.owner(tag)
        assert owner is not None
        asked = {m.node_id for m in members.earlier_owners(tag, owner.node_id)} | {owner.node_id}
        active = [m for m in members.members if m.state == "active"]
        if len(active) == len(members.members):
            assert set(earlier) <= asked
        else:  # the owner before it drained, and whoever was the owner before that one joined
            assert earlier[-1] in asked
        assert members.earlier_owners(tag, "someone else") == []
