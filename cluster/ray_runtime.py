"""A Ray of our own, isolated from every other on the machine; or a seat in an existing one.

Traps that this module knows: ``ray.init`` may join a stale cluster (``address="local"`` does not);
Ray decides on token authentication at import (``RAY_AUTH_MODE`` is set before, in every process);
``ray stop`` ends every Ray on the machine (never called: processes are ended by id).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cedar.cluster.config import ClusterConfig
from cedar.cluster.environment import local_ray_environment, worker_environment
from cedar.cluster.errors import ConfigError, LaunchError
from cedar.cluster.processes import SESSION_VARIABLE, ProcessId, end_session

# Processes of a cluster besides the stages: controller, build task, directory, gateway.
SYSTEM_PROCESSES = 4
# 107, less "/cedar-" and 8 random characters, less Ray's "/session_<date>_<pid>/sockets/plasma_store".
MAX_PARENT_CHARACTERS = 28


class RaySession:
    """This process's use of Ray, from ``start`` to ``stop``. One at a time in a process."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.temp_directory = ""

    @property
    def local(self) -> bool:
        """Whether the Ray is our own."""
        return self._config.ray.address is None

    def start(self, and_meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start or join; ``and_meanwhile`` is called once Ray is imported. Raises ``LaunchError``."""
        os.environ.update(
            local_ray_environment(self._config) if self.local else worker_environment(self._config)
        )
        os.environ.pop("RAY_ADDRESS", None)
        import ray

        if ray.is_initialized():
            raise LaunchError("ray", "this process uses Ray already; use another process")
        options = self._options()
        and_meanwhile()
        try:
            with _marked(self.temp_directory), _own_sigterm():
                ray.init(**options)
        except Exception as error:  # Ray raises many kinds, none of which can be told from another
            self.stop()
            raise LaunchError("ray", f"{type(error).__name__}: {error}") from error

    def stop(self, timeout_s: float = 10.0) -> list[ProcessId]:
        """Leave, or end everything that was started. Returns processes that would not end. Idempotent."""
        import ray

        ray.shutdown()
        if not self.temp_directory:
            return []
        left = end_session(self.temp_directory, timeout_s)
        shutil.rmtree(self.temp_directory, ignore_errors=True)
        self.temp_directory = ""
        return left

    def _options(self) -> dict[str, Any]:
        ray_settings = self._config.ray
        common: dict[str, Any] = {
            "namespace": ray_settings.namespace,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "configure_logging": True,
        }
        if not self.local:
            return {**common, "address": ray_settings.address}
        self.temp_directory = tempfile.mkdtemp(
            prefix="cedar-", dir=session_parent(ray_settings.temp_directory)
        )
        from ray._private import ray_constants

        # Read at import, which may have been before ours: all of this Ray's servers bind loopback.
        ray_constants.ENABLE_RAY_CLUSTER = False
        return {
            **common,
            "address": "local",
            "num_cpus": ray_settings.cpus or local_cpus(self._config),
            "num_gpus": ray_settings.gpus,
            "object_store_memory": ray_settings.object_store_bytes,
            "include_dashboard": False,
            "_temp_dir": self.temp_directory,
        }


def session_parent(asked: str | None, system: str | None = None) -> str:
    """Where a session's folder goes. Ray's UNIX sockets lie in it, whose paths have 107 characters at most.

    Raises ``ConfigError`` for a configured folder that is too long; a long ``system`` one gives way to /tmp.
    """
    if asked is not None and len(asked) > MAX_PARENT_CHARACTERS:
        raise ConfigError(f"ray.temp_directory: {asked} (at most {MAX_PARENT_CHARACTERS} characters)")
    system = system or tempfile.gettempdir()
    return asked or (system if len(system) <= MAX_PARENT_CHARACTERS else "/tmp")


def local_cpus(config: ClusterConfig) -> int:
    """CPUs that a local Ray is told of: Ray starts that many workers ahead, so one for each process that
    comes."""
    stages = config.encoder.autoscaling.min + config.prefill.autoscaling.min + config.decode.autoscaling.min
    reserved = sum(
        stage.cpus * stage.autoscaling.max for stage in (config.encoder, config.prefill, config.decode)
    )
    return max(SYSTEM_PROCESSES + config.store.nodes + stages, round(reserved + config.gateway.cpus + 1))


@contextmanager
def _marked(temp_directory: str) -> Iterator[None]:
    """Processes that start meanwhile carry the session's mark, by which all of them are found again."""
    os.environ[SESSION_VARIABLE] = temp_directory
    try:
        yield
    finally:
        del os.environ[SESSION_VARIABLE]


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """``ray.init`` puts its own SIGTERM handler in place, which exits at once; ours comes back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
