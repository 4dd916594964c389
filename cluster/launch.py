"""Starts a cluster, keeps its state file fresh, and ends it without leaving anything behind.

Everything that can start at the same time does: while Serve's controller comes up the directory and
the store start, and every replica loads in its own process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from cedar.cluster import remote, state_file
from cedar.cluster.application import Application, import_ahead
from cedar.cluster.config import ClusterConfig
from cedar.cluster.config_print import effective_yaml
from cedar.cluster.errors import ClusterNotFound, LaunchError, NameTaken, PortInUse
from cedar.cluster.model_check import check_checkpoint
from cedar.cluster.progress import OnProgress, Progress
from cedar.cluster.ray_runtime import RaySession
from cedar.cluster.state_file import ClusterState, WorkerEntry

REFRESH_S = 2.0


class RunningCluster:
    """A cluster that this process owns. Use it as a context manager, or call ``stop``."""

    def __init__(self, config: ClusterConfig, name: str) -> None:
        self.config = config
        self.name = name
        self._session = RaySession(config)
        self._application: Application | None = None
        self._scratch = ""
        self._stopped = False
        self.state = ClusterState(
            name=name,
            address="",
            pid=os.getpid(),
            pid_started=state_file.process_started(os.getpid()),
            started_unix_s=time.time(),
            ray_temp_dir="",
            config_yaml=effective_yaml(config),
        )

    @property
    def address(self) -> str:
        """ "host:port" of the Generation service."""
        return self.state.address

    def status(self) -> remote.ClusterStatus:
        """Ask every worker."""
        self.refresh()
        return remote.status(self.state)

    def refresh(self) -> None:
        """Bring the state file up to date with the directory; workers come and go."""
        if self._application is None or self._stopped:
            return
        workers = tuple(
            WorkerEntry(w.stage, w.address, w.pid, w.incarnation, w.node)
            for w in self._application.view().workers
        )
        if workers and workers != self.state.workers:
            gateways = [w.address for w in workers if w.stage == "gateway"]
            self.state = ClusterState(
                **{
                    **self.state.__dict__,
                    "workers": workers,
                    "address": (gateways or [self.state.address])[0],
                }
            )
            state_file.write(self.state)

    def stop(self, timeout_s: float | None = None, on_progress: OnProgress | None = None) -> None:
        """End it: drain, stop, and leave no process, port, shared memory, folder or state file. Idempotent.

        Raises ``LaunchError`` when a process would not end; everything else is gone then, too.
        """
        if self._stopped:
            return
        self._stopped = True
        progress = Progress(on_progress)
        limit_s = timeout_s or self.config.deadlines.stop_s
        try:
            if self._application is not None:
                with progress.step("serve", "draining"):
                    self._application.stop(limit_s, own_serve=self._session.local)
        finally:
            with progress.step("ray", "ending processes"):
                left = self._session.stop()
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)
            state_file.remove(self.name)
        if left:
            raise LaunchError("ray", f"processes that would not end: {[process.pid for process in left]}")

    def _start(self, progress: Progress, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        check_port(self.config.gateway.host, self.config.gateway.port)
        check_port("127.0.0.1", self.config.gateway.metrics_port or 0, "gateway.metrics_port")
        check_checkpoint(self.config)
        # Ray's start is mostly waiting for its processes; what comes after needs modules that take a second.
        ahead = threading.Thread(target=import_ahead, name="import-ahead", daemon=True)
        with progress.step("ray", "starting" if self._session.local else "joining"):
            self._session.start(and_meanwhile=ahead.start)
        ahead.join()
        self.state = ClusterState(**{**self.state.__dict__, "ray_temp_dir": self._session.temp_directory})
        self._application = Application(self.config, progress)
        self._application.start(self._store_directory(), deadline_s)
        self.refresh()

    def _store_directory(self) -> str:
        if self.config.store.directory is not None:
            Path(self.config.store.directory).mkdir(parents=True, exist_ok=True)
            return self.config.store.directory
        if self._session.local:
            return str(Path(self._session.temp_directory) / "store")  # goes when the session's folder goes
        self._scratch = tempfile.mkdtemp(prefix="cedar-store-")
        return self._scratch

    def __enter__(self) -> RunningCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    config: ClusterConfig,
    *,
    name: str = "default",
    on_progress: OnProgress | None = None,
    timeout_s: float | None = None,
) -> RunningCluster:
    """Start a cluster and wait until every stage has the replicas it should have at least.

    Raises ``LaunchError`` (``PortInUse`` for the gateway's port, ``NameTaken`` for the name) or
    ``ConfigError``, with everything cleaned up.
    """
    state_file.state_path(name)
    with contextlib.suppress(ClusterNotFound):
        running = state_file.read(name)
        if running.owner_alive:
            raise NameTaken(name, running.pid)
        remote.stop(running)
    cluster = RunningCluster(config, name)
    try:
        cluster._start(Progress(on_progress), timeout_s or config.deadlines.start_s)
    except BaseException:
        with contextlib.suppress(LaunchError):
            cluster.stop()
        raise
    return cluster


def serve_forever(
    config: ClusterConfig,
    *,
    name: str = "default",
    on_progress: OnProgress | None = None,
    on_ready: Callable[[RunningCluster], None] | None = None,
) -> int:
    """Run a cluster in the foreground until SIGINT or SIGTERM. Call it on the main thread. Returns the exit
    code."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set() or starting:
            raise KeyboardInterrupt
        asked.set()

    starting = True
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with start(config, name=name, on_progress=on_progress) as cluster:
            starting = False
            if on_ready is not None:
                on_ready(cluster)
            while not asked.wait(REFRESH_S):
                cluster.refresh()
            cluster.stop(on_progress=on_progress)
    except KeyboardInterrupt:
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def check_port(host: str, port: int, field: str = "gateway.port") -> None:
    """Raise ``PortInUse``, which names ``field``, when something listens there already."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(host, port, field) from error
