"""Whom to ask for a list when nobody on the last one answers."""

from __future__ import annotations

from itertools import pairwise

from cedar.kvstore.earlier_nodes import ASKED_AT_ONCE, MAX_PAUSE_S, REMEMBERED, EarlierNodes
from cedar.kvstore.members import Member, MemberList


def of(epoch: int, *names: str, port: int = 1) -> MemberList:
    return MemberList(epoch, tuple(Member(name, f"{name}:{port}") for name in names))


def names(members: list[Member]) -> list[str]:
    return [member.node_id for member in members]


def test_those_seen_last_come_first_and_who_is_listed_does_not() -> None:
    nodes = EarlierNodes()
    for members in (of(1, "a", "b"), of(2, "b", "c"), of(3, "c")):
        nodes.listed(members)
    assert names(nodes.to_ask(of(3, "c"), 0.0)) == ["b", "a"]


def test_nobody_is_asked_who_was_never_listed_or_is_still() -> None:
    nodes = EarlierNodes()
    assert nodes.to_ask(of(0), 0.0) == []
    nodes.listed(of(1, "a"))
    assert nodes.to_ask(of(1, "a"), 0.0) == []


def test_pauses_double_up_to_a_limit_and_a_new_list_ends_them() -> None:
    nodes = EarlierNodes()
    nodes.listed(of(1, "a"))
    nodes.listed(of(2))
    now_s, asked_s = 0.0, []
    while now_s < 60:
        if nodes.to_ask(of(2), now_s):
            asked_s.append(now_s)
        now_s += 0.25
    pauses = [later - earlier for earlier, later in pairwise(asked_s)]
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == MAX_PAUSE_S
    nodes.listed(of(3))
    assert names(nodes.to_ask(of(3), now_s)) == ["a"]


def test_a_node_that_moved_is_asked_where_it_was_last() -> None:
    nodes = EarlierNodes()
    nodes.listed(of(1, "a"))
    nodes.listed(of(2, "a", port=2))
    nodes.listed(of(3))
    assert [member.address for member in nodes.to_ask(of(3), 0.0)] == ["a:2"]


def test_few_are_asked_and_few_remembered_however_many_come_and_go() -> None:
    nodes = EarlierNodes()
    for epoch in range(500):
        nodes.listed(of(epoch + 1, f"n{epoch}"))
    assert len(nodes.known) == REMEMBERED
    nodes.listed(of(501))
    assert names(nodes.to_ask(of(501), 0.0)) == [f"n{499 - i}" for i in range(ASKED_AT_ONCE)]
    many = of(502, *(f"m{i}" for i in range(2 * REMEMBERED)))
    nodes.listed(many)
    assert len(nodes.known) == 2 * REMEMBERED, "a list is known as a whole"
