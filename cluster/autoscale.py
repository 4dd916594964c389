"""How many replicas a stage should have: a pure decision, one stage at a time.

====================================  =====================================
readings                              decision
====================================  =====================================
fewer fresh ones than half of running hold (stale, or replicas still start)
ask for more, for ``up_after_s``      the least that was asked for meanwhile
ask for fewer, for ``down_after_s``   the most that was asked for meanwhile
ask for the present number            hold, forget both waits
present number outside the bounds     the nearest bound, at once
====================================  =====================================

Decisions start from the number *asked for*, not the number running: a replica that can never be
placed does not stop the stage from shrinking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds in replicas, ``target`` in the signal's unit for a replica, waits in seconds."""

    minimum: int
    maximum: int
    target: float
    up_after_s: float
    down_after_s: float
    stale_after_s: float


@dataclass(frozen=True)
class Reading:
    """One replica's signal at a time (seconds, the planner's clock)."""

    value: float
    at_s: float


@dataclass(frozen=True)
class Pressure:
    """A wish that has not been granted yet: since when, and the most modest number asked for since."""

    up: bool
    since_s: float
    replicas: int


@dataclass(frozen=True)
class Decision:
    """``replicas`` to ask for; ``pressure`` goes into the next decision; ``reason`` for people."""

    replicas: int
    pressure: Pressure | None
    reason: str


def wanted(readings: Sequence[Reading], running: int, waiting: float, limits: Limits) -> int:
    """Replicas that would bring the signal to its target, within bounds. Silent replicas count as the mean
    of the others.

    ``waiting``: load outside the replicas, in the signal's unit (requests that no replica takes).
    """
    total = sum(r.value for r in readings) * (running / len(readings)) + waiting
    return max(limits.minimum, min(limits.maximum, math.ceil(total / limits.target - _ROUNDING)))


def decide(
    *,
    desired: int,
    running: int,
    readings: Sequence[Reading],
    limits: Limits,
    pressure: Pressure | None,
    now_s: float,
    waiting: float = 0.0,
) -> Decision:
    """The next number of replicas. ``desired``: the number asked for last; ``running``: those that answer."""
    bounded = max(limits.minimum, min(limits.maximum, desired))
    if bounded != desired:
        return Decision(bounded, None, f"bounds {limits.minimum}..{limits.maximum}")
    fresh = [r for r in readings if now_s - r.at_s <= limits.stale_after_s]
    if not fresh or 2 * len(fresh) < running:
        return Decision(desired, None, f"hold: {len(fresh)} fresh readings of {running} replicas")
    ask = wanted(fresh, running, waiting, limits)
    if ask == desired:
        return Decision(desired, None, "steady")
    up = ask > desired
    if pressure is None or pressure.up != up:
        pressure = Pressure(up, now_s, ask)
    else:
        modest = min if up else max
        pressure = Pressure(up, pressure.since_s, modest(pressure.replicas, ask))
    wait_s = limits.up_after_s if up else limits.down_after_s
    if now_s - pressure.since_s + _ROUNDING < wait_s:
        return Decision(desired, pressure, f"{'up' if up else 'down'} to {pressure.replicas} pending")
    return Decision(pressure.replicas, None, f"{'up' if up else 'down'} to {pressure.replicas}")
