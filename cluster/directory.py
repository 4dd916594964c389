"""Who is alive: a pure state, and the view of it that routing reads.

Workers *announce* themselves again and again: the first announcement registers, the next ones are
heartbeats, and after a restart of the directory the next one registers again. Nothing here reads a
clock or does I/O; ``cedar.cluster.directory_actor`` wraps the state for Ray.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a worker is doing. Requests, pages and slots as counts."""

    active: int = 0
    queued: int = 0
    pages_total: int = 0
    pages_leased: int = 0
    slots_total: int = 0
    slots_leased: int = 0

    @property
    def requests(self) -> int:
        """Active and queued."""
        return self.active + self.queued

    @property
    def pages_fraction(self) -> float:
        """Leased pages, 0 to 1."""
        return self.pages_leased / self.pages_total if self.pages_total else 0.0

    @property
    def slots_fraction(self) -> float:
        """Leased slots, 0 to 1."""
        return self.slots_leased / self.slots_total if self.slots_total else 0.0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One announcement. ``stage``: encoder, prefill, decode, store or gateway. ``incarnation``: of the
    process.

    ``sequence`` grows with every announcement of an incarnation, so that a late one changes nothing.
    """

    stage: str
    address: str
    incarnation: int
    pid: int = 0
    node: str = ""
    fingerprint: bytes = b""
    draining: bool = False
    sequence: int = 0
    load: Load = field(default_factory=Load)


@dataclass(frozen=True)
class View:
    """What a reader sees. ``version`` changes with membership and suspicion, not with load.

    ``store``: how the store is reached, when it has several nodes (``kvstore.connect``).
    """

    version: int = 0
    epoch: int = 0
    workers: tuple[Worker, ...] = ()
    suspected: frozenset[tuple[str, int]] = frozenset()
    store: str = ""

    @property
    def store_target(self) -> str | None:
        """What to connect to for the store: all of its nodes, or the only one; None when there is none."""
        if self.store:
            return self.store
        nodes = self.stage("store")
        return nodes[0].address if nodes else None

    def stage(self, stage: str) -> tuple[Worker, ...]:
        """Workers of a stage that may get new work: neither suspected nor draining."""
        return tuple(w for w in self.workers if w.stage == stage and self.usable(w))

    def all(self, stage: str) -> tuple[Worker, ...]:
        """Every known worker of a stage."""
        return tuple(w for w in self.workers if w.stage == stage)

    def usable(self, worker: Worker) -> bool:
        """Whether new work may go there."""
        return not worker.draining and (worker.address, worker.incarnation) not in self.suspected


class DirectoryState:
    """Workers by address. One owner; times are the caller's, in seconds, monotonic.

    ``expire_after_s``: silence after which a worker is gone. ``epoch``: tells one directory process from
    the next. ``store``: see ``View``.
    """

    def __init__(self, expire_after_s: float, epoch: int = 0, store: str = "") -> None:
        self._expire_after_s = expire_after_s
        self.store = store
        self.epoch = epoch
        self._workers: dict[str, Worker] = {}
        self._seen_s: dict[str, float] = {}
        self._suspected: dict[str, int] = {}
        self._gone: dict[tuple[str, int], float] = {}
        self._version = 0

    def announce(self, worker: Worker, now_s: float) -> bool:
        """Register or refresh. False when the announcement is late: of a gone or an earlier incarnation."""
        known = self._workers.get(worker.address)
        if (worker.address, worker.incarnation) in self._gone:
            return False
        if known is not None and known.incarnation == worker.incarnation and worker.sequence < known.sequence:
            return False
        if known is not None and known.incarnation != worker.incarnation:
            self._forget(worker.address, now_s)
            known = None
        if known is None or (known.draining, known.stage) != (worker.draining, worker.stage):
            self._version += 1
        if self._suspected.pop(worker.address, None) is not None:
            self._version += 1
        self._workers[worker.address] = worker
        self._seen_s[worker.address] = now_s
        return True

    def leave(self, address: str, incarnation: int, now_s: float) -> None:
        """A worker says goodbye. Late goodbyes of an earlier incarnation are no-ops."""
        known = self._workers.get(address)
        if known is not None and known.incarnation == incarnation:
            self._forget(address, now_s)

    def suspect(self, address: str, incarnation: int) -> None:
        """A client could not reach this process: no new work until it announces itself again."""
        known = self._workers.get(address)
        if (
            known is not None
            and known.incarnation == incarnation
            and self._suspected.get(address) != incarnation
        ):
            self._suspected[address] = incarnation
            self._version += 1

    def expire(self, now_s: float) -> list[Worker]:
        """Drop workers that have been silent for too long; return them."""
        silent = [a for a, seen in self._seen_s.items() if now_s - seen > self._expire_after_s]
        lost = [self._workers[address] for address in silent]
        for address in silent:
            del self._workers[address], self._seen_s[address]
            self._suspected.pop(address, None)
            self._version += 1
        # A silent worker may come back (its host slept); one that left or was replaced may not, for a while.
        self._gone = {key: at for key, at in self._gone.items() if now_s - at <= 10 * self._expire_after_s}
        return lost

    @property
    def version(self) -> int:
        """Changes with membership and suspicion."""
        return self._version

    def view(self) -> View:
        """The present state."""
        workers = sorted(self._workers.values(), key=lambda w: (w.stage, w.address))
        suspected = frozenset(self._suspected.items())
        return View(self._version, self.epoch, tuple(workers), suspected, self.store)

    def _forget(self, address: str, now_s: float) -> None:
        worker = self._workers.pop(address)
        self._seen_s.pop(address, None)
        self._suspected.pop(address, None)
        self._gone[(address, worker.incarnation)] = now_s
        self._version += 1


class ViewKeeper:
    """A client's last view, kept through a restart of the directory.

    One that restarted (another ``epoch``) comes back empty: until its workers have had ``keep_for_s`` to
    announce themselves, those of the last view are kept beside the new ones.
    """

    def __init__(self, keep_for_s: float) -> None:
        self._keep_for_s = keep_for_s
        self._before_restart = View()
        self._restarted_s = float("-inf")
        self.view = View()

    def update(self, fresh: View, now_s: float) -> View:
        """Take in what the directory says now."""
        if fresh.epoch != self.view.epoch:
            self._before_restart = self.view
            self._restarted_s = now_s if self.view.epoch else float("-inf")
        if now_s - self._restarted_s < self._keep_for_s:
            fresh = _side_by_side(self._before_restart, fresh)
        self.view = fresh
        return fresh


def _side_by_side(last: View, fresh: View) -> View:
    known = {w.address for w in fresh.workers}
    kept = tuple(w for w in last.workers if w.address not in known)
    suspected = fresh.suspected | {key for key in last.suspected if key[0] not in known}
    return replace(fresh, workers=(*fresh.workers, *kept), suspected=suspected)


def counts(workers: Iterable[Worker]) -> dict[str, int]:
    """Workers by stage."""
    total: dict[str, int] = {}
    for worker in workers:
        total[worker.stage] = total.get(worker.stage, 0) + 1
    return total
