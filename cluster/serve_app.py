"""The application as Serve sees it: one ``ServeDeploySchema`` with every deployment and one planner.

An application-level autoscaling policy exists only in Serve's declarative form, so the application is
deployed the way ``serve deploy`` does it: Serve imports ``BUILDER`` in a task of its own and calls it
with ``arguments``. They are logged by Serve, so they hold no secret.
"""

from __future__ import annotations

from typing import Any

from cedar.cluster.autoscale_serve import (
    DEPLOYMENTS,
    GATEWAY,
    POLICY,
    SIGNAL_INTERVAL,
    planner_options,
    serve_autoscaling,
)
from cedar.cluster.config import ClusterConfig, StageName
from cedar.cluster.environment import worker_environment
from ray import serve
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

APPLICATION = "cedar"
BUILDER = "cedar.cluster.serve_app:build"
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 20.0
STAGES: tuple[StageName, ...] = ("encoder", "prefill", "decode")


def deploy_schema(
    config: ClusterConfig, arguments: dict[str, Any], builder: str = BUILDER
) -> ServeDeploySchema:
    """What is handed to Serve's controller. ``arguments``: of the builder, JSON values."""
    application: dict[str, Any] = {
        "name": APPLICATION,
        "route_prefix": None,
        "import_path": builder,
        "args": arguments,
        "autoscaling_policy": {"policy_function": POLICY, "policy_kwargs": planner_options(config)},
    }
    if config.ray.address is not None:
        # A Ray of our own hands its environment to its workers; one that was there before must be told.
        application["runtime_env"] = {"env_vars": worker_environment(config)}
    return ServeDeploySchema.model_validate({"proxy_location": "Disabled", "applications": [application]})


def build(arguments: dict[str, Any]) -> Application:
    """Serve's builder. The gateway is the root; it is bound to the stages only so that they belong to one
    application."""
    from cedar.cluster.deployments import DecodeReplica, EncoderReplica, GatewayReplica, PrefillReplica

    config = ClusterConfig.model_validate(arguments["config"])
    classes: dict[StageName, type] = {
        "encoder": EncoderReplica,
        "prefill": PrefillReplica,
        "decode": DecodeReplica,
    }
    stages = [
        serve.deployment(classes[name], name=DEPLOYMENTS[name], **stage_options(config, name)).bind(config)
        for name in STAGES
    ]
    gateway = serve.deployment(GatewayReplica, name=GATEWAY, **gateway_options(config))
    return gateway.bind(config, arguments["secret_directory"], *stages)


def stage_options(config: ClusterConfig, name: StageName) -> dict[str, Any]:
    """Deployment options of a stage."""
    stage = config.stage(name)
    return {
        "autoscaling_config": serve_autoscaling(stage.autoscaling),
        "ray_actor_options": _actor_options(config, stage.cpus, stage.gpus, stage.threads),
        "graceful_shutdown_timeout_s": stage.drain_s + 5,
        **_options(),
    }


def gateway_options(config: ClusterConfig) -> dict[str, Any]:
    """Deployment options of the gateway: of fixed size, but with autoscaling on, so that Serve collects its
    signals."""
    return {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 1, **SIGNAL_INTERVAL},
        "ray_actor_options": _actor_options(config, config.gateway.cpus, 0, config.gateway.threads),
        "graceful_shutdown_timeout_s": config.decode.drain_s + 5,
        **_options(),
    }


def _options() -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


def _actor_options(config: ClusterConfig, cpus: float, gpus: float, threads: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
    if config.ray.address is not None:
        environment = {**worker_environment(config), "OMP_NUM_THREADS": str(threads)}
        options["runtime_env"] = {"env_vars": environment}
    return options
