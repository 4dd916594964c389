"""Small files that say which clusters this machine's user runs, so that other commands find them.

One ``<name>.json`` each, in ``$CEDAR_STATE_DIR``, else ``$XDG_STATE_HOME/cedar``, else
``~/.local/state/cedar``. Written whole and renamed into place. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cedar.cluster.errors import ClusterNotFound, ConfigError


@dataclass(frozen=True)
class WorkerEntry:
    """One process of a cluster. ``stage``: encoder, prefill, decode, store or gateway."""

    stage: str
    address: str
    pid: int
    incarnation: int
    node: str = ""


@dataclass(frozen=True)
class ClusterState:
    """What is known of a running cluster. ``pid``: of the process that owns it; ``pid_started``: its start
    time in
    clock ticks since boot, so that a reused pid is not taken for it."""

    name: str
    address: str
    pid: int
    pid_started: int
    started_unix_s: float
    ray_temp_dir: str
    config_yaml: str
    workers: tuple[WorkerEntry, ...] = ()

    @property
    def owner_alive(self) -> bool:
        """Whether the owning process still runs."""
        return process_started(self.pid) == self.pid_started

    def with_workers(self, workers: tuple[WorkerEntry, ...]) -> ClusterState:
        """The same cluster with other workers."""
        return replace(self, workers=workers)


def process_started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when there is none (or it is a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def state_directory() -> Path:
    """Where state files are."""
    explicit = os.environ.get("CEDAR_STATE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "cedar"


def state_path(name: str) -> Path:
    """The file of one cluster. ``ConfigError`` for a name that is no plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"name: {name!r} (letters, digits, '.', '_' and '-', at most 64)")
    return state_directory() / f"{name}.json"


def write(state: ClusterState) -> None:
    """Write or replace the file of this cluster; readable by its user alone."""
    path = state_path(state.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(asdict(state), indent=1), "utf-8")
    scratch.replace(path)


def remove(name: str) -> None:
    """Forget a cluster. No error when it is unknown."""
    state_path(name).unlink(missing_ok=True)


def read(name: str) -> ClusterState:
    """The cluster of that name. Raises ``ClusterNotFound``."""
    try:
        data = json.loads(state_path(name).read_text("utf-8"))
        workers = tuple(WorkerEntry(**entry) for entry in data.pop("workers"))
        return ClusterState(**data, workers=workers)
    except FileNotFoundError:
        raise ClusterNotFound(
            f"no cluster {name!r} runs here; start one with: cedar serve -c local-cpu"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterNotFound(f"{state_path(name)} cannot be read ({error}); remove it") from error


def list_clusters() -> list[ClusterState]:
    """Every cluster with a state file, its owner alive or not; unreadable files are left out."""
    found = []
    for path in sorted(state_directory().glob("*.json")):
        try:
            found.append(read(path.stem))
        except ClusterNotFound:
            continue
    return found


def find(name: str | None = None) -> ClusterState:
    """The named cluster, or the only one there is. Raises ``ClusterNotFound`` with what to do."""
    if name is not None:
        return read(name)
    clusters = list_clusters()
    if not clusters:
        raise ClusterNotFound("no cluster runs here; start one with: cedar serve -c local-cpu")
    if len(clusters) > 1:
        raise ClusterNotFound(f"several clusters run here ({', '.join(c.name for c in clusters)}); say which")
    return clusters[0]
