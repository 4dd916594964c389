"""Environment variables of every process of a cluster. Pure.

Ray reads some of these at import and hands them on to the processes that it starts, so they must be
there before a local Ray starts; a cluster on an existing Ray sends them as its runtime environment.
"""

from __future__ import annotations

from cedar.cluster.config import ClusterConfig

# glibc hands large blocks back to the kernel at once, which costs a page fault for every 4 KiB of a frame.
MALLOC_KEEP_BYTES = 256 << 20


def worker_environment(config: ClusterConfig) -> dict[str, str]:
    """For the processes that serve requests."""
    keep = str(MALLOC_KEEP_BYTES)
    return {
        "RAY_AUTH_MODE": config.ray.auth,
        "MALLOC_MMAP_THRESHOLD_": keep,
        "MALLOC_TRIM_THRESHOLD_": keep,
        "OMP_NUM_THREADS": "1",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


def local_ray_environment(config: ClusterConfig) -> dict[str, str]:
    """For a Ray of our own: loopback only, no telemetry, no dashboards, nobody else's cluster."""
    return {
        **worker_environment(config),
        # Ray's switch for "this machine only": all its servers bind loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_SERVE_ENABLE_TASK_EVENTS": "0",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_GRAFANA_HOST": "",
    }
