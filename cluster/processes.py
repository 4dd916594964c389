"""Finds and ends processes by id. Linux ``/proc``; nothing here matches names.

A process is identified by pid and start time, so that a reused pid is never ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cedar.cluster.state_file import process_started

# Set to the session's folder while a Ray of our own starts: all of its processes inherit it.
SESSION_VARIABLE = "CEDAR_RAY_SESSION"


@dataclass(frozen=True)
class ProcessId:
    """``started``: clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now."""
        return cls(pid, process_started(pid))

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return self.started != 0 and process_started(self.pid) == self.started


def descendants(root: int) -> list[ProcessId]:
    """Every living process below ``root``, itself not included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[ProcessId] = []
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        process = ProcessId.of(pid)
        if process.started:
            found.append(process)
        queue += children.get(pid, ())
    return found


def of_session(directory: str) -> list[ProcessId]:
    """Every living process that was started with this session's mark in its environment.

    A user's shell or editor that merely has the folder on its command line is none of them.
    """
    mark = f"{SESSION_VARIABLE}={directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked:
            found.append(ProcessId.of(int(entry.name)))
    return [process for process in found if process.started]


def end(processes: Iterable[ProcessId], grace_s: float) -> list[ProcessId]:
    """Ask, wait ``grace_s``, then kill. Returns those that even that did not end."""
    left = _send([p for p in processes if p.alive], signal.SIGTERM)
    left = wait_gone(left, grace_s)
    return wait_gone(_send(left, signal.SIGKILL), 5.0)


def end_session(directory: str, grace_s: float) -> list[ProcessId]:
    """Wait for the processes of a Ray session to end by themselves, then end them. Returns those left.

    A raylet may start another worker while it goes, so one look is not enough.
    """
    deadline_s = time.monotonic() + grace_s
    while (left := of_session(directory)) and time.monotonic() < deadline_s:
        wait_gone(left, deadline_s - time.monotonic())
    return [process for process in end(left, grace_s=2.0) if process.alive] or of_session(directory)


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Those still alive after at most ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    left = [p for p in processes if p.alive]
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = [p for p in left if p.alive]
    return left


def _send(processes: list[ProcessId], number: int) -> list[ProcessId]:
    for process in processes:
        if process.alive:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue
    return processes


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])
