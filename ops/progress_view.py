"""Shows the steps of a start or stop: spinners on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from cedar.cluster.progress import Step

HEARTBEAT_S = 10.0


class StepView:
    """A context manager that is called with every ``Step``; safe from any thread.

    On a terminal each step has a line with a spinner and a clock. Elsewhere a step prints one
    line when it ends, and a line says every ten seconds what is still going on. Steps after ``close`` are
    those of the stop: a line each, on a terminal too.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        self._tasks: dict[str, Any] = {}
        self._bar: Any = None
        self._closed = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> StepView:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
        else:
            self._beat = threading.Thread(target=self._heartbeat, name="progress", daemon=True)
            self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the screen to others. Idempotent."""
        self._closed.set()
        if self._bar is not None:
            self._bar.stop()
        if self._beat is not None:
            self._beat.join()

    def __call__(self, step: Step) -> None:
        """Show a step's new state."""
        text = f"{step.name:<8} {step.detail}".rstrip()
        with self._lock:
            if step.state == "running":
                self._running.setdefault(step.name, time.monotonic() - step.elapsed_s)
            else:
                self._running.pop(step.name, None)
            stopping = self._closed.is_set()
            if self._bar is not None and not stopping:
                self._show(step.name, text, step.state)
            elif step.state != "running":
                mark = "failed" if step.state == "failed" else "stopped" if stopping else "ready"
                print(f"  {mark:<8}{step.elapsed_s:5.1f} s  {text}", file=self._stream, flush=True)

    def _show(self, name: str, text: str, state: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(text, total=1)
        completed = 1 if state == "done" else 0
        if state == "failed":
            self._bar.stop_task(self._tasks[name])
            text = f"{text} (failed)"
        self._bar.update(self._tasks[name], description=text, completed=completed)

    def _heartbeat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with self._lock:
                waiting = ", ".join(
                    f"{name} {time.monotonic() - at:.0f} s" for name, at in self._running.items()
                )
            if waiting:
                print(f"  still starting: {waiting}", file=self._stream, flush=True)
