"""The one thread that writes: collects puts into group commits and answers each when it is durable.

Values are written as they come. A commit is what one sync covers: it begins when ``commit_values`` are
written, or ``commit_wait_s`` after the first, or at once if they were written while the sync before ran;
``commit_bytes`` is the most in one. While a sync waits for the disk (``sync_thread``) the next commit is
written. A page becomes visible after its sync, never before, and in the order of writing; put-if-absent:
whoever came first stays. The queue is bounded in bytes. What fails takes everything with it that was written
after it, since a file system that has lost one write may lie about the next.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from cedar.kvstore.commit import Committer, WriteFailed, Written
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.errors import Refused, StoreClosed
from cedar.kvstore.index import PageIndex
from cedar.kvstore.judge import Judge, Verdict
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment
from cedar.kvstore.stats import Counters
from cedar.kvstore.sync_thread import SyncThread

log = logging.getLogger(__name__)

QUEUE_RETRY_S: Final = 0.02
"""About two commits."""


@dataclass
class _Job:
    items: Sequence[PutItem]
    carry: bool
    bytes: int
    future: Future[PutCounts] = field(default_factory=Future)
    counts: PutCounts = field(default_factory=PutCounts)
    new: int = 0
    twins: int = 0

    def refuse(self, reason: str) -> None:
        """What was to be stored, or to be present with another's, will not be; nor what nobody has judged."""
        counts = self.counts
        lost = len(self.items) - counts.present - counts.conflicts - counts.refused
        if lost:
            self.counts.refused += lost
            self.counts.reason = reason
        self.new = self.twins = 0


@dataclass
class _Commit:
    """Jobs that are answered together. ``follows``: it began while another one's sync was under way."""

    began_s: float
    follows: bool
    jobs: list[_Job] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    values: int = 0
    bytes: int = 0


