import os
import subprocess
import sys
from pathlib import Path

import pytest
from cedar.cluster import state_file
from cedar.cluster.errors import ClusterNotFound, ConfigError
from cedar.cluster.processes import SESSION_VARIABLE, ProcessId, descendants, end, of_session
from cedar.cluster.progress import Progress, Step
from cedar.cluster.state_file import ClusterState, WorkerEntry, process_started


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path / "state"))


def cluster(name: str = "one") -> ClusterState:
    pid = os.getpid()
    workers = (WorkerEntry("decode", "127.0.0.1:1", 2, 3),)
    return ClusterState(name, "127.0.0.1:9", pid, process_started(pid), 0.5, "/tmp/x", "model: {}\n", workers)


def test_written_state_is_found() -> None:
    state_file.write(cluster())
    assert state_file.find() == cluster()
    assert state_file.find("one").owner_alive
    assert state_file.state_path("one").stat().st_mode & 0o777 == 0o600
    state_file.remove("one")
    state_file.remove("one")
    assert state_file.list_clusters() == []


def test_not_found_says_what_to_do() -> None:
    with pytest.raises(ClusterNotFound, match="cedar serve"):
        state_file.find()
    with pytest.raises(ClusterNotFound, match="'two'"):
        state_file.find("two")
    state_file.write(cluster("one"))
    state_file.write(cluster("two"))
    with pytest.raises(ClusterNotFound, match="one, two"):
        state_file.find()


def test_damaged_files_are_left_out() -> None:
    state_file.write(cluster())
    state_file.state_path("bad").write_text("{")
    assert [state.name for state in state_file.list_clusters()] == ["one"]
    with pytest.raises(ClusterNotFound, match="remove it"):
        state_file.find("bad")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65])
def test_names_are_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match="name:"):
        state_file.state_path(name)


def test_a_reused_pid_is_not_the_owner() -> None:
    state = cluster()
    stranger = ClusterState(**{**state.__dict__, "pid_started": state.pid_started - 1})
    assert state.owner_alive
    assert not stranger.owner_alive


def test_processes_are_found_and_ended_by_id(tmp_path: Path) -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); p.wait()"
    environment = {**os.environ, SESSION_VARIABLE: str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    onlooker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])
    try:
        while not (below := descendants(parent.pid)):
            pass
        found = of_session(str(tmp_path))
        assert {*below, ProcessId.of(parent.pid)} <= set(found)
        assert ProcessId.of(onlooker.pid) not in found
        stranger = ProcessId(parent.pid, 1)
        assert end([stranger], grace_s=0.1) == []
        assert parent.poll() is None, "same pid, other process: left alone"
        assert end(found, grace_s=2) == []
    finally:
        for process in (parent, onlooker):
            process.kill()
            process.wait()


def test_progress_says_each_change_once() -> None:
    said: list[Step] = []
    progress = Progress(said.append)
    for detail in ("0 of 1", "0 of 1", "1 of 1"):
        progress.report("decode", "running", detail)
    with pytest.raises(ValueError, match="broke"), progress.step("ray"):
        raise ValueError("broke")
    assert [(step.name, step.state, step.detail) for step in said] == [
        ("decode", "running", "0 of 1"),
        ("decode", "running", "1 of 1"),
        ("ray", "running", ""),
        ("ray", "failed", "broke"),
    ]
