"""Clocks that step a day either way, freeze, or drift, under a tier and a window tier that go on working."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import HOUR_S, MIB, WindowConfig
from cedar.kvstore.segment import Segment
from cedar.kvstore.stats import Counters
from cedar.kvstore.window_tier import WindowName, WindowTier

from .store_child import count, items_of, keys_of, open_tier

DAY_S = 24 * HOUR_S
TTL_S = 72 * HOUR_S


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S, 400 * DAY_S, -400 * DAY_S])
def test_steps_of_the_wall_clock_change_no_age(step_s: float, tmp_path: Path) -> None:
    clock = ManualClock()
    tier = open_tier(tmp_path / "store", clock=clock)
    assert tier.put(items_of(0, 4)).result(30).stored == 4
    clock.advance(40 * HOUR_S)
    assert tier.put(items_of(1, 4)).result(30).stored == 4
    clock.step_wall(step_s)
    tier.maintenance.tick()
    assert count(tier, 0, 4) == count(tier, 1, 4) == [4, 0, 0]
    clock.advance(33 * HOUR_S)  # 73 hours after the first, 33 after the second
    tier.maintenance.tick()
    assert count(tier, 0, 4) == [0, 4, 0]
    assert count(tier, 1, 4) == [4, 0, 0]
    clock.step_wall(-step_s)
    tier.maintenance.tick()
    assert count(tier, 0, 4) == [0, 4, 0], "nothing comes back to life"
    clock.advance(40 * HOUR_S)
    tier.maintenance.tick()
    assert count(tier, 1, 4) == [0, 4, 0], "and nothing is kept for ever"
    assert tier.stats()["store_segments"] <= 2
    tier.close()


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_step_while_the_store_is_down(step_s: float, tmp_path: Path) -> None:
    """In one boot the running clock is believed; over a reboot the wall clock is, within a day."""
    clock = ManualClock()
    tier = open_tier(tmp_path / "store", clock=clock)
    assert tier.put(items_of(0, 4)).result(30).stored == 4
    tier.close()
    clock.step_wall(step_s)
    tier = open_tier(tmp_path / "store", clock=clock)
    clock.advance(70 * HOUR_S)
    assert count(tier, 0, 4) == [4, 0, 0]
    clock.advance(3 * HOUR_S)
    assert count(tier, 0, 4) == [0, 4, 0]
    assert tier.put(items_of(1, 4)).result(30).stored == 4
    tier.close()
    clock.reboot("another", down_s=60)
    clock.step_wall(step_s)
    tier = open_tier(tmp_path / "store", clock=clock)
    assert count(tier, 1, 4) == [4, 0, 0], "a day is not 72 hours"
    clock.advance(TTL_S + 1)
    assert count(tier, 1, 4) == [0, 4, 0]
    tier.close()


def test_clocks_that_freeze(tmp_path: Path) -> None:
    """A paused machine: the running clock stands still, then both go on. Ages count running time."""
    clock = ManualClock()
    tier = open_tier(tmp_path / "store", clock=clock)
    assert tier.put(items_of(0, 4)).result(30).stored == 4
    for _ in range(50):
        tier.maintenance.tick()  # time stands still: no rate, no division, no expiry goes wrong
        assert count(tier, 0, 4) == [4, 0, 0]
    assert tier.put(items_of(1, 4)).result(30).stored == 4
    clock.step_wall(30 * DAY_S)  # the wall clock was put right after the pause
    tier.maintenance.tick()
    assert count(tier, 0, 4) == count(tier, 1, 4) == [4, 0, 0]
    clock.advance(TTL_S + 1)
    assert count(tier, 0, 4) == count(tier, 1, 4) == [0, 4, 0]
    tier.close()


def test_a_disk_failure_is_forgiven_though_the_wall_clock_stepped_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    tier = open_tier(tmp_path / "store", clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "write", lambda *_: (_ for _ in ()).throw(OSError("no")))
        assert tier.put(items_of(0, 1)).result(30).reason == "disk"
    clock.step_wall(-DAY_S)
    assert tier.put(items_of(0, 1)).result(30).reason == "disk"
    clock.advance(0.1)
    assert tier.put(items_of(0, 1)).result(30).stored == 1
    tier.close()


def test_windows_live_by_the_running_clock() -> None:
    clock = ManualClock()
    tier = WindowTier(WindowConfig(budget_bytes=MIB, ttl_s=600.0), clock, Counters())
    name = WindowName(keys_of(0, 1)[0], 33, keys_of(1, 1)[0])
    assert tier.promise(100)
    tier.put(name, bytes(100), bytes(16))
    for step_s in (DAY_S, -2 * DAY_S, DAY_S):
        clock.step_wall(step_s)
        tier.expire()
        assert tier.get(name) is not None
    clock.advance(601)
    tier.expire()
    assert tier.get(name) is None
    tier.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_steps_and_restarts(seed: int, tmp_path: Path) -> None:
    """Whatever the wall clock does, a page lives 72 running hours, and down-time counts at most as passed."""
    rng = random.Random(seed)
    clock = ManualClock()
    tier = open_tier(tmp_path / "store", clock=clock)
    assert tier.put(items_of(0, 2)).result(30).stored == 2
    ran_s = 0.0
    while ran_s < TTL_S - 10 * HOUR_S:
        action = rng.choice(("run", "run", "step", "restart"))
        if action == "run":
            clock.advance(4 * HOUR_S)
            ran_s += 4 * HOUR_S
        elif action == "step":
            clock.step_wall(rng.choice((-1, 1)) * rng.uniform(0, 30 * DAY_S))
        else:
            tier.close()
            tier = open_tier(tmp_path / "store", clock=clock)
        tier.maintenance.tick()
        assert count(tier, 0, 2) == [2, 0, 0], (seed, ran_s / HOUR_S)
    clock.advance(11 * HOUR_S)
    assert count(tier, 0, 2) == [0, 2, 0]
    tier.close()
