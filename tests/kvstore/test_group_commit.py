"""Commits that overlap: the next one is written while the disk has not finished the last."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore import commit
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import MIB
from cedar.kvstore.judge import Judge, Verdict
from cedar.kvstore.put import PutItem
from cedar.kvstore.records import BLOCK_BYTES
from cedar.kvstore.segment import Segment
from cedar.kvstore.values_file import ValuesFile


class SlowSync:
    """Syncs of values files that wait until they are let go, one after the other; None or an error each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.outcomes: queue.Queue[Exception | None] = queue.Queue()
        sync = ValuesFile.sync

        def slow(file: ValuesFile) -> None:
            self.begun.release()
            error = self.outcomes.get(timeout=10)
            if error is not None:
                raise error
            sync(file)

        monkeypatch.setattr(ValuesFile, "sync", slow)

    def wait(self) -> None:
        """Until one more has begun."""
        assert self.begun.acquire(timeout=10)


def written_bytes(tier: Any) -> int:
    return sum(segment.end_bytes for segment in tier._segments.all())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_the_next_commit_is_written_while_one_is_synced(
    open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    first, second, twin = (chains.items(chains.keys(3, salt=salt)) for salt in (1, 2, 1))
    disk = SlowSync(monkeypatch)
    futures = [tier.put(first)]
    disk.wait()
    before = written_bytes(tier)
    futures += [tier.put(second), tier.put(twin)]
    wait_for(lambda: written_bytes(tier) > before)
    assert tier.match([item.key for item in first]) == 0, "written, not synced"
    assert not any(future.done() for future in futures)
    disk.outcomes.put(None)
    disk.wait()
    assert futures[0].result(10).stored == 3
    assert tier.match([item.key for item in first]) == 3
    assert tier.match([item.key for item in second]) == 0, "its own sync is not over"
    assert not futures[1].done()
    removal = tier.remove([item.key for item in second])
    disk.outcomes.put(None)
    assert [future.result(10).stored for future in futures] == [3, 3, 0]
    assert futures[2].result(10).present == 3
    assert removal.result(10) == sum(len(item.value) for item in second), "after what was put before it"
    assert tier.counters["store_commits"] == 2
    tier.check_integrity(deep=True)


def test_a_failed_sync_takes_with_it_what_was_written_after(
    open_tier: Any, chains: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    kept, first, second, twin = (chains.items(chains.keys(3, salt=salt)) for salt in (0, 1, 2, 1))
    assert open_tier.put(tier, kept).stored == 3
    with monkeypatch.context() as patch:
        disk = SlowSync(patch)
        futures = [tier.put(first)]
        disk.wait()
        before = written_bytes(tier)
        futures += [tier.put(second), tier.put(twin)]
        wait_for(lambda: written_bytes(tier) > before)
        disk.outcomes.put(OSError(errno.EIO, "no"))
        assert [future.result(10).refused for future in futures] == [3, 3, 3], "the twin has no other"
    assert tier._segments.all()[0].end_bytes == tier._segments.all()[0]._end == 3 * BLOCK_BYTES
    assert (tier._segments.all()[0].path / "values.dat").stat().st_size == 3 * BLOCK_BYTES
    clock.advance(2)
    assert open_tier.put(tier, second).stored == 3
    tier.check_integrity(deep=True)
    tier.close()
    tier = open_tier()
    assert [tier.match([item.key for item in items]) for items in (kept, first, second)] == [3, 0, 3]


def test_a_failed_write_does_not_take_what_was_being_synced(
    open_tier: Any, chains: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    first, second = (chains.items(chains.keys(3, salt=salt)) for salt in (1, 2))
    with monkeypatch.context() as patch:
        disk = SlowSync(patch)
        futures = [tier.put(first)]
        disk.wait()
        failed = threading.Event()

        def fail(*_: Any) -> None:
            failed.set()
            raise OSError(errno.ENOSPC, "full")

        patch.setattr(ValuesFile, "write", fail)
        futures.append(tier.put(second))
        assert failed.wait(10)
        disk.outcomes.put(None)
        assert [future.result(10).stored for future in futures] == [3, 0]
    clock.advance(2)
    assert open_tier.put(tier, second).stored == 3
    tier.check_integrity(deep=True)


def test_a_commit_is_of_one_segment(open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch):
    """When the open segment is full, what was written to it is synced before another one is begun."""
    tier = open_tier(segment_bytes=MIB // 4)
    disk = SlowSync(monkeypatch)
    futures = []
    for salt in range(1, 4):
        futures.append(tier.put(chains.items(chains.keys(2, salt=salt), size=60_000)))
        wait_for(lambda: written_bytes(tier) >= len(futures) * 2 * 60_000)
    full = written_bytes(tier)
    futures.append(tier.put(chains.items(chains.keys(2, salt=4), size=60_000)))
    disk.wait()
    disk.outcomes.put(None)
    disk.wait()
    assert (written_bytes(tier), tier.stats()["store_segments"]) == (full, 1)
    for _ in range(2):
        disk.outcomes.put(None)
    assert [future.result(10).stored for future in futures] == [2] * 4
    assert tier.stats()["store_segments"] == 2
    tier.check_integrity(deep=True)


def test_a_file_system_that_has_shut_down_refuses_and_does_not_end_the_writer(
    open_tier: Any, chains: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    """XFS does: from then on every call is EIO, the question for a file's size too."""
    tier = open_tier()
    kept, first, second = (chains.items(chains.keys(3, salt=salt)) for salt in range(3))
    assert open_tier.put(tier, kept).stored == 3

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "shut down")

    with monkeypatch.context() as patch:
        for call in ("sync", "truncate", "size"):
            patch.setattr(ValuesFile, call, fail)
        assert tier.put(first).result(10).reason == "disk"
        assert tier.put(second).result(10).reason == "disk"
        assert tier.match([item.key for item in kept]) == 3
    failed = tier._segments.all()[0]
    assert failed.unowned == [(3 * BLOCK_BYTES, 3 * BLOCK_BYTES)], "a purge will take it off"
    clock.advance(2)
    assert open_tier.put(tier, second).stored == 3
    assert tier.stats()["store_segments"] == 2
    tier.check_integrity(deep=True)


def test_an_error_after_a_failed_commit_leaves_nobody_waiting(
    open_tier: Any, chains: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    with monkeypatch.context() as patch:
        disk = SlowSync(patch)
        disk.outcomes.put(OSError(errno.EIO, "no"))
        patch.setattr(Segment, "cut_back", lambda _: (_ for _ in ()).throw(MemoryError))
        assert tier.put(chains.items(chains.keys(3))).result(10).refused == 3
    clock.advance(2)
    assert open_tier.put(tier, chains.items(chains.keys(3))).stored == 3


def test_all_of_a_put_is_counted_when_judging_it_fails(
    open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    held, more = chains.items(chains.keys(2)), chains.items(chains.keys(3, salt=1))
    assert open_tier.put(tier, held).stored == 2
    verdict = Judge.verdict

    def fail(judge: Judge, item: PutItem, *rest: Any) -> Verdict:
        if item is more[1]:
            raise MemoryError
        return verdict(judge, item, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "verdict", fail)
        counts = open_tier.put(tier, held + more)
    assert (counts.present, counts.refused, counts.reason) == (2, 3, "disk")
    assert open_tier.put(tier, held + more).stored == 3


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_a_segment_whose_sync_failed_gives_its_room_back_when_dropped(
    open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    """Its disk may be full, and nothing would be synced until it is not."""
    tier = open_tier()
    assert open_tier.put(tier, chains.items(chains.keys(9))).stored == 9

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        patch.setattr(commit.log, "disabled", True)  # pytest keeps what is logged, error and all
        assert open_tier.put(tier, chains.items(chains.keys(3, salt=1))).reason == "disk"
    wait_for(lambda: not tier._segments.unindexed())
    tier._segments.drop(tier._segments.all()[0])
    open_files = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in open_files if path.startswith(str(tier.config.directory / "segments"))]
