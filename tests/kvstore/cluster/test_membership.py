"""Who is a member: the table of ``membership``, row by row."""

from __future__ import annotations

import pytest
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import Member, MemberList, from_json, from_proto, to_json, to_proto
from cedar.kvstore.membership import EPOCH_STEP, Membership, MembershipConfig

CONFIG = MembershipConfig(lease_s=10, flap_joins=3, flap_window_s=600, hold_s=300)


def holder(*nodes: str) -> Membership:
    membership = Membership(CONFIG, now_s=0)
    for node in nodes:
        assert membership.join(node, f"{node}:1", 1, 1.0, 0) is None
    return membership


def listed(membership: Membership) -> list[str]:
    return sorted(member.node_id for member in membership.list.members)


def test_each_join_is_a_new_epoch_and_a_repeated_one_is_not() -> None:
    membership = holder("a", "b")
    assert (listed(membership), membership.list.epoch) == (["a", "b"], 2)
    assert membership.join("a", "a:1", 1, 1.0, 1) is None
    assert membership.list.epoch == 2
    assert membership.join("a", "a:1", 2, 1.0, 1) is None, "its process was restarted"
    assert membership.list.epoch == 3
    member = membership.list.find("a")
    assert member is not None
    assert (member.incarnation, member.joined_epoch) == (2, 3)


def test_a_lease_that_runs_out() -> None:
    membership = holder("a", "b", "c")
    for now_s in (4, 8):
        assert membership.expire(now_s) == []
        assert membership.renew("a", 1, 0, now_s)
        assert membership.renew("b", 1, 0, now_s)
    assert membership.expire(11) == ["c"]
    assert (listed(membership), membership.list.epoch) == (["a", "b"], 4)
    assert not membership.renew("c", 1, 0, 12), "it must join again"
    assert not membership.renew("a", 7, 0, 12), "an older process of the same node"


def test_most_leases_at_once_are_a_fault_on_this_side() -> None:
    membership = holder("a", "b", "c")
    for now_s in (4, 8):
        membership.expire(now_s)
        membership.renew("a", 1, 0, now_s)
    assert membership.expire(12) == []
    assert listed(membership) == ["a", "b", "c"]


def test_most_nodes_are_dropped_once_they_stay_silent_while_another_is_heard() -> None:
    membership = holder("a", "b", "c")
    for now_s in range(4, 32, 4):
        assert membership.expire(now_s) == []
        membership.renew("a", 1, 0, now_s)
    assert membership.expire(32) == ["b", "c"]
    silent = holder("a", "b")
    for now_s in range(4, 100, 4):
        assert silent.expire(now_s) == [], "nobody is heard: the fault is on this side"


