"""Syncs and writes that fail at every call, a disk that turns read-only, a slow one, unreadable sectors."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from .conftest import TierStarter
from .store_shim import SHORT, SYNC, WRITE, FailingDisk

PAGES = 6
FAULTS = {
    "sync EIO": (SYNC, errno.EIO),
    "sync ENOSPC": (SYNC, errno.ENOSPC),
    "write EIO": (WRITE, errno.EIO),
    "write ENOSPC": (WRITE, errno.ENOSPC),
    "short write": (WRITE, SHORT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_fails_at_every_place(fault: str, start_tier: TierStarter, disk: FailingDisk) -> None:
    calls, error = FAULTS[fault]
    tier = start_tier(disk=disk)
    acked = [0]
    assert tier("put", 0, PAGES)["stored"] == PAGES
    failed = 0
    for after in range(20):
        salt = after + 1
        disk.fail(calls, error, after=after % 7, times=1)
        counts = tier("put", salt, PAGES)
        disk.heal()
        assert counts["stored"] + counts["refused"] == PAGES
        assert counts["stored"] in (0, PAGES), "all of a batch or nothing"
        failed += counts["refused"] > 0
        if counts["stored"]:
            acked.append(salt)
        else:
            assert counts["reason"] == "disk"
            assert tier("get", salt, PAGES) == [0, PAGES, 0], "what was refused is not visible"
        time.sleep(0.06)  # puts are taken again after this
        assert tier("put", 100 + salt, PAGES)["stored"] == PAGES, "it heals by itself"
        acked.append(100 + salt)
        tier("tick")
        for known in acked[-6:]:
            assert tier("get", known, PAGES) == [PAGES, 0, 0], (known, acked, tier("stats"))
    assert failed >= (0 if error == SHORT else 3), "a short write may be written on, or be a failed commit"
    assert disk.orders.seen
    for known in acked:
        assert tier("get", known, PAGES) == [PAGES, 0, 0], known
    tier("check")
    tier.kill()
    tier = start_tier()
    tier("tick")
    for known in acked:
        assert tier("get", known, PAGES) == [PAGES, 0, 0], known
    tier("check")


@pytest.mark.parametrize("calls", [SYNC, WRITE], ids=["syncs", "writes"])
def test_a_disk_that_fails_for_a_while(calls: int, start_tier: TierStarter, disk: FailingDisk) -> None:
    tier = start_tier(disk=disk)
    assert tier("put", 0, PAGES)["stored"] == PAGES
    disk.fail(calls, errno.EIO)
    for salt in range(1, 6):
        assert tier("put", salt, PAGES)["refused"] == PAGES
        tier("tick")
        time.sleep(0.06)
    disk.heal()
    time.sleep(0.06)
    assert tier("put", 9, PAGES)["stored"] == PAGES
    tier("tick")
    for salt in (0, 9):
        assert tier("get", salt, PAGES) == [PAGES, 0, 0]
    stats = tier("stats")
    assert stats["store_puts_refused_disk"] == 5 * PAGES
    assert stats["store_commit_failures"] >= 5
    assert stats["store_segments"] <= 3, "attempts that failed leave nothing behind"


def test_a_disk_that_turns_read_only(start_tier: TierStarter, disk: FailingDisk) -> None:
    tier = start_tier(disk=disk)
    for salt in range(8):  # several segments
        assert tier("put", salt, 20)["stored"] == 20
    disk.read_only()
    for salt in range(8, 12):
        counts = tier("put", salt, 20)
        assert (counts["refused"], counts["reason"]) == (20, "disk")
        tier("tick")
        time.sleep(0.06)
    for salt in range(8):
        assert tier("get", salt, 20) == [20, 0, 0]
    disk.heal()
    time.sleep(0.06)
    assert tier("put", 8, 20)["stored"] == 20
    tier("close")
    tier = start_tier()
    for salt in range(9):
        assert tier("get", salt, 20) == [20, 0, 0]


def test_a_slow_disk_makes_large_batches_and_a_bounded_queue(
    start_tier: TierStarter, disk: FailingDisk
) -> None:
    limit = 1 << 20
    tier = start_tier(disk=disk, queue_bytes=limit, segment_bytes=8 << 20)
    assert tier("put", 0, PAGES)["stored"] == PAGES
    disk.slow(0.1)
    counts = tier("put", 1, PAGES)
    assert counts["stored"] == PAGES
    assert 0.1 <= counts["took_s"] < 2
    began_s = time.monotonic()
    flood = tier("flood", 1000, 60, 2)
    assert time.monotonic() - began_s < 10
    assert flood["stored"] + flood["refused"] == 120
    assert flood["refused"] > 0, "there is no room for all of them"
    assert flood["most_queued"] <= limit
    assert flood["commits"] <= flood["stored"] / 10, "each sync carries many"
    began_s = time.monotonic()
    assert tier("get", 0, PAGES) == [PAGES, 0, 0]
    assert time.monotonic() - began_s < 0.5, "reads do not wait for syncs"


def test_an_unreadable_sector_under_a_value(start_tier: TierStarter, disk: FailingDisk) -> None:
    tier = start_tier(disk=disk)
    for salt in range(10):
        assert tier("put", salt, 20)["stored"] == 20
    file, offset = tier("where", 1, 5)
    segments = tier("stats")["store_segments"]
    assert segments >= 2
    tier("close")
    disk.break_sectors(Path(file), offset + 4096, 4096)
    tier = start_tier(disk=disk)  # the index is rebuilt without touching values
    assert tier("get", 1, 20) == [19, 1, 0]
    for _ in range(3):
        assert tier("get", 1, 20) == [19, 1, 0], "a miss, and nobody dies"
    for salt in range(10):
        assert tier("get", salt, 20) == [19 if salt == 1 else 20, int(salt == 1), 0]
    assert tier("put", 1, 20)["stored"] == 1, "a new copy is welcome"
    assert tier("get", 1, 20) == [20, 0, 0]
    tier("close")
    tier = start_tier(disk=disk)
    for salt in range(10):
        assert tier("get", salt, 20) == [20, 0, 0]


def test_unreadable_sectors_all_over_a_segment(start_tier: TierStarter, disk: FailingDisk) -> None:
    tier = start_tier(disk=disk)
    for salt in range(10):
        assert tier("put", salt, 20)["stored"] == 20
    file, _ = tier("where", 0, 0)
    assert tier("where", 9, 0)[0] != file
    tier("close")
    size = Path(file).stat().st_size
    disk.break_sectors(Path(file), size // 2, size)
    for lost_index in (False, True):
        if lost_index:
            Path(file).with_name("data.mdb").unlink()
        tier = start_tier(disk=disk)
        found = [tier("get", salt, 20) for salt in range(10)]
        assert all(wrong == 0 for _, _, wrong in found)
        assert found[-1] == [20, 0, 0], "other segments are whole"
        assert sum(right for right, _, _ in found) >= 140
        assert tier("put", 50 + lost_index, 20)["stored"] == 20
        tier("check")
        tier("close")


@pytest.mark.parametrize("whole", [False, True], ids=["one page", "all of it"])
def test_unreadable_sectors_in_an_index(whole: bool, start_tier: TierStarter, disk: FailingDisk) -> None:
    """A map of it would be a SIGBUS: it is read first, and if that fails the records are read instead."""
    tier = start_tier(disk=disk)
    for salt in range(10):
        assert tier("put", salt, 20)["stored"] == 20
    file, _ = tier("where", 0, 0)
    tier("close")
    index = Path(file).with_name("data.mdb")
    disk.break_sectors(index, 0 if whole else index.stat().st_size - 4096, index.stat().st_size)
    tier = start_tier(disk=disk)
    assert tier("stats")["store_segments_damaged"] == 1
    for salt in range(10):
        assert tier("get", salt, 20) == [20, 0, 0]
    tier("check")


def test_an_index_that_becomes_unreadable_under_a_running_store(
    start_tier: TierStarter, disk: FailingDisk
) -> None:
    tier = start_tier(disk=disk, segment_bytes=8 << 20)
    assert tier("put", 0, 20)["stored"] == 20
    assert tier("write_indices") == 0
    file, _ = tier("where", 0, 0)
    index = Path(file).with_name("data.mdb")
    disk.break_sectors(index, 0, index.stat().st_size)
    assert tier("put", 1, 20)["stored"] == 20, "a put needs no index"
    assert tier("write_indices") == 1, "which cannot be written now"
    for salt in range(2):
        assert tier("get", salt, 20) == [20, 0, 0]
    tier("close")
    tier = start_tier(disk=disk)
    for salt in range(2):
        assert tier("get", salt, 20) == [20, 0, 0]
