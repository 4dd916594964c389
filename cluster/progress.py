"""Steps of a start or a stop, as they happen: for people who wait. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

StepState = Literal["running", "done", "failed"]
STEPS = ("ray", "serve", "directory", "store", "encoder", "prefill", "decode", "gateway")


@dataclass(frozen=True)
class Step:
    """``elapsed_s``: since this step began. Several steps run at once."""

    name: str
    state: StepState
    detail: str
    elapsed_s: float


OnProgress = Callable[[Step], None]


class Progress:
    """Remembers when each step began, and says each change once."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._say = on_progress or (lambda step: None)
        self._began_s: dict[str, float] = {}
        self._last: dict[str, tuple[str, str]] = {}

    def report(self, name: str, state: StepState, detail: str = "") -> None:
        """Say it, unless it was the last thing said about this step."""
        now_s = time.monotonic()
        began_s = self._began_s.setdefault(name, now_s)
        if self._last.get(name) != (state, detail):
            self._last[name] = (state, detail)
            self._say(Step(name, state, detail, now_s - began_s))

    @contextmanager
    def step(self, name: str, detail: str = "") -> Iterator[None]:
        """A step that is done when the block ends, and failed when it raises."""
        self.report(name, "running", detail)
        try:
            yield
        except BaseException as error:
            self.report(name, "failed", str(error))
            raise
        self.report(name, "done")