class GroupCommit:
    """Queue and writer thread of one tier."""

    def __init__(
        self,
        config: SsdConfig,
        committer: Committer,
        index: PageIndex,
        counters: Counters,
        judge: Judge,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._committer = committer
        self._index = index
        self._counters = counters
        self._judge = judge
        self._now_s = now_s
        self._chores: deque[tuple[int, Callable[[], Any], Future[Any]]] = deque()
        self._submitted = self._answered = 0
        self._jobs: deque[_Job] = deque()
        self._dead: list[tuple[Segment, bytes, Row]] = []
        self._queued_bytes = 0
        self._closing = self._index_due = False
        self._next: _Commit | None = None  # is being written; like the next two, of the writer thread alone
        self._syncing: _Commit | None = None
        self._waiting: dict[bytes, PutItem] = {}  # what both hold
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._sync = SyncThread(self._notify)
        self._thread = threading.Thread(target=self._run, name="cedar-store-writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for a commit."""
        return self._queued_bytes

    def submit(self, items: Sequence[PutItem], *, carry: bool = False) -> Future[PutCounts]:
        """Queue values; the future is set after their commit. Refused when there is no room for them.

        ``carry``: the pages are held, and are to be copied into the open segment.
        """
        job = _Job(items, carry, sum(len(item.value) for item in items))
        job.future.set_running_or_notify_cancel()  # a caller that leaves must not take the answer away
        self._expect_own_process()
        with self._wake:
            if self._closing:
                raise StoreClosed("the store is closed")
            if self._queued_bytes and self._queued_bytes + job.bytes > self._config.queue_bytes:
                raise Refused("queue", QUEUE_RETRY_S)
            self._queued_bytes += job.bytes
            self._jobs.append(job)
            self._submitted += 1
            self._wake.notify()
        return job.future

    def call(self, chore: Callable[[], Any]) -> Future[Any]:
        """Run ``chore`` on the writer thread, between two commits, after all that was submitted before."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._expect_own_process()
        with self._wake:
            if self._closing:
                raise StoreClosed("the store is closed")
            self._chores.append((self._submitted, chore, future))
            self._wake.notify()
        return future

    def _expect_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed("a store that was open before a fork cannot be used in the child")

    def mark_dead(self, segment: Segment, key: bytes, row: Row) -> None:
        """A page failed verification: see that a restart does not find it again."""
        with self._wake:
            self._dead.append((segment, key, row))
            self._wake.notify()

    def keep_index(self) -> None:
        """See to the indices that lag behind, even if nothing is put."""
        with self._wake:
            self._index_due = True
            self._wake.notify()

    def stop(self) -> None:
        """Commit what is queued, then end the threads."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._sync.stop()

    # ---- the writer thread ----

    def _run(self) -> None:
        while True:
            jobs = self._collect()
            self._end_sync(wait=False)
            if jobs:
                self._take(jobs)
            self._begin_sync()
            if self._chores and self._chores[0][0] <= self._answered:
                self._drain()
                self._do_chores()
            self._mark_dead_rows()
            ending = self._closing and not (self._jobs or self._next or self._syncing or self._chores)
            try:
                self._committer.keep_index(everything=ending)
            except Exception:  # no memory, for one: puts must go on, and need no index
                log.exception("indices not written")
            if ending:
                return

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _collect(self) -> list[_Job]:
        """Wait until there is something to do; the jobs that the next commit has room for."""
        with self._wake:
            while True:
                jobs: list[_Job] = []
                size = self._next.bytes if self._next else 0
                while self._jobs and (not size or size + self._jobs[0].bytes <= self._config.commit_bytes):
                    jobs.append(self._jobs.popleft())
                    size += jobs[-1].bytes
                other = self._dead or self._index_due or (self._syncing and self._sync.ended)
                if self._chores:
                    other = other or self._chores[0][0] <= self._answered
                ending = self._closing and self._syncing is None
                if jobs or other or ending or self._due():
                    self._index_due = False
                    return jobs
                self._wake.wait(self._left_s())

    def _due(self) -> bool:
        """Whether the next commit may begin its sync, and should."""
        commit = self._next
        if commit is None or self._syncing is not None:
            return False
        config = self._config
        enough = commit.values >= config.commit_values or commit.follows or not commit.written
        full = self._jobs and commit.bytes + self._jobs[0].bytes > config.commit_bytes
        urgent = self._chores or self._closing
        return bool(enough or full or urgent or time.monotonic() >= commit.began_s + config.commit_wait_s)

    def _left_s(self) -> float | None:
        if self._next is None or self._syncing is not None:
            return None
        return max(self._next.began_s + self._config.commit_wait_s - time.monotonic(), 0.0)

    def _take(self, jobs: list[_Job]) -> None:
        """Write what is new in these jobs."""
        now_s = self._now_s()
        if self._committer.changes_segment(now_s):
            self._drain()  # a commit has one file
        commit = self._next
        if commit is None:
            commit = self._next = _Commit(time.monotonic(), self._syncing is not None)
        commit.jobs += jobs
        commit.values += sum(len(job.items) for job in jobs)
        commit.bytes += sum(job.bytes for job in jobs)
        new: dict[bytes, PutItem] = {}
        reason = "disk"
        try:
            for job in jobs:
                for item in job.items:
                    if self._judged(job, item, now_s):
                        self._waiting[item.key] = new[item.key] = item
            outcome = self._committer.write(new, now_s) if new else ""
            if isinstance(outcome, Written):
                commit.written.append(outcome)
                return
            reason = outcome
        except WriteFailed as failure:
            self._end_sync(wait=True)  # what was written before may be on disk all the same
            if self._next is not None:
                self._lose(failure.error)
            return
        except Exception:  # a bug here must not leave callers waiting
            log.exception("group commit failed")
        if reason:
            for key in new:
                del self._waiting[key]
            for job in jobs:
                job.refuse(reason)

    def _judged(self, job: _Job, item: PutItem, now_s: float) -> bool:
        """Count one value; whether it is to be stored."""
        verdict = self._judge.verdict(item, self._waiting, now_s, job.carry)
        if verdict is Verdict.NEW:
            job.new += 1
            return True
        if verdict is Verdict.OVER_QUOTA:
            job.counts.refused += 1
            job.counts.reason = "quota"
            return False
        if verdict is Verdict.TWIN:
            job.twins += 1
        elif verdict is Verdict.PRESENT:
            job.counts.present += 1
        else:
            job.counts.conflicts += 1
        if not job.carry and item.used_s is None:
            self._index.touch((item.key,), now_s)
        return False

    def _begin_sync(self) -> None:
        """Have the next commit synced, if it is time."""
        with self._wake:
            due = self._due()
        if due:
            self._sync_next()

    def _sync_next(self) -> None:
        """Begin to sync the next commit; what needs no sync is answered at once."""
        commit, self._next = self._next, None
        if commit is None:
            return
        if commit.written and self._config.durability == "batch":
            self._syncing = commit
            self._sync.start(commit.written[0].segment.sync_values)
        else:
            self._publish(commit)

    def _end_sync(self, *, wait: bool) -> None:
        """Publish the commit whose sync is over."""
        commit = self._syncing
        if commit is None or not (wait or self._sync.ended):
            return
        error = self._sync.outcome()
        if error is not None:
            self._lose(error)
            return
        self._syncing = None
        self._publish(commit)

    def _drain(self) -> None:
        """Sync and answer all that has been written."""
        self._end_sync(wait=True)
        self._sync_next()
        self._end_sync(wait=True)

    def _publish(self, commit: _Commit) -> None:
        """Make a commit visible, and answer it."""
        try:
            self._committer.publish(commit.written)
        except Exception:
            log.exception("group commit failed")
            for job in commit.jobs:
                job.refuse("disk")
        for written in commit.written:
            for key in written.items:
                self._waiting.pop(key, None)
        self._answer(commit)

    def _lose(self, error: Exception) -> None:
        """The disk failed: what is not known to be on it is refused."""
        commits = [commit for commit in (self._syncing, self._next) if commit is not None]
        self._syncing = self._next = None
        try:
            self._committer.fail(error, len(self._waiting))
        except Exception:  # whatever it is, callers must not wait for ever
            log.exception("group commit failed")
        self._waiting.clear()
        for commit in commits:
            for job in commit.jobs:
                job.refuse("disk")
            self._answer(commit)

    def _answer(self, commit: _Commit) -> None:
        with self._wake:
            self._queued_bytes -= commit.bytes
            self._answered += len(commit.jobs)
        for job in commit.jobs:
            job.counts.stored += job.new
            job.counts.present += job.twins
            self._count(job)
            job.future.set_result(job.counts)

    def _do_chores(self) -> None:
        while self._chores and self._chores[0][0] <= self._answered:
            _, chore, future = self._chores.popleft()
            try:
                future.set_result(chore())
            except Exception as error:
                log.exception("a chore of the writer failed")
                future.set_exception(error)

    def _mark_dead_rows(self) -> None:
        with self._wake:
            dead, self._dead = self._dead, []
        for segment, key, row in dead:
            self._committer.mark_dead(segment, [(key, row)])

    def _count(self, job: _Job) -> None:
        if job.carry:
            self._counters.add("store_pages_carried", job.counts.stored)
            return
        self._counters.add("store_puts_stored", job.counts.stored)
        self._counters.add("store_puts_present", job.counts.present)
        self._counters.add("store_puts_conflict", job.counts.conflicts)
        if job.counts.refused:
            self._counters.add("store_puts_refused", job.counts.refused)
            self._counters.add(f"store_puts_refused_{job.counts.reason}", job.counts.refused)
            self._counters.observer.refused(job.counts.reason, job.counts.refused)
