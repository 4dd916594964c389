"""What a start finds out before it starts anything, and how failures read. No Ray."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cedar.cluster import launch, remote, state_file
from cedar.cluster.application import _last_line
from cedar.cluster.config_load import load_config
from cedar.cluster.environment import local_ray_environment, worker_environment
from cedar.cluster.errors import ConfigError, NameTaken, PortInUse
from cedar.cluster.model_check import check_checkpoint, check_model
from cedar.cluster.processes import SESSION_VARIABLE, ProcessId, end_session, of_session
from cedar.cluster.ray_runtime import MAX_PARENT_CHARACTERS, local_cpus, session_parent
from cedar.cluster.state_file import ClusterState, WorkerEntry, process_started
from cedar.cluster.worker_configs import decode_config, encoder_config, prefill_config, store_config

from .golden_preset import GOLDEN, GOLDEN_SETTINGS


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path / "state"))


def dead_state(folder: str) -> ClusterState:
    worker = WorkerEntry("decode", "127.0.0.1:1", 1, 1)
    return ClusterState("gone", "127.0.0.1:1", 2**22 - 1, 5, 0.0, folder, "", (worker,))


def sleeper(seconds: float, folder: Path) -> "subprocess.Popen[bytes]":
    """A process that carries the mark of a session."""
    command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    process = subprocess.Popen(command, env={SESSION_VARIABLE: str(folder)})
    while not of_session(str(folder)):
        time.sleep(0.01)
    return process


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"gateway\.port: 127\.0\.0\.1:{port} is in use"):
            launch.start(load_config("local-cpu", [f"gateway.port={port}"]))
        with pytest.raises(PortInUse, match=rf"gateway\.metrics_port: 127\.0\.0\.1:{port} is in use"):
            launch.start(load_config("local-cpu", ["gateway.port=0", f"gateway.metrics_port={port}"]))
    assert state_file.list_clusters() == []


def test_a_missing_or_other_checkpoint_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: /none \(a checkpoint folder"):
        launch.start(load_config("local-cpu", ["gateway.port=0", "model.path=/none"]))
    config = json.loads((GOLDEN / "config.json").read_text())
    config["text_config"]["sliding_window"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"text_config\.sliding_window is 32, not 16"):
        check_checkpoint(load_config("local-cpu", [*GOLDEN_SETTINGS, f"model.path={tmp_path}"]))
    check_checkpoint(load_config("local-cpu", [f"model.path={tmp_path}", "model.preset="]))
    check_checkpoint(load_config("local-cpu", ["model.path=s3://bucket/weights"]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.page_tokens=33"], r"model\.page_tokens: 33 \(must be a multiple of every ratio, here \d+ "),
        (["model.page_tokens=33", "model.path=/none"], r"model\.page_tokens: 33 .*model preset tiny"),
        (["model.page_tokens=33", "model.path=s3://bucket/weights"], r"model\.page_tokens: 33 "),
        (["model.page_tokens=33", "model.preset="], r"model\.page_tokens: 33 .*config\.json"),
        (["model.page_tokens=1048576"], r"model\.page_tokens: 1048576 \(must be 1 to 65536"),
        (["model.preset=tinny"], r"model\.preset: 'tinny' is no model preset; did you mean 'tiny'"),
        (["model.preset=tinny", "model.path=s3://bucket/weights"], r"model\.preset: 'tinny' "),
        (["model.path={folder}"], r"model\.path: .*a checkpoint folder with a config\.json is needed"),
        (["model.path={folder}/broken"], r"model\.path: .*not JSON"),
        (["model.path={folder}/list"], r"model\.path: .*a JSON object is needed, not list"),
        (
            ["model.path={folder}/undrafted", "model.preset=", "decode.drafting=true"],
            r"decode\.drafting: true, but .*undrafted/config\.json: .*num_nextn_predict_layers",
        ),
        (["model.path={folder}/empty", "model.preset="], r"model\.path: .*config\.json: \w+=.*must be "),
    ],
)
def test_an_impossible_model_is_refused_by_a_check_and_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    golden = json.loads((GOLDEN / "config.json").read_text())
    text = golden["text_config"]
    text["num_nextn_predict_layers"], text["compress_ratios"] = 0, text["compress_ratios"][:12]
    contents = {"broken": "{", "list": "[]", "empty": "{}", "undrafted": json.dumps(golden)}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    monkeypatch.setattr("cedar.cluster.ray_runtime.RaySession.start", lambda *_, **__: pytest.fail("Ray"))
    overrides = [override.format(folder=tmp_path) for override in overrides]
    config = load_config("local-cpu", [*GOLDEN_SETTINGS, "gateway.port=0", *overrides])
    with pytest.raises(ConfigError, match=said):
        check_model(config)
    with pytest.raises(ConfigError, match=said):
        launch.start(config)


def test_a_checkpoint_that_is_not_there_is_valid_but_no_start(tmp_path: Path) -> None:
    assert check_model(load_config("local-cpu")) is None
    for path, said in ((f"{tmp_path}/none", "no checkpoint at "), ('""', "no checkpoint named")):
        config = load_config("local-cpu", [f"model.path={path}"])
        assert said in str(check_model(config))
        with pytest.raises(ConfigError, match=r"--set model\.path=/path/to/checkpoint"):
            check_checkpoint(config)
    assert "not read" in str(check_model(load_config("local-cpu", ["model.path=s3://bucket/weights"])))


def test_a_name_that_runs_is_not_started_twice() -> None:
    pid = os.getpid()
    state_file.write(ClusterState("mine", "", pid, process_started(pid), 0.0, "", ""))
    with pytest.raises(NameTaken, match=f"cluster 'mine' runs already \\(process {pid}\\).*--name"):
        launch.start(load_config("local-cpu"), name="mine")


def test_what_a_dead_owner_left_is_cleaned_up(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    left = sleeper(60, folder)
    try:
        state_file.write(dead_state(str(folder)))
        remote.stop(state_file.find("gone"))
        assert left.wait(timeout=5) != 0
        assert not folder.exists()
        assert state_file.list_clusters() == []
    finally:
        left.kill()
        left.wait()


def test_processes_that_end_by_themselves_are_only_waited_for(tmp_path: Path) -> None:
    short = sleeper(0.5, tmp_path)
    waiter = ProcessId.of(short.pid)
    assert end_session(str(tmp_path), grace_s=10) == []
    assert not waiter.alive
    assert short.wait() == 0


def test_status_of_a_cluster_that_does_not_answer() -> None:
    status = remote.status(dead_state(""), timeout_s=1.0)
    assert not status.ready
    assert status.model is None
    assert status.workers[0].error in ("unavailable", "deadline_exceeded")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            'Traceback:\n  File "x", line 1\ncedar.model.errors.CheckpointError: tensor a.b is missing\n',
            "CheckpointError: tensor a.b is missing",
        ),
        ("The replica died.\nRetrying 2 more times.", "Retrying 2 more times."),
        ("", "failed"),
    ],
)
def test_the_reason_is_found_in_a_traceback(message: str, said: str) -> None:
    assert _last_line(message) == said


def test_every_process_gets_the_same_authentication_mode() -> None:
    config = load_config("local-cpu", ["ray.auth=token"])
    for environment in (worker_environment(config), local_ray_environment(config)):
        assert environment["RAY_AUTH_MODE"] == "token"
        assert int(environment["MALLOC_MMAP_THRESHOLD_"]) >= 1 << 27


def test_ray_starts_a_worker_ahead_for_each_process() -> None:
    assert local_cpus(load_config("local-cpu")) == 9


def test_session_folders_are_short_enough_for_sockets() -> None:
    assert session_parent(None, "/var/tmp") == "/var/tmp"
    assert session_parent(None, "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T") == "/tmp"
    assert session_parent("/run/cedar", "/var/tmp") == "/run/cedar"
    with pytest.raises(ConfigError, match=r"ray\.temp_directory: /x+ \(at most 28 characters\)"):
        session_parent("/" + "x" * 30)
    longest = "/session_2026-11-30_23-59-59_999999_4194304/sockets/plasma_store"
    assert MAX_PARENT_CHARACTERS + len("/cedar-12345678") + len(longest) <= 107


def test_settings_reach_the_workers() -> None:
    config = load_config("local-cpu", ["decode.pages=77", "prefill.chunk_pages=3", "encoder.max_queue=5"])
    assert encoder_config(config, "h").max_queue == 5
    assert prefill_config(config, "h").chunk_pages == 3
    assert (decode_config(config, "h").pages, decode_config(config, "h").host) == (77, "h")
    assert decode_config(config, "h").page_tokens == prefill_config(config, "h").page_tokens == 256
    for drafting in (True, False):  # Decode drafts only with what Prefill keeps for it
        asked = load_config("local-cpu", [f"decode.drafting={drafting}", "decode.draft_confidence=0.7"])
        assert decode_config(asked, "h").drafting is prefill_config(asked, "h").drafting is drafting
        assert decode_config(asked, "h").draft_confidence == 0.7
    images = load_config(
        "local-cpu", ["gateway.max_image_bytes=25000000", "gateway.max_image_pixels=80000000"]
    )
    assert encoder_config(images, "h").max_image_bytes == 25_000_000, "what the gateway lets in is encoded"
    assert encoder_config(images, "h").max_image_pixels == 80_000_000
    store = store_config(config, "/s", "h")
    assert (store.ssd.ttl_s, store.window.budget_bytes) == (72 * 3600, 64 << 20)


def test_session_folders_are_removed_with_everything_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    (folder / "store" / "node-0").mkdir(parents=True)
    state_file.write(dead_state(str(folder)))
    remote.stop(state_file.find())
    assert not folder.exists()
    shutil.rmtree(tmp_path / "state")
