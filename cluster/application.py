"""Cedar's part of a running Ray: the directory and store actors and the Serve application."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import Any

from cedar.cluster.config import ClusterConfig
from cedar.cluster.directory import View, ViewKeeper
from cedar.cluster.directory_client import DIRECTORY_ACTOR
from cedar.cluster.errors import LaunchError, PortInUse
from cedar.cluster.progress import Progress

POLL_S = 0.1
STATUS_S = 1.0


def import_ahead() -> None:
    """Import what ``Application`` needs of Ray Serve. Ray itself is imported by then."""
    import cedar.cluster.serve_app
    import cedar.cluster.store_actor  # noqa: F401


class Application:
    """Used by one thread of the process that owns the cluster."""

    def __init__(self, config: ClusterConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._directory: Any = None
        self._keeper = ViewKeeper(config.directory.expire_after_s)
        self._stores: list[Any] = []
        self._serve_was_there = False
        self._deployed = False

    def start(self, store_directory: str, deadline_s: float) -> None:
        """Deploy and wait until everyone answers. ``deadline_s``: monotonic clock. Raises ``LaunchError``."""
        import ray
        from cedar.cluster.directory_actor import DirectoryActor
        from cedar.cluster.serve_app import deploy_schema
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        for name in ("directory", "store", "encoder", "prefill", "decode", "gateway"):
            self._progress.report(name, "running", "starting")
        options = {"num_cpus": 0, "max_restarts": -1, "runtime_env": self._runtime_env()}
        expire_after_s = self._config.directory.expire_after_s
        arguments: list[Any] = [expire_after_s]
        placed = {**options, "name": DIRECTORY_ACTOR}
        if self._config.store.nodes > 1:
            arguments += [self._config, store_directory]
            placed["scheduling_strategy"] = _here()  # the store's member list is a file
        self._directory = ray.remote(DirectoryActor).options(**placed).remote(*arguments)
        # On a Ray of its own everyone runs here, so the secret may be beside pages that are thrown away;
        # elsewhere it is where the configuration says that pages are kept.
        secret_directory = (
            store_directory if self._config.ray.address is None else self._config.store.directory
        )
        self._start_stores(store_directory, secret_directory, options)
        with self._progress.step("serve", "starting the controller"):
            self._serve_was_there = self._serve_runs()
            serve.start(proxy_location="Disabled")
            application = {
                "config": self._config.model_dump(mode="json"),
                "secret_directory": secret_directory,
            }
            _client().deploy_apps(deploy_schema(self._config, application))
            self._deployed = True
        self._wait_ready(deadline_s)

    def view(self) -> View:
        """Who is alive; the last view when the directory does not answer."""
        import ray
        from ray.exceptions import RayError

        try:
            view: View = ray.get(self._directory.view.remote(), timeout=5)
        except (RayError, TimeoutError):
            return self._keeper.view
        return self._keeper.update(view, time.monotonic())

    def stop(self, timeout_s: float, *, own_serve: bool) -> None:
        """Drain and remove the application, then the store, then the directory. Never raises for what is
        gone."""
        import ray
        from cedar.cluster.serve_app import APPLICATION
        from ray import serve
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, RuntimeError, TimeoutError):
            if self._deployed:
                _client().delete_apps([APPLICATION], blocking=False)
                self._wait_deleted(timeout_s)
        stopping = [store.stop.remote() for store in self._stores]
        for stopped in stopping:
            with contextlib.suppress(RayError, TimeoutError):
                ray.get(stopped, timeout=10)
        for actor in (*self._stores, self._directory):
            if actor is not None:
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(actor)
        if not own_serve and not self._serve_was_there:
            with contextlib.suppress(RayError):
                serve.shutdown()

    def _start_stores(
        self, store_directory: str, secret_directory: str | None, options: dict[str, Any]
    ) -> None:
        import ray
        from cedar.cluster.store_actor import StoreActor

        for index in range(self._config.store.nodes):
            folder = str(Path(store_directory) / f"node-{index}")
            placed = {**options, "name": f"cedar-store-{index}", "num_cpus": self._config.store.cpus}
            if self._config.store.nodes > 1:
                placed["scheduling_strategy"] = "SPREAD"
            actor = ray.remote(StoreActor).options(**placed)
            self._stores.append(actor.remote(self._config, folder, index, secret_directory))

    def _wait_ready(self, deadline_s: float) -> None:
        needed = {"store": self._config.store.nodes, "gateway": 1}
        for name in ("encoder", "prefill", "decode"):
            needed[name] = self._config.stage(name).autoscaling.min
        checked_s = 0.0
        while True:
            view = self.view()
            have = {stage: len(view.stage(stage)) for stage in needed}
            if view.epoch:
                self._progress.report("directory", "done")
            for stage, count in needed.items():
                self._progress.report(
                    stage, "done" if have[stage] >= count else "running", f"{have[stage]} of {count}"
                )
            missing = [stage for stage, count in needed.items() if have[stage] < count]
            if not missing:
                return
            now_s = time.monotonic()
            if now_s - checked_s > STATUS_S:
                checked_s = now_s
                self._raise_if_failed(missing)
            if now_s > deadline_s:
                raise LaunchError(
                    missing[0], f"not ready in time ({have[missing[0]]} of {needed[missing[0]]})"
                )
            time.sleep(POLL_S)

    def _raise_if_failed(self, missing: list[str]) -> None:
        """Serve retries a constructor a few times; what it said the first time is the reason."""
        import ray
        from ray.exceptions import RayActorError

        actors = [("directory", self._directory), *(("store", store) for store in self._stores)]
        for name, actor in actors if "store" in missing else ():
            ready, _ = ray.wait([actor.ready.remote()], timeout=0.05)
            if ready:
                try:
                    ray.get(ready)
                except RayActorError as error:
                    raise LaunchError(name, _last_line(str(error))) from error
        from cedar.cluster.serve_app import APPLICATION
        from ray import serve

        application = serve.status().applications.get(APPLICATION)
        if application is None:
            return
        failed = application.status.value == "DEPLOY_FAILED"
        for name, deployment in application.deployments.items():
            if "failed to start" in deployment.message or (failed and deployment.message):
                if "PortInUse" in deployment.message:
                    raise PortInUse(self._config.gateway.host, self._config.gateway.port)
                raise LaunchError(name.lower(), _last_line(deployment.message))
        if failed:
            raise LaunchError("serve", _last_line(application.message))

    def _wait_deleted(self, timeout_s: float) -> None:
        from cedar.cluster.serve_app import APPLICATION
        from ray import serve

        deadline_s = time.monotonic() + timeout_s
        while APPLICATION in serve.status().applications and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _serve_runs(self) -> bool:
        import ray
        from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

        if self._config.ray.address is None:
            return False
        try:
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        except ValueError:
            return False
        return True

    def _runtime_env(self) -> dict[str, Any] | None:
        if self._config.ray.address is None:
            return None
        from cedar.cluster.environment import worker_environment

        return {"env_vars": worker_environment(self._config)}


def _here() -> Any:
    """Place an actor on this machine and on no other."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _client() -> Any:
    """Serve's client: the declarative deploy has no other Python entry."""
    from ray.serve.context import _get_global_client

    return _get_global_client()


def _last_line(message: str) -> str:
    """The line of a traceback that says what happened; the workers' logs have the rest."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line and not line.startswith("File")]
    return re.sub(r"^(?:\w+\.)*(\w+): ", r"\1: ", (told or lines or ["failed"])[-1])
