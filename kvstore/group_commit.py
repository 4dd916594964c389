"""The one thread that writes: collects puts into group commits and answers each when it is durable.

A commit takes what is queued, up to ``commit_bytes``, in one write and one sync; it waits for company until
it has ``commit_values``, but not longer than ``commit_wait_s`` after the first. A page becomes visible after
its commit, never before; put-if-absent: whoever came first stays. The queue is bounded in bytes.
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

from cedar.kvstore.commit import Committer
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.errors import CorruptValue, Refused, StoreClosed
from cedar.kvstore.header import CHECKSUM_BYTES, HEADER_BYTES, read_header, verify_value
from cedar.kvstore.index import Entry, PageIndex
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, SegmentGone
from cedar.kvstore.stats import Counters
from cedar.kvstore.tenants import TenantTable

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


class GroupCommit:
    """Queue and writer thread of one tier."""

    def __init__(
        self,
        config: SsdConfig,
        committer: Committer,
        index: PageIndex,
        counters: Counters,
        *,
        now_s: Callable[[], float],
        tenants: TenantTable,
        on_quota: Callable[[bytes], None],
        on_corrupt: Callable[[bytes, Entry, CorruptValue], None],
    ) -> None:
        self._config = config
        self._committer = committer
        self._index = index
        self._counters = counters
        self._now_s = now_s
        self._tenants = tenants
        self._on_quota = on_quota
        self._on_corrupt = on_corrupt
        self._chores: deque[tuple[int, Callable[[], Any], Future[Any]]] = deque()
        self._submitted = self._answered = 0
        self._jobs: deque[_Job] = deque()
        self._dead: list[tuple[Segment, bytes, Row]] = []
        self._queued_bytes = 0
        self._closing = self._index_due = False
        self._pid = os.getpid()
        self._wake = threading.Condition()
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
        """Run ``chore`` on the writer thread, after everything that has been submitted until now."""
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
        """Commit what is queued, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            jobs = self._collect()
            if jobs:
                self._answer(jobs)
            self._mark_dead_rows()
            self._do_chores()
            ending = not jobs and not self._chores and self._closing
            try:
                self._committer.keep_index(everything=ending)
            except Exception:  # no memory, for one: puts must go on, and need no index
                log.exception("indices not written")
            if ending:
                return

    def _collect(self) -> list[_Job]:
        """Wait for a job, then for company; empty when there is other work or nothing is left at the end."""
        with self._wake:
            while not (self._jobs or self._closing or self._dead or self._chores or self._index_due):
                self._wake.wait()
            self._index_due = False
            deadline_s = time.monotonic() + self._config.commit_wait_s
            jobs: list[_Job] = []
            values = size = 0
            while True:
                while self._jobs and (not jobs or size + self._jobs[0].bytes <= self._config.commit_bytes):
                    jobs.append(self._jobs.popleft())
                    values += len(jobs[-1].items)
                    size += jobs[-1].bytes
                left_s = deadline_s - time.monotonic()
                enough = values >= self._config.commit_values or self._jobs or not jobs
                if enough or left_s <= 0 or self._closing:
                    return jobs
                self._wake.wait(left_s)

    def _answer(self, jobs: list[_Job]) -> None:
        try:
            self._commit(jobs)
        except Exception:  # a bug here must not leave callers waiting
            log.exception("group commit failed")
            for job in jobs:
                job.counts = PutCounts(refused=len(job.items), reason="disk")
        with self._wake:
            self._queued_bytes -= sum(job.bytes for job in jobs)
            self._answered += len(jobs)
        for job in jobs:
            self._count(job)
            job.future.set_result(job.counts)

    def _commit(self, jobs: list[_Job]) -> None:
        now_s = self._now_s()
        pending: dict[bytes, PutItem] = {}
        for job in jobs:
            for item in job.items:
                self._judge(job, item, pending, now_s)
        reason = self._committer.write(pending, now_s) if pending else ""
        for job in jobs:
            if reason and job.new:
                job.counts.refused += job.new
                job.counts.reason = reason
            else:
                job.counts.stored += job.new

    def _judge(self, job: _Job, item: PutItem, pending: dict[bytes, PutItem], now_s: float) -> None:
        """Sort one value into new, present and conflicting."""
        entry = self._index.live(item.key, now_s)
        twin = pending.get(item.key)
        if twin is not None:
            same: bool | None = _stored_checksum(twin.value) == _stored_checksum(item.value)
        elif job.carry:
            # One that is gone, or has reached the open segment already, needs no carrying.
            same = None if entry is not None and entry.segment.closed_to_writes else True
        else:
            same = None if entry is None else self._same_as_stored(item, entry)
        if same is None:
            if not job.carry and self._over_quota(item, pending):
                job.counts.refused += 1
                job.counts.reason = "quota"
                return
            pending[item.key] = item
            job.new += 1
        elif same:
            job.counts.present += 1
        else:
            job.counts.conflicts += 1
        if not job.carry and item.used_s is None:
            self._index.touch((item.key,), now_s)

    def _over_quota(self, item: PutItem, pending: dict[bytes, PutItem]) -> bool:
        quota = self._tenants.quota_bytes(item.tenant)
        if quota == float("inf"):
            return False
        waiting = sum(len(other.value) for other in pending.values() if other.tenant == item.tenant)
        if self._index.tenant_bytes(item.tenant) + waiting + len(item.value) <= quota:
            return False
        self._on_quota(item.tenant)
        return True

    def _same_as_stored(self, item: PutItem, entry: Entry) -> bool | None:
        """Whether the held value has the same bytes; None when it turns out not to be there."""
        segment = entry.segment
        try:
            if segment.header(entry.offset, entry.size) == read_header(item.value):
                return True
            verify_value(segment.read(entry.offset, entry.size), page_key=item.key)
        except CorruptValue as error:  # a flipped bit in the header looks like a conflict
            self._on_corrupt(item.key, entry, error)
            return None
        except (OSError, SegmentGone):
            return None
        return False

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


def _stored_checksum(value: bytes | memoryview) -> bytes:
    return bytes(value[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES])
