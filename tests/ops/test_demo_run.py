"""`cedar demo` as a user runs it: to its end, and interrupted. Nothing may stay behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """State files of this test's own, and temporary folders that can be counted."""
    scratch = Path(f"/tmp/demo-{os.getpid()}-{time.monotonic_ns() % 100000}")
    scratch.mkdir()
    return {**os.environ, "CEDAR_STATE_DIR": str(tmp_path), "TMPDIR": str(scratch)}


def processes_with(variable: str) -> list[int]:
    """Processes whose environment holds ``variable``: all that a run started, however deep."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def assert_nothing_left(environment: dict[str, str]) -> None:
    mark = f"CEDAR_STATE_DIR={environment['CEDAR_STATE_DIR']}"
    deadline = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(mark) == []
    assert list(Path(environment["CEDAR_STATE_DIR"]).iterdir()) == []
    scratch = Path(environment["TMPDIR"])
    assert [path.name for path in scratch.iterdir()] == []
    scratch.rmdir()


def test_the_demo_shows_everything_it_promises(environment: dict[str, str], cedar_command: list[str]) -> None:
    finished = subprocess.run(
        [*cedar_command, "demo"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    text = finished.stdout
    for words in (
        "ready",
        "turn 1",
        "turn 2",
        "time: Encoder",
        "pages sealed",
        "106 bytes of packed KV a token",
    ):
        assert words in text, text
    assert "restored from DRAM" in text
    (hit,) = re.findall(r"pages hit +(\d+) +(\d+)", text)
    assert int(hit[0]) == 0
    assert int(hit[1]) > 1
    (total,) = re.findall(r"done in ([0-9.]+) s", text)
    assert float(total) < 90, text
    assert_nothing_left(environment)


@pytest.mark.parametrize("moment", ["still starting", "> "])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(
    environment: dict[str, str], cedar_command: list[str], moment: str, number: signal.Signals
) -> None:
    if (moment, number) == ("> ", signal.SIGTERM):
        pytest.skip("the same path as SIGINT there; one start less")
    process = subprocess.Popen(
        [*cedar_command, "demo", "--max-tokens", "200"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    said = ""
    try:
        assert process.stdout is not None
        while moment not in said:
            character = process.stdout.read(1)
            assert character, said
            said += character
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said + rest
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("cedar: interrupted")
    assert_nothing_left(environment)
