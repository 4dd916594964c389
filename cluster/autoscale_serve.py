"""The planner inside Serve: an application-level autoscaling policy over ``cedar.cluster.autoscale``.

Requests never pass a Serve handle, so Serve's own count of ongoing requests is always 0. Replicas
push their signals through ``record_autoscaling_stats`` instead, with timestamps; the gateway, which
has a fixed size, adds what no replica would take. Serve's own delays and factors are left neutral
(``serve_autoscaling``), so that the decision is the planner's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cedar.cluster.autoscale import Limits, Pressure, Reading, decide
from cedar.cluster.config import AutoscalingSettings, ClusterConfig
from cedar.cluster.directory import Load

POLICY = "cedar.cluster.autoscale_serve:StagePlanner"
DEPLOYMENTS = {"encoder": "Encoder", "prefill": "Prefill", "decode": "Decode"}
GATEWAY = "Gateway"
WAITING = "waiting_"
# How often replicas push their signals. Serve calls the option deprecated in favour of an environment
# variable that its replicas do not read.
SIGNAL_INTERVAL = {"metrics_interval_s": 1.0, "look_back_period_s": 10.0}


def signals(load: Load) -> dict[str, float]:
    """What a stage replica reports: every signal, so that changing the configured one needs no new worker
    code."""
    return {
        "requests": float(load.requests),
        "queued": float(load.queued),
        "pages": load.pages_fraction,
        "slots": load.slots_fraction,
    }


def serve_autoscaling(settings: AutoscalingSettings) -> dict[str, object]:
    """Serve's autoscaling options of a stage: bounds only, the rest neutral."""
    return {
        "min_replicas": settings.min,
        "max_replicas": settings.max,
        "initial_replicas": settings.min,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        **SIGNAL_INTERVAL,
    }


def planner_options(config: ClusterConfig) -> dict[str, Any]:
    """The planner's constructor arguments, as JSON values."""
    return {
        "stages": {
            DEPLOYMENTS[name]: {
                "stage": name,
                "settings": config.stage(name).autoscaling.model_dump(mode="json"),
            }
            for name in ("encoder", "prefill", "decode")
        }
    }


class StagePlanner:
    """Serve calls it with every deployment's context, about ten times a second.

    ``stages``: by deployment name, the stage and its autoscaling settings. Deployments that it does
    not know are held. The waits live in Serve's policy state, per deployment.
    """

    def __init__(self, stages: Mapping[str, Mapping[str, Any]]) -> None:
        self._stage = {name: str(entry["stage"]) for name, entry in stages.items()}
        self._signal = {name: str(entry["settings"]["signal"]) for name, entry in stages.items()}
        self._limits = {name: _limits(entry["settings"]) for name, entry in stages.items()}

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Replicas and policy state by deployment id."""
        decisions: dict[Any, int] = {}
        states: dict[Any, dict[str, Any]] = {}
        waiting = self._waiting(contexts)
        for deployment, context in contexts.items():
            name = context.deployment_name
            if name not in self._limits:
                decisions[deployment] = context.target_num_replicas
                continue
            limits, signal = self._limits[name], self._signal[name]
            decision = decide(
                desired=context.target_num_replicas,
                running=context.current_num_replicas,
                readings=_latest(context, signal),
                limits=limits,
                pressure=_pressure(context.policy_state.get("pressure")),
                now_s=context.current_time,
                waiting=waiting.get(self._stage[name], 0.0) if signal in ("requests", "queued") else 0.0,
            )
            decisions[deployment] = decision.replicas
            pressure = decision.pressure
            states[deployment] = {
                "pressure": [pressure.up, pressure.since_s, pressure.replicas] if pressure else None,
                "reason": decision.reason,
            }
        return decisions, states

    def _waiting(self, contexts: Mapping[Any, Any]) -> dict[str, float]:
        totals: dict[str, float] = {}
        for context in contexts.values():
            if context.deployment_name != GATEWAY:
                continue
            for stage in self._stage.values():
                limit_s = min(limits.stale_after_s for limits in self._limits.values())
                fresh = [
                    r.value
                    for r in _latest(context, WAITING + stage)
                    if context.current_time - r.at_s <= limit_s
                ]
                totals[stage] = totals.get(stage, 0.0) + sum(fresh)
        return totals


def _limits(settings: Mapping[str, Any]) -> Limits:
    return Limits(
        minimum=settings["min"],
        maximum=settings["max"],
        target=settings["target"],
        up_after_s=settings["up_after_s"],
        down_after_s=settings["down_after_s"],
        stale_after_s=settings["stale_after_s"],
    )


def _latest(context: Any, name: str) -> list[Reading]:
    series = (context.raw_metrics or {}).get(name, {})
    return [Reading(points[-1].value, points[-1].timestamp) for points in series.values() if points]


def _pressure(stored: Any) -> Pressure | None:
    return Pressure(bool(stored[0]), float(stored[1]), int(stored[2])) if stored else None
