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


def start(environment: dict[str, str], cedar_command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*cedar_command, "demo"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )


def signalled(process: subprocess.Popen[str], moment: str, number: signal.Signals) -> str:
    """All that the process says; it gets the signal once it has said ``moment``."""
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
    return said + rest


def test_the_demo_shows_everything_it_promises(environment: dict[str, str], cedar_command: list[str]) -> None:
    """And a Ctrl-C while it tidies up does not cut that short."""
    process = start(environment, cedar_command)
    text = signalled(process, "shutting down", signal.SIGINT)
    assert process.returncode == 0, text
    for words in (
        "ready",
        "a picture",
        "a long text",
        "time: Encoder",
        "pages sealed",
        "bytes of packed KV a token",
        "3 of 3 answers are right",
    ):
        assert words in text, text
    assert "restored from DRAM" in text
    (hit,) = re.findall(r"pages hit +(\d+) +(\d+) +(\d+)", text)
    assert hit[:2] == ("0", "0")
    assert int(hit[2]) >= 4, "the second turn found the long text's pages"
    (drafts,) = re.findall(r"of (\d+) drafted tokens (\d+) were accepted", text)
    assert 0 < int(drafts[1]) <= int(drafts[0])
    (total,) = re.findall(r"done in ([0-9.]+) s", text)
    assert float(total) < 90, text
    assert_nothing_left(environment)


def test_terminated_while_it_starts_it_leaves_nothing_behind(
    environment: dict[str, str], cedar_command: list[str]
) -> None:
    """An interrupt while tokens stream is in test_serve_run.py: one start of a cluster less."""
    process = start(environment, cedar_command)
    text = signalled(process, "still starting", signal.SIGTERM)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert text.rstrip().endswith("cedar: interrupted")
    assert_nothing_left(environment)