def test_a_holder_that_forgot_numbers_its_lists_apart() -> None:
    lists = []
    for own_number in (7, 9):
        membership = Membership(CONFIG, now_s=0, first_epoch=100, own_number=own_number)
        membership.join("a", f"a:{own_number}", 1, 1.0, 0)
        lists.append(membership.list)
    old, new = lists
    assert (old.epoch // EPOCH_STEP, new.epoch // EPOCH_STEP) == (100, 100)
    assert new.epoch > old.epoch, "whoever has the one takes the other"
    holder_of_old = Membership(CONFIG, old, now_s=0, own_number=7)
    assert not holder_of_old.renew("a", 1, 0, 1, epoch=new.epoch), "a node with a newer list must join"
    assert holder_of_old.join("a", "a:9", 1, 1.0, 1, new) is None
    assert holder_of_old.list == new
    assert holder_of_old.join("b", "b:1", 1, 1.0, 1) is None
    assert holder_of_old.list.epoch > new.epoch


def test_a_node_that_drains_may_join_as_what_it_is() -> None:
    membership = holder("a")
    assert membership.join("b", "b:1", 1, 1.0, 0, draining=True) is None
    member = membership.list.find("b")
    assert member is not None
    assert member.state == "draining"
    assert membership.unsettled() == 1
    membership.renew("a", 1, membership.list.epoch, 1)
    assert membership.released("b")


def test_the_list_says_on_how_many_nodes_hot_pages_live() -> None:
    membership = Membership(MembershipConfig(copies=3), now_s=0)
    membership.join("a", "a:1", 1, 1.0, 0)
    assert membership.list.copies == 3
    assert from_json(to_json(membership.list)) == membership.list
    assert from_proto(to_proto(membership.list)) == membership.list


def test_a_holder_that_was_stopped_does_not_blame_the_nodes() -> None:
    membership = holder("a", "b", "c")
    membership.expire(4)
    for node in ("a", "b", "c"):
        membership.renew(node, 1, 0, 4)
    assert membership.expire(500) == []
    assert membership.expire(504) == []
    assert membership.renew("a", 1, 0, 505)
    assert membership.renew("b", 1, 0, 505)
    assert membership.expire(508) == []
    assert membership.expire(511) == ["c"]


def test_flapping_is_damped() -> None:
    membership = holder("a", "b")
    for incarnation in (2, 3):
        assert membership.join("b", "b:1", incarnation, 1.0, 10 * incarnation) is None
    epoch = membership.list.epoch
    refusal = membership.join("b", "b:1", 4, 1.0, 40)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("flapping", 300)
    assert (listed(membership), membership.list.epoch) == (["a"], epoch + 1)
    again = membership.join("b", "b:1", 5, 1.0, 100)
    assert again is not None
    assert again.retry_after_s == 240
    assert membership.list.epoch == epoch + 1, "a node that is held out moves nothing"
    assert membership.join("b", "b:1", 5, 1.0, 341) is None
    assert listed(membership) == ["a", "b"]


def test_joins_far_apart_are_no_flapping() -> None:
    membership = holder("a")
    for incarnation in range(2, 12):
        assert membership.join("a", "a:1", incarnation, 1.0, incarnation * 301) is None


def test_a_duplicate_is_refused_while_the_first_lives() -> None:
    membership = holder("a", "b")
    refusal = membership.join("a", "elsewhere:1", 9, 1.0, 5)
    assert refusal is not None
    assert "a second node of that name" in refusal.reason
    assert membership.list.find("a") == Member("a", "a:1", 1, 1.0, "active", 1)
    assert membership.join("a", "elsewhere:1", 9, 1.0, 11) is None, "once the lease is over it has moved"


def test_draining_until_the_others_have_settled() -> None:
    membership = holder("a", "b", "c")
    membership.leave("b", 99, drain=True)
    assert membership.list.epoch == 3, "an older process cannot drain it"
    membership.leave("b", 1, drain=True)
    member = membership.list.find("b")
    assert member is not None
    assert member.state == "draining"
    epoch = membership.list.epoch
    assert not membership.released("b")
    membership.renew("a", 1, epoch, 1)
    membership.renew("c", 1, epoch - 1, 1)
    assert not membership.released("b")
    membership.renew("c", 1, epoch, 2)
    assert membership.released("b")
    membership.leave("b", 1, drain=False)
    assert listed(membership) == ["a", "c"]
    assert not membership.released("b"), "nobody takes over from a node that is not listed"


def test_a_holder_that_forgot_learns_from_the_nodes() -> None:
    known = holder("a", "b", "c").list.at_epoch(40)
    fresh = Membership(CONFIG, now_s=0)
    assert fresh.join("b", "b:1", 1, 1.0, 0, known) is None
    assert (listed(fresh), fresh.list.epoch) == (["a", "b", "c"], 40)
    assert fresh.renew("a", 1, 0, 1)
    assert fresh.join("b", "b:1", 2, 1.0, 2, known.at_epoch(3)) is None
    assert fresh.list.epoch == 41, "an older list is not taken over"


def test_lists_survive_their_forms() -> None:
    members = MemberList(7, (Member("a", "h:1", 5, 2.5, "draining", 3), Member("b", "h:2", joined_epoch=6)))
    assert from_proto(to_proto(members)) == members
    assert from_json(to_json(members)) == members
    assert from_json('{"epoch": 1, "members": [{"node_id": "x", "address": "h:1"}]}').epoch == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"epoch": 1}', '{"epoch": 1, "members": [{"node": "x"}]}', '{"epoch":"x","members":[]}'],
)
def test_text_that_is_no_list(text: str) -> None:
    with pytest.raises(InvalidRequest):
        from_json(text)


def test_nodes_need_names_of_their_own() -> None:
    with pytest.raises(InvalidRequest, match="differ"):
        MemberList(1, (Member("a", "h:1"), Member("a", "h:2")))
    with pytest.raises(InvalidRequest, match="node_id"):
        Member("", "h:1")
    with pytest.raises(InvalidRequest, match="weight"):
        Member("a", "h:1", weight=0)


def test_shares_follow_weights() -> None:
    members = MemberList(
        1, (Member("a", "h:1", weight=3), Member("b", "h:2"), Member("c", "h:3", state="draining"))
    )
    assert (members.share("a"), members.share("b"), members.share("c")) == (0.75, 0.25, 0.0)
