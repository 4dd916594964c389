"""Small formatting rules, and progress for people and for logs."""

from __future__ import annotations

import io

import pytest
from cedar.cluster.progress import Progress
from cedar.ops import progress_view, screen
from cedar.ops.progress_view import StepView


def test_model_output_cannot_steer_the_terminal() -> None:
    assert screen.printable("plain\n\ttext, é, 漢") == "plain\n\ttext, é, 漢"
    assert screen.printable("\x1b]0;title\x07\r\x9b1m") == "\\x1b]0;title\\x07\\r\\x9b1m"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (227_840, "222.5 KiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 55, "32,768.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert screen.size(count) == text


def test_durations() -> None:
    assert screen.seconds(0.0123) == "12.3 ms"
    assert screen.seconds(62.5) == "62.50 s"


def test_progress_in_a_log_is_one_line_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_view, "HEARTBEAT_S", 0.01)
    out = io.StringIO()
    with StepView(out) as view:
        steps = Progress(view)
        with steps.step("ray", "version 1"):
            while "still starting: ray" not in out.getvalue():
                pass
        steps.report("serve", "running")
        steps.report("serve", "failed", "no room")
    lines = [line for line in out.getvalue().splitlines() if "still" not in line]
    assert len(lines) == 2
    assert "ready" in lines[0]
    assert "ray" in lines[0]
    assert "failed" in lines[1]
    assert "no room" in lines[1]


@pytest.mark.parametrize("terminal", [True, False])
def test_steps_of_a_stop_are_not_called_ready(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    with StepView(out) as view:
        view.close()
        before = out.getvalue()
        with Progress(view).step("ray"):
            pass
    said = out.getvalue().removeprefix(before)
    assert "stopped" in said
    assert "ready" not in said


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with StepView(out) as view:
        steps = Progress(view)
        steps.report("ray", "running", "starting")
        steps.report("ray", "done")
        steps.report("serve", "failed", "[no] room")
    assert "ray" in out.getvalue()
    assert "[no] room" in out.getvalue()
