"""serve, generate, status and stop as a user types them, on a real local cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
IMAGE = Path(__file__).resolve().parents[1] / "golden" / "v41-tiny" / "image.png"


def cedar(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cedar.ops.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[dict[str, str], subprocess.Popen[str], str]]:
    """A cluster of this module: its environment, its process, its address."""
    with tempfile.TemporaryDirectory(prefix="serve-") as scratch:
        environment = {**os.environ, "CEDAR_STATE_DIR": f"{scratch}/state", "TMPDIR": scratch}
        command = [
            sys.executable,
            "-m",
            "cedar.ops.cli",
            "serve",
            "-c",
            "local-cpu",
            "--set",
            "gateway.port=0",
        ]
        with open(f"{scratch}/log", "w") as log:
            process = subprocess.Popen(
                [*command, "--set", "decode.autoscaling.min=1"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("serving on "), Path(f"{scratch}/log").read_text()
            assert "page_ttl_s: 259200" in Path(f"{scratch}/log").read_text()
            yield environment, process, first.split()[-1]
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=60)


def test_a_session(served: tuple[dict[str, str], subprocess.Popen[str], str], tmp_path: Path) -> None:
    environment, process, address = served

    talk = str(tmp_path / "talk.json")
    asked = ("generate", "What is this?", "--image", str(IMAGE), "--max-tokens", "8", "--seed", "3")
    first = cedar(environment, *asked, "--conversation", talk)
    assert first.returncode == 0, first.stderr
    assert "8 generated (length)" in first.stderr
    again = cedar(environment, *asked)
    assert again.stdout == first.stdout
    second = cedar(environment, "generate", "And now?", "--conversation", talk, "--max-tokens", "4", "--json")
    records = [json.loads(line) for line in second.stdout.splitlines()]
    assert [record["event"] for record in records] == ["started", *["delta"] * 4, "finished"]
    assert records[-1]["sources"]["prompt_tokens"] > 30
    assert len(json.loads(Path(talk).read_text())) == 4

    shown = cedar(environment, "status")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert address in shown.stdout
    record = json.loads(cedar(environment, "status", "--json").stdout)
    stages = sorted(worker["stage"] for worker in record["workers"])
    assert stages == ["decode", "encoder", "gateway", "prefill", "store"]
    assert all(worker["status"]["slots_leased"] == 0 for worker in record["workers"] if worker["status"])

    long = cedar(environment, "generate", "word " * 600)
    assert long.returncode == 2
    assert "512" in long.stderr
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"this is no image")
    refused = cedar(environment, "generate", "What is this?", "--image", str(broken))
    assert refused.returncode == 2
    assert "image" in refused.stderr
    assert "Traceback" not in long.stderr + refused.stderr

    twin = cedar(environment, "serve", "-c", "local-cpu", "--quiet")
    assert twin.returncode == 2
    assert "runs already" in twin.stderr
    assert "--name" in twin.stderr
    taken = cedar(
        environment,
        "serve",
        "-c",
        "local-cpu",
        "--quiet",
        "--name",
        "b",
        "--set",
        f"gateway.port={address.split(':')[1]}",
    )
    assert taken.returncode == 2
    assert "in use" in taken.stderr

    stopped = cedar(environment, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert process.wait(20) == 0
    gone = cedar(environment, "generate", "Hello", "--address", address)
    assert gone.returncode == 3
    assert cedar(environment, "status").returncode == 3
    scratch = Path(environment["TMPDIR"])
    deadline = time.monotonic() + 5
    while (
        left := {path.name for path in scratch.iterdir()} - {"log", "state"}
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()
