"""Progress of long work on pages: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Final, TextIO

from ..screen import size

EVERY_S: Final = 5.0


class StepProgress:
    """A context manager for work whose end is not known: tells what ``at`` was given, when it changes."""

    def __init__(self, what: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._what = what
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._told = ""

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._told and self._stream.isatty():
            print(file=self._stream)

    def at(self, how_far: str) -> None:
        """The work is so far."""
        if self._quiet or how_far == self._told:
            return
        self._told = how_far
        text = f"  {self._what}: {how_far}"
        if self._stream.isatty():
            print(f"\r{text}\x1b[K", end="", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)


class PageProgress:
    """A context manager; ``advance`` says how far it is. Writes to stderr: stdout is for programs."""

    def __init__(self, what: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._what = what
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._began_s = self._told_s = time.monotonic()
        self.pages = 0
        self.bytes = 0

    def __enter__(self) -> PageProgress:
        if not self._quiet and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                TextColumn("pages  {task.fields[rate]}", markup=False), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._task = self._bar.add_task(self._what, total=None, rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def rate(self) -> str:
        """Bytes a second since the start, for people."""
        return f"{size(self.bytes / max(time.monotonic() - self._began_s, 1e-3))}/s"

    def at(self, pages: int, total: int, bytes_done: int) -> None:
        """So many of ``total`` pages are done."""
        self.pages, self.bytes = pages, bytes_done
        if self._bar is not None:
            self._bar.update(self._task, completed=pages, total=total, rate=self.rate)
        elif not self._quiet and time.monotonic() - self._told_s >= EVERY_S:
            self._told_s = time.monotonic()
            print(f"  {self._what}: {pages} of {total} pages, {self.rate}", file=self._stream, flush=True)

    def advance(self, page_bytes: int, total: int) -> None:
        """One page more is done."""
        self.at(self.pages + 1, total, self.bytes + page_bytes)
