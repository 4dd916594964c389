from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import HOUR_S, MIB, SsdConfig
from cedar.kvstore.errors import InvalidRequest, NotInMemory, Refused, StoreClosed, StoreLocked
from cedar.kvstore.put import PutCounts
from cedar.kvstore.ssd_tier import Run, SsdTier

TTL = 72 * HOUR_S


def held(tier: SsdTier, keys: list[bytes]) -> list[bool]:
    return [tier.get(key) is not None for key in keys]


def read(tier: SsdTier, keys: list[bytes]) -> list[bytes]:
    found = tier.read_run(keys, 1 << 20, lambda views: [bytes(view) for view in views])
    return [] if found is None else found[1]


def test_put_then_match_and_read(open_tier: Any, chains: Any):
    tier = open_tier()
    keys = chains.keys(5)
    assert tier.match(keys) == 0
    assert read(tier, keys) == []
    assert open_tier.put(tier, chains.items(keys[:3])) == PutCounts(stored=3)
    assert tier.match(keys) == 3
    assert read(tier, keys) == [chains.value(key) for key in keys[:3]]
    assert read(tier, keys[3:]) == []
    tier.check_integrity(deep=True)


def test_the_first_writer_stays(open_tier: Any, chains: Any):
    tier = open_tier()
    items = chains.items(chains.keys(2))
    other = type(items[0])(items[0].key, chains.other_value(items[0].key))
    assert open_tier.put(tier, [items[0], items[0], other]) == PutCounts(stored=1, present=1, conflicts=1)
    assert open_tier.put(tier, [other]) == PutCounts(conflicts=1)
    assert open_tier.put(tier, items) == PutCounts(stored=1, present=1)
    assert tier.get(items[0].key) == items[0].value
    assert tier.counters["store_puts_conflict"] == 2


def test_duplicate_writers_at_the_same_time_leave_one_copy(open_tier: Any, chains: Any):
    tier = open_tier(commit_wait_s=0.005)
    keys = chains.keys(100)
    futures = []

    def write() -> None:
        futures.extend(tier.put([item]) for item in chains.items(keys))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(futures)
    total = PutCounts()
    for future in futures:
        total.add(future.result())
    assert (total.stored, total.present, total.conflicts) == (100, 200, 0)
    assert tier.counters["store_commits"] < 100  # in groups
    tier.check_integrity(deep=True)


def test_a_run_ends_at_a_hole_and_at_the_byte_limit(open_tier: Any, chains: Any):
    tier = open_tier()
    keys = chains.keys(6)
    items = chains.items(keys)
    open_tier.put(tier, items[:2] + items[3:])
    assert tier.match(keys) == 2
    assert len(read(tier, keys)) == 2
    size = len(items[0].value)
    for limit, count in ((1, 1), (2 * size - 1, 1), (2 * size, 2)):
        found = tier.read_run(keys, limit, len)
        assert found is not None
        assert found[1] == count


def test_values_are_read_into_the_readers_memory(open_tier: Any, chains: Any):
    tier = open_tier()
    keys = chains.keys(5)
    items = chains.items(keys)
    open_tier.put(tier, items[:4])
    size = len(items[0].value)
    asked: list[tuple[int, int]] = []
    views = [memoryview(bytearray(size)) for _ in range(5)]

    def place(count: int, value_bytes: int) -> list[memoryview]:
        asked.append((count, value_bytes))
        return views

    assert tier.read_into(keys, 3 * size + 1, place) == Run(3, size)
    assert views[:3] == [item.value for item in items[:3]]
    assert tier.read_into(keys, 1 << 20, place, wait=False) == Run(4, size), "it is in memory"
    assert tier.read_into(keys[4:], 1 << 20, place) is None
    assert tier.read_into([], 1 << 20, place) is None
    assert asked == [(3, size), (4, size)]
    assert tier.counters["store_pages_read"] == 7
    assert tier.counters["store_page_misses"] == 1
    with pytest.raises(ValueError, match="must be"):
        tier.read_into(keys, 1, lambda count, value_bytes: [views[0][1:]])

    entry = tier._index.get(keys[2])
    assert entry is not None
    with open(entry.segment.path / "values.dat", "r+b") as file:
        file.seek(entry.offset + 1000)
        file.write(b"damage")
    with pytest.raises(NotInMemory):
        tier.read_into(keys, 1 << 20, place, wait=False)
    assert tier.counters["store_values_corrupt"] == 0, "that is for whoever may wait"
    assert tier.read_into(keys, 1 << 20, place) == Run(2, size)
    assert tier.counters["store_values_corrupt"] == 1
    assert tier.lost(keys[2])
    assert tier.match(keys) == 2


