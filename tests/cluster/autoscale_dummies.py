"""Deployments without a model, for the test of the planner inside a real Serve: their load is a file's
content."""

from pathlib import Path
from typing import Any

from cedar.cluster.autoscale_serve import DEPLOYMENTS, GATEWAY, serve_autoscaling, signals
from cedar.cluster.config import ClusterConfig
from cedar.cluster.directory import Load
from ray import serve
from ray.serve import Application


class Stage:
    def __init__(self, load_file: str) -> None:
        self._file = Path(load_file)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return signals(Load(active=int(self._file.read_text())))


class Root:
    def __init__(self, *stages: object) -> None:
        self._stages = stages


def build(arguments: dict[str, Any]) -> Application:
    config = ClusterConfig.model_validate(arguments["config"])
    bound = []
    for name in ("prefill", "decode"):
        options = {
            "autoscaling_config": serve_autoscaling(config.stage(name).autoscaling),  # type: ignore[arg-type]
            "ray_actor_options": {"num_cpus": 0.1},
            "graceful_shutdown_timeout_s": 1,
            "graceful_shutdown_wait_loop_s": 0.1,
        }
        bound.append(serve.deployment(Stage, name=DEPLOYMENTS[name], **options).bind(arguments[name]))
    return serve.deployment(Root, name=GATEWAY, ray_actor_options={"num_cpus": 0.1}).bind(*bound)
