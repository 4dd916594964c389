from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cedar.cluster.autoscale import Limits, Pressure, Reading, decide
from cedar.cluster.autoscale_serve import StagePlanner, planner_options, serve_autoscaling, signals
from cedar.cluster.config_load import parse_config
from cedar.cluster.directory import Load

LIMITS = Limits(minimum=1, maximum=5, target=2.0, up_after_s=10, down_after_s=60, stale_after_s=15)
NOW = 1000.0


def fresh(*values: float) -> list[Reading]:
    return [Reading(value, NOW - 1) for value in values]


@pytest.mark.parametrize(
    ("desired", "running", "readings", "pressure", "expected", "reason"),
    [
        pytest.param(2, 2, fresh(2, 2), None, 2, "steady", id="at target"),
        pytest.param(2, 2, fresh(4, 3), None, 2, "up to 4 pending", id="more, not yet"),
        pytest.param(
            2, 2, fresh(4, 3), Pressure(True, NOW - 10, 4), 4, "up to 4", id="more, for long enough"
        ),
        pytest.param(2, 2, fresh(4, 4), Pressure(True, NOW - 10, 3), 3, "up to 3", id="the least asked for"),
        pytest.param(4, 4, fresh(1, 1, 0, 0), None, 4, "down to 1 pending", id="fewer, not yet"),
        pytest.param(
            4, 4, fresh(1, 1, 0, 0), Pressure(False, NOW - 60, 2), 2, "down to 2", id="the most asked for"
        ),
        pytest.param(
            4, 4, fresh(1, 1, 0, 0), Pressure(True, NOW - 60, 5), 4, "down to 1 pending", id="turned around"
        ),
        pytest.param(
            2, 2, fresh(9, 9), Pressure(True, NOW - 10, 9), 5, "up to 5", id="the maximum may have shrunk"
        ),
        pytest.param(1, 1, fresh(0), None, 1, "steady", id="never below the minimum"),
        pytest.param(5, 5, fresh(9, 9, 9, 9, 9), None, 5, "steady", id="never above the maximum"),
        pytest.param(9, 5, fresh(9), None, 5, "bounds 1..5", id="bounds at once"),
        pytest.param(0, 0, [], None, 1, "bounds 1..5", id="minimum at once"),
        pytest.param(
            3, 3, [], Pressure(False, 0, 1), 3, "hold: 0 fresh readings of 3 replicas", id="silence holds"
        ),
        pytest.param(
            3,
            3,
            [Reading(0, NOW - 16)] * 3,
            None,
            3,
            "hold: 0 fresh readings of 3 replicas",
            id="stale holds",
        ),
        pytest.param(
            3,
            3,
            fresh(0) + [Reading(0, 0)] * 2,
            None,
            3,
            "hold: 1 fresh readings of 3 replicas",
            id="no quorum",
        ),
        pytest.param(
            3, 3, fresh(4, 4), None, 3, "up to 5 pending", id="a silent replica counts as the others' mean"
        ),
        pytest.param(
            4,
            1,
            fresh(1),
            Pressure(False, NOW - 60, 1),
            1,
            "down to 1",
            id="shrinks while replicas are pending",
        ),
        pytest.param(3, 0, [], None, 3, "hold: 0 fresh readings of 0 replicas", id="nobody runs yet"),
    ],
)
def test_decision(
    desired: int, running: int, readings: list[Reading], pressure: Pressure | None, expected: int, reason: str
) -> None:
    decision = decide(
        desired=desired, running=running, readings=readings, limits=LIMITS, pressure=pressure, now_s=NOW
    )
    assert (decision.replicas, decision.reason) == (expected, reason)


def test_load_that_nobody_takes_counts() -> None:
    decision = decide(
        desired=1, running=1, readings=fresh(2), limits=LIMITS, pressure=None, now_s=NOW, waiting=4
    )
    assert decision.pressure is not None
    assert decision.pressure.replicas == 3


def test_waits_are_forgotten_when_the_load_is_right_again() -> None:
    decision = decide(
        desired=2, running=2, readings=fresh(2, 2), limits=LIMITS, pressure=Pressure(True, 0, 4), now_s=NOW
    )
    assert decision.pressure is None


@dataclass
class Context:
    """What Serve hands to a policy, as far as the planner reads it."""

    deployment_name: str
    target_num_replicas: int = 1
    current_num_replicas: int = 1
    raw_metrics: dict[str, dict[str, Any]] | None = None
    policy_state: dict[str, Any] = field(default_factory=dict)
    current_time: float = NOW


def series(*values: float, at_s: float = NOW - 1) -> dict[str, Any]:
    return {f"replica{i}": [SimpleNamespace(value=v, timestamp=at_s)] for i, v in enumerate(values)}


def planner(**stages: object) -> StagePlanner:
    config = parse_config({"model": {"path": "/m"}, **stages})
    return StagePlanner(**planner_options(config))


def test_one_planner_sizes_all_stages() -> None:
    scaling = {"min": 1, "max": 4, "target": 2, "up_after_s": 0}
    plan = planner(prefill={"autoscaling": scaling}, decode={"autoscaling": scaling})
    contexts = {
        "p": Context("Prefill", raw_metrics={"requests": series(6)}),
        "d": Context("Decode", raw_metrics={"requests": series(1)}),
        "e": Context("Encoder"),
        "g": Context("Gateway", raw_metrics={"waiting_decode": series(5)}),
    }
    decisions, states = plan(contexts)
    assert decisions == {"p": 3, "d": 3, "e": 1, "g": 1}
    assert states["e"]["reason"].startswith("hold")


def test_waits_live_in_the_policy_state() -> None:
    plan = planner(prefill={"autoscaling": {"max": 4, "target": 2, "up_after_s": 10}})
    context = Context("Prefill", raw_metrics={"requests": series(6)})
    decisions, states = plan({"p": context})
    assert decisions == {"p": 1}
    later = NOW + 10
    context = Context(
        "Prefill",
        raw_metrics={"requests": series(6, at_s=later)},
        policy_state=states["p"],
        current_time=later,
    )
    assert plan({"p": context})[0] == {"p": 3}


def test_stale_waiting_counts_for_nothing() -> None:
    plan = planner(decode={"autoscaling": {"max": 4, "target": 1, "up_after_s": 0}})
    contexts = {
        "d": Context("Decode", raw_metrics={"requests": series(0)}),
        "g": Context("Gateway", raw_metrics={"waiting_decode": series(9, at_s=0)}),
    }
    assert plan(contexts)[0] == {"d": 1, "g": 1}


def test_every_signal_is_reported_and_serve_adds_no_delay_of_its_own() -> None:
    load = Load(active=3, queued=2, pages_total=10, pages_leased=5, slots_total=4, slots_leased=1)
    assert signals(load) == {"requests": 5, "queued": 2, "pages": 0.5, "slots": 0.25}
    config = parse_config({"model": {"path": "/m"}})
    options = serve_autoscaling(config.prefill.autoscaling)
    assert (options["upscale_delay_s"], options["downscale_delay_s"]) == (0, 0)