def test_values_of_different_sizes_are_read_in_separate_runs(open_tier: Any, chains: Any):
    tier = open_tier()
    keys = chains.keys(4)
    open_tier.put(tier, chains.items(keys[:2]) + chains.items(keys[2:], size=9000))
    assert len(read(tier, keys)) == 2
    assert read(tier, keys[2:]) == [chains.value(key, 9000) for key in keys[2:]]


def test_everything_survives_a_restart(open_tier: Any, chains: Any):
    tier = open_tier(segment_bytes=MIB // 4, capacity_bytes=8 * MIB)
    keys = chains.keys(300)
    for start in range(0, 300, 50):
        open_tier.put(tier, chains.items(keys)[start : start + 50])
    assert tier.stats()["store_segments"] >= 3
    before = tier.stats()
    tier.close()
    with pytest.raises(StoreClosed):
        tier.put(chains.items(keys[:1]))
    again = open_tier(segment_bytes=MIB // 4, capacity_bytes=8 * MIB)
    assert again.match(keys) == 300
    again.check_integrity(deep=True)
    assert again.stats()["store_pages"] == before["store_pages"]
    entry = again._index.get(keys[40])
    assert entry is not None
    assert (entry.page_index, entry.tenant) == (40, b"tenant")
    assert open_tier.put(again, chains.items(keys[:5])).present == 5


def test_one_process_a_directory(open_tier: Any, chains: Any):
    open_tier()
    with pytest.raises(StoreLocked, match=f"in use by process {os.getpid()}"):
        open_tier()


def test_a_store_does_not_work_in_a_forked_child(open_tier: Any, chains: Any):
    tier = open_tier()
    keys = chains.keys(1)
    open_tier.put(tier, chains.items(keys))
    with pytest.warns(DeprecationWarning, match="fork") if _warns_on_fork() else _no_warning():
        pid = os.fork()
    if pid == 0:
        try:
            tier.get(keys[0])
        except StoreClosed:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert held(tier, keys) == [True]


def _warns_on_fork() -> bool:
    import sys

    return sys.version_info >= (3, 12)


def _no_warning() -> Any:
    from contextlib import nullcontext

    return nullcontext()


# ---- time ----


def test_pages_live_72_hours_from_their_last_use(open_tier: Any, chains: Any, clock: ManualClock):
    tier = open_tier()
    keys = chains.keys(4)
    open_tier.put(tier, chains.items(keys))
    clock.advance(40 * HOUR_S)
    assert tier.match(keys[:2]) == 2  # a use of the first two
    clock.advance(40 * HOUR_S)
    assert tier.match(keys) == 2
    assert read(tier, keys[:2]) != []
    assert read(tier, keys[2:]) == []
    assert tier.counters["store_page_expired"] == 1
    assert open_tier.put(tier, chains.items(keys[2:])).stored == 2  # an expired page may come again
    tier.check_integrity(deep=True)


@pytest.mark.parametrize("step_h", [24, -24, 80, -80])
def test_clock_steps_neither_drop_nor_keep(open_tier: Any, chains: Any, clock: ManualClock, step_h: float):
    keys = chains.keys(3)
    tier = open_tier()
    open_tier.put(tier, chains.items(keys))
    clock.step_wall(step_h * HOUR_S)
    tier.maintenance.tick()
    assert tier.match(keys) == 3
    tier.close()
    tier = open_tier()  # after a restart in the same boot
    assert tier.match(keys) == 3
    tier.close()
    clock.reboot("boot-1", down_s=60)
    clock.step_wall(step_h * HOUR_S)
    tier = open_tier()
    assert tier.match(keys) == 3
    clock.advance(TTL + 1)
    assert tier.match(keys) == 0


def test_uses_are_remembered_over_a_restart(open_tier: Any, chains: Any, clock: ManualClock):
    keys = chains.keys(2)
    tier = open_tier()
    open_tier.put(tier, chains.items(keys))
    clock.advance(40 * HOUR_S)
    tier.match(keys[:1])
    tier.close()
    tier = open_tier()
    clock.advance(40 * HOUR_S)
    assert tier.match(keys[:1]) == 1
    assert tier.match(keys[1:]) == 0


def test_an_expired_segment_is_dropped_whole(open_tier: Any, chains: Any, clock: ManualClock, tmp_path: Path):
    tier = open_tier()
    for hour in range(4):  # a segment is 6 hours
        open_tier.put(tier, chains.items(chains.keys(20, salt=hour)))
        clock.advance(7 * HOUR_S)
    assert tier.stats()["store_segments"] == 4
    clock.advance(TTL - 16 * HOUR_S)
    tier.maintenance.tick()
    assert tier.stats()["store_segments"] == 2
    assert tier.counters["store_pages_evicted_expired"] == 40
    assert sorted(p.name for p in (tmp_path / "store" / "segments").iterdir()) == ["00000003", "00000004"]
    assert [tier.match(chains.keys(20, salt=hour)) for hour in range(4)] == [0, 0, 20, 20]
    tier.check_integrity(deep=True)


def test_used_pages_of_an_expired_segment_are_carried_forward(
    open_tier: Any, chains: Any, clock: ManualClock
):
    tier = open_tier()
    keys = chains.keys(20)
    open_tier.put(tier, chains.items(keys))
    clock.advance(30 * HOUR_S)
    assert tier.match(keys[:5]) == 5
    open_tier.put(tier, chains.items(chains.keys(1, salt=9)))  # closes the first segment
    clock.advance(TTL - 30 * HOUR_S + 1)
    tier.maintenance.tick()
    assert tier.stats()["store_segments"] == 2  # the younger one, and the one they were carried into
    assert tier.match(keys) == 5
    assert tier.counters["store_pages_carried"] == 5
    entry = tier._index.get(keys[3])
    assert entry is not None
    assert (entry.page_index, entry.tenant) == (3, b"tenant")
    tier.check_integrity(deep=True)
    tier.close()
    again = open_tier()
    assert again.match(keys) == 5


def test_a_hit_in_the_last_quarter_carries_a_page_forward_at_a_limited_rate(
    open_tier: Any, chains: Any, clock: ManualClock
):
    value_bytes = 3392 + 96
    tier = open_tier(carry_bytes_per_s=value_bytes)
    keys = chains.keys(10)
    open_tier.put(tier, chains.items(keys))
    clock.advance(10 * HOUR_S)
    open_tier.put(tier, chains.items(chains.keys(1, salt=9)))
    assert len(read(tier, keys)) == 10  # too early to carry
    tier.maintenance.tick()
    assert tier.counters["store_pages_carried"] == 0
    clock.advance(50 * HOUR_S)
    assert len(read(tier, keys)) == 10
    tier.maintenance.tick()
    assert tier.counters["store_pages_carried"] == 1
    for _ in range(9):
        clock.advance(1.001)
        tier.maintenance.tick()
    assert tier.counters["store_pages_carried"] == 10
    tier.maintenance.tick()
    assert tier.counters["store_pages_carried"] == 10
    tier.check_integrity(deep=True)
    clock.advance(13 * HOUR_S)  # the first segment's time is over
    tier.maintenance.tick()
    assert tier.match(keys) == 10


# ---- room ----


def fill(open_tier: Any, tier: SsdTier, chains: Any, pages: int, *, first: int = 0) -> list[list[bytes]]:
    """Chains of ten pages, one put each."""
    made = []
    for salt in range(first, first + pages // 10):
        keys = chains.keys(10, salt=salt)
        open_tier.put(tier, chains.items(keys))
        made.append(keys)
    return made


def test_the_limit_holds_and_the_newest_stay(open_tier: Any, chains: Any):
    tier = open_tier(capacity_bytes=4 * MIB, segment_bytes=MIB // 4)
    made = fill(open_tier, tier, chains, 1500)
    for start in range(1500, 3000, 100):
        made += fill(open_tier, tier, chains, 100, first=start)
        tier.maintenance.tick()
        assert tier.stats()["store_disk_bytes"] <= 4 * MIB
    assert tier.match(made[-1]) == 10
    assert tier.match(made[0]) == 0
    assert tier.counters["store_pages_evicted_capacity"] > 500
    assert tier.counters["store_puts_refused_full"] > 0  # while nobody evicted, above
    tier.check_integrity(deep=True)


def test_eviction_carries_what_was_hit_and_cuts_tails(open_tier: Any, chains: Any, clock: ManualClock):
    tier = open_tier(capacity_bytes=2 * MIB, segment_bytes=MIB // 4)
    hot = fill(open_tier, tier, chains, 50)
    clock.advance(1)
    for keys in hot:
        tier.match(keys[:7])
    fill(open_tier, tier, chains, 400, first=1000)
    tier.maintenance.tick()
    assert tier.counters["store_pages_evicted_capacity"] > 0
    assert tier.counters["store_pages_carried"] > 0
    runs = [tier.match(keys) for keys in hot]
    assert max(runs) > 0
    for keys, run in zip(hot, runs, strict=True):
        assert not any(held(tier, keys)[run:])  # no page without its parent
    tier.check_integrity(deep=True)


def test_a_full_segment_starts_the_next(open_tier: Any, chains: Any):
    tier = open_tier(segment_bytes=MIB // 2, capacity_bytes=16 * MIB)
    keys = chains.keys(600)
    for start in range(0, 600, 30):
        assert open_tier.put(tier, chains.items(keys)[start : start + 30]).stored == 30
    assert tier.stats()["store_segments"] >= 4
    assert tier.match(keys) == 600
    tier.check_integrity(deep=True)


def test_a_value_larger_than_a_segment_has_one_of_its_own(open_tier: Any, chains: Any):
    tier = open_tier(segment_bytes=MIB)
    keys = chains.keys(2)
    assert open_tier.put(tier, chains.items(keys, size=3 * MIB)).stored == 2
    assert open_tier.put(tier, chains.items(chains.keys(1, salt=1))).stored == 1
    assert tier.get(keys[1]) == chains.value(keys[1], 3 * MIB)
    assert tier.stats()["store_segments"] == 2
    tier.close()
    assert open_tier().match(keys) == 2


def test_the_queue_is_bounded_in_bytes(open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch):
    tier = open_tier(queue_bytes=10_000)
    entered, go = threading.Event(), threading.Event()
    write = tier._writer._committer.write

    def slow(*arguments: Any) -> str:
        entered.set()
        go.wait(10)
        return write(*arguments)

    monkeypatch.setattr(tier._writer._committer, "write", slow)
    items = chains.items(chains.keys(4))
    futures = [tier.put([items[0]])]
    entered.wait(10)
    futures.append(tier.put([items[1]]))
    with pytest.raises(Refused) as caught:
        tier.put([items[2]])
    assert caught.value.retry_after_s > 0
    go.set()
    assert [future.result(10).stored for future in futures] == [1, 1]
    assert open_tier.put(tier, items).stored == 2


def test_a_bug_in_a_commit_leaves_nobody_waiting(
    open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    items = chains.items(chains.keys(1))
    with monkeypatch.context() as patch:
        patch.setattr(tier._writer._committer, "write", lambda *_: 1 / 0)
        counts = open_tier.put(tier, items)
        assert (counts.stored, counts.refused) == (0, 1)
    assert open_tier.put(tier, items).stored == 1


def test_a_page_is_visible_only_after_its_commit(
    open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    keys = chains.keys(1)
    open_tier.put(tier, chains.items(chains.keys(1, salt=1)))
    segment = tier._segments.all()[-1]
    seen = []

    def watch(name: str) -> None:
        method = getattr(segment, name)

        def watched(*arguments: Any) -> Any:
            seen.append((name, tier.match(keys)))
            result = method(*arguments)
            seen.append((name, tier.match(keys)))
            return result

        monkeypatch.setattr(segment, name, watched)

    for name in ("write", "sync_values"):
        watch(name)
    open_tier.put(tier, chains.items(keys))
    assert seen == [("write", 0), ("write", 0), ("sync_values", 0), ("sync_values", 0)]
    assert tier.match(keys) == 1


def test_reads_go_on_while_segments_are_dropped(open_tier: Any, chains: Any):
    """A view that outlives its file is a SIGSEGV, so this test fails loudly."""
    tier = open_tier(capacity_bytes=3 * MIB // 2, segment_bytes=MIB // 8)
    stop = threading.Event()
    wrong = []

    def reader() -> None:
        while not stop.is_set():
            for salt in range(30):
                for key, value in zip(
                    chains.keys(2, salt=salt), read(tier, chains.keys(2, salt=salt)), strict=False
                ):
                    if value != chains.value(key):
                        wrong.append(key)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        fill(open_tier, tier, chains, 400)
        tier.maintenance.tick()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.counters["store_segments_dropped"] > 3
    tier.check_integrity(deep=True)


def test_close_commits_what_is_queued(open_tier: Any, chains: Any):
    tier = open_tier(commit_wait_s=0.05)
    futures = [tier.put([item]) for item in chains.items(chains.keys(40))]
    tier.close()
    tier.close()
    assert all(future.result(0).stored == 1 for future in futures)
    assert open_tier().match(chains.keys(40)) == 40


# ---- without durability ----


def test_unsynced_data_is_kept_by_a_dead_process_but_not_by_a_dead_machine(
    open_tier: Any, chains: Any, clock: ManualClock, tmp_path: Path
):
    keys = chains.keys(5)
    tier = open_tier(durability="none")
    open_tier.put(tier, chains.items(keys))
    tier.close()
    mark = tmp_path / "store" / "volatile"
    assert not mark.exists()
    mark.write_text(clock.boot_id())  # the process died
    tier = open_tier(durability="none")
    assert tier.match(keys) == 5
    tier.close()
    mark.write_text(clock.boot_id())
    clock.reboot("boot-1")  # the machine did
    assert open_tier().match(keys) == 0


# ---- configuration ----


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"high_watermark": 1.5}, "watermarks"),
        ({"low_watermark": 0.95}, "watermarks"),
        ({"segment_bytes": 1 << 40}, "segment_bytes"),
        ({"segment_s": 1e9}, "segment_s"),
        ({"durability": "sometimes"}, "durability"),
        ({"commit_values": 0}, "commit_values"),
    ],
)
def test_impossible_configurations_name_the_field(change: dict, field: str, tmp_path: Path):
    with pytest.raises(InvalidRequest, match=field):
        SsdConfig(directory=tmp_path, **change)


def test_a_small_capacity_still_has_several_segments(tmp_path: Path):
    assert SsdConfig(directory=tmp_path, capacity_bytes=100_000).segment_bytes == 25_000
