from collections import Counter

import pytest
from cedar.cluster.directory import Load, View, Worker
from cedar.cluster.router import Affinity, RoutingPolicy, candidates, choose, choose_by_hash


def prefill(name: str, requests: int = 0, **more: object) -> Worker:
    load = more.pop("load", None) or Load(active=requests)
    return Worker(stage="prefill", address=name, incarnation=1, load=load, **more)  # type: ignore[arg-type]


def pick(workers: list[Worker], **facts: object) -> str | None:
    view = View(1, 1, tuple(workers), facts.pop("suspected", frozenset()))  # type: ignore[arg-type]
    facts = {"pages": {}, "in_flight": {}, "picked": {}, **facts}
    best = choose(candidates(view, "prefill", **facts), RoutingPolicy(slack_requests=4))  # type: ignore[arg-type]
    return best.worker.address if best else None


@pytest.mark.parametrize(
    ("workers", "facts", "expected"),
    [
        pytest.param([], {}, None, id="nobody"),
        pytest.param([prefill("a", 2), prefill("b", 1)], {}, "b", id="least busy"),
        pytest.param([prefill("a", 2), prefill("b", 1)], {"pages": {"a": 3}}, "a", id="locality first"),
        pytest.param([prefill("a"), prefill("b")], {"pages": {"a": 3, "b": 4}}, "b", id="most leading pages"),
        pytest.param(
            [prefill("a", 6), prefill("b", 1)], {"pages": {"a": 3}}, "b", id="too busy for locality"
        ),
        pytest.param(
            [prefill("a", 5), prefill("b", 1)], {"pages": {"a": 3}}, "a", id="busy within the slack"
        ),
        pytest.param([prefill("a"), prefill("b")], {"picked": {"a": 7, "b": 5}}, "b", id="equals take turns"),
        pytest.param([prefill("a"), prefill("b")], {"picked": {"a": 7}}, "b", id="never picked goes first"),
        pytest.param([prefill("a"), prefill("b")], {"excluded": {("a", 1)}}, "b", id="just failed"),
        pytest.param(
            [prefill("a"), prefill("b")], {"excluded": {("a", 0)}}, "a", id="an earlier incarnation failed"
        ),
        pytest.param([prefill("a")], {"suspected": frozenset({("a", 1)})}, None, id="suspected"),
        pytest.param([prefill("a", draining=True)], {}, None, id="draining"),
        pytest.param(
            [prefill("a"), prefill("b")],
            {"in_flight": {"a": 3}},
            "b",
            id="own requests count before heartbeats",
        ),
        pytest.param(
            [prefill("a", fingerprint=b"old"), prefill("b", 9, fingerprint=b"new")],
            {"fingerprint": b"new"},
            "b",
            id="never another model",
        ),
        pytest.param(
            [prefill("a", load=Load(slots_total=1, slots_leased=1)), prefill("b", 1)],
            {"pages": {"a": 9}},
            "b",
            id="full",
        ),
        pytest.param(
            [prefill("a", load=Load(slots_total=1, slots_leased=1))], {}, "a", id="full is better than nobody"
        ),
        pytest.param(
            [prefill("a", load=Load(pages_total=3)), prefill("b", 9, load=Load(pages_total=9))],
            {"needed_pages": 4},
            "b",
            id="can never fit",
        ),
    ],
)
def test_choice(workers: list[Worker], facts: dict[str, object], expected: str | None) -> None:
    assert pick(workers, **facts) == expected


def test_equals_share_evenly() -> None:
    workers = [prefill(name) for name in "abc"]
    picked: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for turn in range(30):
        name = pick(workers, picked=picked)
        assert name is not None
        picked[name] = turn
        seen[name] += 1
    assert set(seen.values()) == {10}


def test_images_stay_with_their_encoder_when_others_leave() -> None:
    encoders = tuple(Worker(stage="encoder", address=f"e{i}", incarnation=1) for i in range(4))
    keys = [bytes([i]) * 32 for i in range(64)]
    full = View(1, 1, encoders)
    before = {key: choose_by_hash(full, "encoder", key) for key in keys}
    gone = encoders[2]
    after = {key: choose_by_hash(View(2, 1, encoders[:2] + encoders[3:]), "encoder", key) for key in keys}
    assert all(before[key] == after[key] for key in keys if before[key] != gone)
    assert {w.address for w in before.values() if w} == {"e0", "e1", "e2", "e3"}
    first = before[keys[0]]
    assert first is not None
    assert choose_by_hash(full, "encoder", keys[0], {(first.address, 1)}) != first
    assert choose_by_hash(View(), "encoder", keys[0]) is None


def test_affinity_counts_leading_pages_only() -> None:
    affinity = Affinity()
    affinity.record([b"1", b"2", b"3"], "a")
    affinity.record([b"1", b"x", b"3"], "b")
    assert affinity.leading([b"1", b"2", b"3", b"4"]) == {"a": 3, "b": 1}
    assert affinity.leading([b"9"]) == {}
    assert affinity.leading([]) == {}
    affinity.forget("a")
    assert affinity.leading([b"1", b"2"]) == {"b": 1}


def test_affinity_is_bounded() -> None:
    affinity = Affinity(limit_pages=10)
    for page in range(100):
        affinity.record([str(page).encode()], "a")
    assert len(affinity) == 10
    assert affinity.leading([b"99"]) == {"a": 1}
    for name in "abcdef":
        affinity.record([b"99"], name)
    assert set(affinity.leading([b"99"])) == set("cdef")
