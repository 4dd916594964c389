"""Forked children, two stores on one directory, and readers that die holding a transaction."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cedar.kvstore.errors import StoreClosed, StoreLocked
from cedar.kvstore.ssd_tier import SsdTier

from . import store_child
from .conftest import TierStarter
from .store_child import count, items_of, open_tier


def in_child(action: object, *arguments: object) -> int:
    """Fork, call ``action``, and give the child's exit status: 7 when it raised StoreClosed."""
    pid = os.fork()
    if pid == 0:
        try:
            action(*arguments)  # type: ignore[operator]
        except StoreClosed:
            os._exit(7)
        except BaseException:
            os._exit(9)
        os._exit(0)
    for _ in range(1000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_a_forked_child_is_told_so_and_does_no_harm(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store", durability="none")
    assert tier.put(items_of(0, 4)).result(30).stored == 4
    mark = tmp_path / "store" / "volatile"
    for round_number in range(25):
        assert in_child(tier.get, store_child.keys_of(0, 1)[0]) == 7
        assert in_child(lambda: tier.put(items_of(1, 1)).result(5)) == 7, "there is no writer in the child"
        assert in_child(lambda: tier.remove(store_child.keys_of(0, 1)).result(5)) == 7
        assert in_child(tier.close) == 0, "what objects of a child do at its end"
        assert mark.exists(), "the parent's data is still unsynced"
        assert count(tier, 0, 4) == [4, 0, 0]
        assert tier.put(items_of(2 + round_number, 2)).result(30).stored == 2
    with pytest.raises(StoreLocked):
        open_tier(tmp_path / "store")
    tier.check_integrity(deep=True)
    tier.close()


HOLDER = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from store_child import items_of, open_tier
tier = open_tier(Path(sys.argv[2]))
tier.put(items_of(0, 4)).result(30)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_the_lock_dies_with_its_holder_though_a_child_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(Path(store_child.__file__).parent), str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": ":".join(part for part in sys.path if part)}
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(StoreLocked, match=f"in use by process {holder.pid}"):
            open_tier(tmp_path / "store")
        holder.kill()
        holder.wait()
        deadline_s = time.monotonic() + 10  # the child may not have come to its senses yet
        while True:
            try:
                tier = open_tier(tmp_path / "store")
                break
            except StoreLocked:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        assert count(tier, 0, 4) == [4, 0, 0]
        tier.close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_a_second_store_is_refused_and_the_first_goes_on(start_tier: TierStarter, tmp_path: Path) -> None:
    tier = start_tier()
    assert tier("put", 0, 4)["stored"] == 4
    with pytest.raises(StoreLocked, match=f"in use by process {tier.pid}"):
        open_tier(tmp_path / "store")
    assert tier("get", 0, 4) == [4, 0, 0]
    assert tier("put", 1, 4)["stored"] == 4
    tier.kill()
    other = open_tier(tmp_path / "store")
    assert count(other, 1, 4) == [4, 0, 0]
    other.close()


READER = """
import sys, time, lmdb
env = lmdb.open(sys.argv[1], readonly=True)
txn = env.begin()
print("reading", flush=True)
time.sleep(60)
"""


def write_indices(tier: SsdTier) -> None:
    tier._writer.call(lambda: tier._committer.keep_index(everything=True)).result(30)


def start_reader(segment: Path) -> subprocess.Popen[bytes]:
    """A tool on the store's host that looks into an index, and takes its time."""
    reader = subprocess.Popen([sys.executable, "-c", READER, str(segment)], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert select.select([reader.stdout], [], [], 30)[0]
    return reader


def end_reader(reader: subprocess.Popen[bytes]) -> None:
    assert reader.stdout is not None
    reader.kill()
    reader.wait()
    reader.stdout.close()


def test_the_slots_of_dead_readers_are_freed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store", segment_bytes=4 << 20)
    assert tier.put(items_of(0, 4)).result(30).stored == 4
    write_indices(tier)
    segment = tmp_path / "store" / "segments" / "00000001"
    readers = [start_reader(segment) for _ in range(4)]
    for reader in readers[1:]:
        end_reader(reader)
    try:
        assert tier.put(items_of(1, 4)).result(30).stored == 4
        write_indices(tier)
        assert tier.counters["store_dead_readers"] == 3
    finally:
        end_reader(readers[0])
    before = segment.joinpath("data.mdb").stat().st_size
    for salt in range(2, 40):
        assert tier.put(items_of(salt, 1)).result(30).stored == 1
        write_indices(tier)
    grown = segment.joinpath("data.mdb").stat().st_size - before
    assert grown <= 8 * 4096, "pages of old commits are used again"
    assert count(tier, 0, 4) == [4, 0, 0]
    tier.close()


def test_a_reader_that_stays_holds_nothing_up(tmp_path: Path) -> None:
    """Segments are only ever added to and dropped whole, so what a reader keeps is nobody's room."""
    tier = open_tier(tmp_path / "store", capacity_bytes=8 << 20)
    assert tier.put(items_of(0, 4)).result(30).stored == 4
    write_indices(tier)
    segment = tmp_path / "store" / "segments" / "00000001"
    reader = start_reader(segment)
    try:
        for salt in range(1, 60):  # twice what fits
            assert tier.put(items_of(salt, 20)).result(30).stored == 20
            tier.maintenance.tick()
        assert not segment.exists(), "its segment was dropped all the same"
        assert tier.stats()["store_disk_bytes"] <= 8 << 20
        assert count(tier, 59, 20) == [20, 0, 0]
    finally:
        end_reader(reader)
    tier.check_integrity(deep=True)
    tier.close()
