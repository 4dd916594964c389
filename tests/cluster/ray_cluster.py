"""A real cluster of the golden checkpoint on a real local Ray, in a process of its own, as ``cedar serve``
runs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cedar.cluster import remote, state_file
from cedar.cluster.processes import of_session
from cedar.cluster.remote import ClusterStatus, WorkerReport
from cedar.cluster.state_file import ClusterState

from .golden_preset import GOLDEN_SETTINGS

SCRIPT = Path(__file__).with_name("serve_script.py")
NAME = "test"
START_S = 170.0


class RayCluster:
    """Started by ``start``; ``stop`` checks that nothing is left."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._log = (folder / "serve.log").open("w+")
        environment = {**os.environ, "CEDAR_STATE_DIR": str(folder / "state")}
        command = [sys.executable, str(SCRIPT), NAME, "local-cpu", *GOLDEN_SETTINGS, *overrides]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True
        )
        os.environ["CEDAR_STATE_DIR"] = str(folder / "state")

    def wait_ready(self) -> None:
        """Read events until the cluster is ready; fails with its log when it does not become so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints, too
                self.events.append(json.loads(line))
                if "ready" in self.events[-1]:
                    return
        raise AssertionError(f"not started: {self.events[-3:]}\n{self.log()}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    @property
    def state(self) -> ClusterState:
        return state_file.find(NAME)

    @property
    def address(self) -> str:
        return self.state.address

    def status(self) -> ClusterStatus:
        return remote.status(self.state, timeout_s=5.0)

    def workers(self, stage: str) -> list[WorkerReport]:
        return [report for report in self.status().workers if report.entry.stage == stage]

    def wait(self, what: str, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}\n{self.status()}"
            time.sleep(0.05)

    def idle(self) -> bool:
        """No request, no leased page, no leased slot, on any worker."""
        return all(
            report.status is not None
            and not (report.status.active or report.status.queued)
            and not (report.status.pages_leased or report.status.slots_leased)
            for stage in ("encoder", "prefill", "decode", "gateway")
            for report in self.workers(stage)
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self.process.stdout is not None
        with self._log, self.process.stdout:
            self._stop(number)

    def _stop(self, number: int) -> None:
        if self.process.poll() is None:
            state = self.state
            self.process.send_signal(number)
            code = self.process.wait(timeout=60)
            self.events += [json.loads(line) for line in self.process.stdout or () if line.startswith("{")]
            left = of_session(state.ray_temp_dir)
            assert not left, f"processes left: {left}"
            assert not Path(state.ray_temp_dir).exists()
            assert not [s for s in state_file.list_clusters() if s.name == NAME]
            assert code == 0, self.log()
