from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore import segment_set
from cedar.kvstore.config import MIB
from cedar.kvstore.header import HEADER_BYTES
from cedar.kvstore.records import HEAD_BYTES
from cedar.kvstore.segment import Segment
from cedar.kvstore.ssd_tier import SsdTier

SIZE = 3392


def data_file(directory: Path, number: int = 1, name: str = "values.dat") -> Path:
    return directory / "store" / "segments" / f"{number:08d}" / name


def damage(path: Path, offset: int, change: Callable[[int], int] = lambda byte: byte ^ 0x10) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([change(os.pread(fd, 1, offset)[0])]), offset)
    finally:
        os.close(fd)


def offset_of(tier: SsdTier, key: bytes) -> int:
    entry = tier._index.get(key)
    assert entry is not None
    assert entry.offset
    return entry.offset


REGIONS = {
    "magic": 0, "version": 4, "flags": 6, "tokens": 8, "length": 12, "key": 16, "key end": 47,
    "fingerprint": 48, "checksum": 80, "checksum end": 95, "payload start": HEADER_BYTES,
    "payload middle": HEADER_BYTES + SIZE // 2, "payload end": HEADER_BYTES + SIZE - 1,
}  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_is_a_miss_and_only_there(region: str, open_tier: Any, chains: Any, tmp_path: Path):
    tier = open_tier()
    keys = chains.keys(4)
    open_tier.put(tier, chains.items(keys))
    damage(data_file(tmp_path), offset_of(tier, keys[1]) + REGIONS[region])
    assert tier.match(keys) == 4  # nobody has looked yet
    found = tier.read_run(keys, 1 << 20, lambda views: [bytes(view) for view in views])
    assert found is not None
    assert found[1] == [chains.value(keys[0])]
    assert tier.match(keys) == 1
    assert tier.counters["store_values_corrupt"] == 1
    assert [tier.get(key) for key in keys[2:]] == [chains.value(key) for key in keys[2:]]
    kept = list((tmp_path / "store" / "quarantine").iterdir())
    assert [path.name.split(".")[0] for path in kept] == [keys[1].hex()]
    assert kept[0].stat().st_size == HEADER_BYTES + SIZE
    tier.close()
    again = open_tier()
    assert again.match(keys) == 1  # a restart does not bring it back
    assert open_tier.put(again, chains.items(keys)).stored == 1  # but a new copy is welcome
    assert again.match(keys) == 4
    again.check_integrity(deep=True)


HEAD_REGIONS = {
    "magic": 0, "version": 4, "tenant length": 6, "size": 8, "place": 12, "offset": 16, "last use": 24,
    "creation": 32, "segment": 40, "tenant": 48, "tenant end": 111, "zeros": 112, "checksum": 120,
}  # fmt: skip


@pytest.mark.parametrize("region", HEAD_REGIONS)
def test_a_flipped_bit_in_a_head_matters_only_without_the_index(
    region: str, open_tier: Any, chains: Any, tmp_path: Path
):
    tier = open_tier()
    keys = chains.keys(4)
    open_tier.put(tier, chains.items(keys))
    damage(data_file(tmp_path), offset_of(tier, keys[1]) - HEAD_BYTES + HEAD_REGIONS[region])
    assert [tier.get(key) for key in keys] == [chains.value(key) for key in keys]
    tier.close()
    tier = open_tier()
    assert [tier.get(key) for key in keys] == [chains.value(key) for key in keys]
    tier.close()
    data_file(tmp_path, name="data.mdb").unlink()
    tier = open_tier()
    assert [tier.get(key) is not None for key in keys] == [True, False, True, True]
    assert tier.match(keys) == 1, "and it is not promised"
    assert open_tier.put(tier, chains.items(keys)).stored == 1
    tier.check_integrity(deep=True)


@pytest.mark.parametrize("region", ["magic", "tokens", "length", "key", "checksum", "checksum end"])
def test_a_damaged_copy_found_by_a_put_is_replaced(region: str, open_tier: Any, chains: Any, tmp_path: Path):
    tier = open_tier()
    keys = chains.keys(1)
    open_tier.put(tier, chains.items(keys))
    damage(data_file(tmp_path), offset_of(tier, keys[0]) + REGIONS[region])
    assert open_tier.put(tier, chains.items(keys)).stored == 1
    assert tier.get(keys[0]) == chains.value(keys[0])
    tier.close()
    assert open_tier().get(keys[0]) == chains.value(keys[0])


def test_swapped_values_are_not_served(open_tier: Any, chains: Any, tmp_path: Path):
    tier = open_tier()
    keys = chains.keys(2)
    open_tier.put(tier, chains.items(keys))
    first, second = (offset_of(tier, key) for key in keys)
    fd = os.open(data_file(tmp_path), os.O_RDWR)
    whole = HEADER_BYTES + SIZE
    one, two = os.pread(fd, whole, first), os.pread(fd, whole, second)
    os.pwrite(fd, two, first)
    os.pwrite(fd, one, second)
    os.close(fd)
    assert [tier.get(key) for key in keys] == [None, None]
    assert tier.counters["store_values_corrupt"] == 2


def test_a_torn_value_is_not_served(open_tier: Any, chains: Any, tmp_path: Path):
    tier = open_tier()
    keys = chains.keys(2)
    open_tier.put(tier, chains.items(keys, size=227_840))
    fd = os.open(data_file(tmp_path), os.O_RDWR)
    os.pwrite(fd, bytes(4096), offset_of(tier, keys[0]) + 8 * 4096)
    os.close(fd)
    assert tier.get(keys[0]) is None
    assert tier.get(keys[1]) == chains.value(keys[1], 227_840)


def test_the_quarantine_is_bounded(open_tier: Any, chains: Any, tmp_path: Path):
    tier = open_tier(quarantine_bytes=2 * (HEADER_BYTES + SIZE))
    keys = chains.keys(5)
    open_tier.put(tier, chains.items(keys))
    for key in keys:
        damage(data_file(tmp_path), offset_of(tier, key) + 100)
        assert tier.get(key) is None
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 2
    assert tier.counters["store_values_corrupt"] == 5


def written(open_tier: Any, chains: Any, pages: int = 40) -> list[bytes]:
    tier = open_tier()
    keys = chains.keys(pages)
    for start in range(0, pages, 10):
        open_tier.put(tier, chains.items(keys)[start : start + 10])
    tier.close()
    return keys


def right(tier: SsdTier, chains: Any, keys: list[bytes]) -> int:
    """How many pages are there; none of them is wrong."""
    tier.maintenance.tick()
    tier.check_integrity(deep=True)
    good = 0
    for key in keys:
        value = tier.get(key)
        assert value in (None, chains.value(key))
        good += value is not None
    return good


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.99])
def test_a_truncated_file_costs_what_was_cut_off(keep: float, open_tier: Any, chains: Any, tmp_path: Path):
    keys = written(open_tier, chains)
    path = data_file(tmp_path)
    os.truncate(path, int(path.stat().st_size * keep))
    tier = open_tier()
    assert tier.counters["store_segments_damaged"] == 1
    good = right(tier, chains, keys)
    assert good == int(len(keys) * keep)
    assert tier.match(keys) == good, "nothing is promised that is not there"
    assert open_tier.put(tier, chains.items(keys)).refused == 0
    assert tier.match(keys) == len(keys)
    tier.close()
    tier = open_tier()
    assert tier.counters["store_segments_damaged"] == 0, "its index was made anew"
    assert right(tier, chains, keys) == len(keys)


INDEX_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "half a page": lambda path: os.truncate(path, 2000),
    "two pages": lambda path: os.truncate(path, 8192),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "zeros": lambda path: path.write_bytes(bytes(16_384)),
    "something else": lambda path: path.write_bytes(b"x" * 50_000),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_can_be_lost(damage: str, open_tier: Any, chains: Any, tmp_path: Path, clock: Any):
    """All that it says is found in the records; the pages keep their tenant, their place and their time."""
    keys = written(open_tier, chains)
    INDEX_DAMAGE[damage](data_file(tmp_path, name="data.mdb"))
    clock.advance(3600)
    tier = open_tier()
    assert tier.counters["store_pages_found_by_record"] == len(keys)
    assert right(tier, chains, keys) == len(keys)
    page = tier.describe(keys[7])
    assert page is not None
    assert (page.tenant, page.page_index, page.idle_s) == (b"tenant", 7, 3600)
    tier.close()
    again = open_tier()
    assert again.counters["store_pages_found_by_record"] == 0, "it was made anew"
    assert again.counters["store_segments_damaged"] == 0
    assert right(again, chains, keys) == len(keys)


@pytest.mark.parametrize("content", [b"", b"x" * 5000, bytes(8192), None])
def test_a_segment_that_is_none_costs_itself_only(
    content: bytes | None, open_tier: Any, chains: Any, tmp_path: Path
):
    keys = written(open_tier, chains)
    path = data_file(tmp_path, 2)
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    tier = open_tier()
    assert right(tier, chains, keys) == len(keys)
    assert not path.parent.exists()
    assert open_tier.put(tier, chains.items(chains.keys(1, salt=1))).stored == 1


def test_an_index_that_kills_whoever_opens_it_is_not_opened_for_ever(
    open_tier: Any, chains: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keys = written(open_tier, chains)
    (data_file(tmp_path).parent / "opening").write_bytes(b"xx")
    monkeypatch.setattr(segment_set, "index_opens_elsewhere", lambda *_: False)
    tier = open_tier()
    assert tier.match(keys) == len(keys)
    assert tier.counters["store_pages_found_by_record"] == len(keys)
    assert right(tier, chains, keys) == len(keys)


def test_a_sound_segment_outlives_any_number_of_killed_starts(open_tier: Any, chains: Any, tmp_path: Path):
    keys = written(open_tier, chains)
    marker = data_file(tmp_path).parent / "opening"
    marker.write_bytes(b"xxxxx")
    tier = open_tier()
    assert tier.match(keys) == len(keys)
    assert tier.counters["store_segments_damaged"] == tier.counters["store_pages_found_by_record"] == 0
    assert not marker.exists()


def test_a_start_that_was_killed_once_is_forgiven(open_tier: Any, chains: Any, tmp_path: Path):
    keys = written(open_tier, chains)
    marker = data_file(tmp_path).parent / "opening"
    marker.write_bytes(b"x")
    tier = open_tier()
    assert tier.match(keys) == len(keys)
    assert not marker.exists()


SCAN = """
import json, os, random, shutil, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from conftest import Chains
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.ssd_tier import SsdTier
import logging; logging.disable(logging.CRITICAL)
good, work, first, last = Path({good!r}), Path({work!r}), int(sys.argv[1]), int(sys.argv[2])
chains = Chains()
keys = chains.keys(24)
for seed in range(first, last):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work)
    path = work / "segments" / "00000001" / ("data.mdb" if seed % 2 else "values.dat")
    rng = random.Random(seed)
    bit = rng.randrange(path.stat().st_size * 8)
    if seed % 4 == 2:  # and its record must be found without the index
        (path.parent / "data.mdb").unlink()
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    print("start", seed, flush=True)
    config = SsdConfig(directory=work, capacity_bytes=64 * MIB, segment_bytes=4 * MIB, reserve_bytes=MIB,
                       commit_wait_s=0.0)
    tier = SsdTier(config, background=False)
    values = [tier.get(key) for key in keys]
    tier.maintenance.tick()
    values += [tier.get(key) for key in keys]
    wrong = sum(value not in (None, chains.value(key)) for key, value in zip(keys + keys, values))
    missing = sum(value is None for value in values[24:])
    tier.close()
    print("done", json.dumps([seed, wrong, missing]), flush=True)
"""


def test_random_bit_flips_never_give_a_wrong_value(open_tier: Any, chains: Any, tmp_path: Path):
    """In children, since a flip in a tree of LMDB may be a signal. One in the index costs no page at all."""
    tier = open_tier()
    open_tier.put(tier, chains.items(chains.keys(24)))
    tier.close()
    script = SCAN.format(
        tests=str(Path(__file__).parent), good=str(tmp_path / "store"), work=str(tmp_path / "work")
    )
    seed, rounds, lost, signals = 0, 60, 0, 0
    while seed < rounds:
        child = subprocess.run(
            [sys.executable, "-c", script, str(seed), str(rounds)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        results = [json.loads(line[5:]) for line in child.stdout.splitlines() if line.startswith("done ")]
        assert all(wrong == 0 for _, wrong, _ in results)
        assert all(missing == 0 for number, _, missing in results if number % 2), results
        lost += sum(missing for _, _, missing in results)
        seed += len(results)
        if seed < rounds:
            assert child.returncode < 0, child.stderr  # a signal, not an exception
            signals += 1
            seed += 1
    assert signals <= 3
    assert lost <= rounds // 2  # a flip costs the page it hits


@pytest.mark.parametrize("step", ["write", "sync_values"])
def test_a_failing_disk_refuses_puts_and_heals(
    step: str, open_tier: Any, chains: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier()
    keys = chains.keys(30)
    open_tier.put(tier, chains.items(keys[:10]))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, step, fail)
        counts = open_tier.put(tier, chains.items(keys[:20]))
        assert (counts.present, counts.refused, counts.reason) == (10, 10, "disk")
    assert tier.match(keys) == 10
    assert tier.get(keys[3]) == chains.value(keys[3])
    assert open_tier.put(tier, chains.items(keys[10:20])).reason == "disk"  # not tried again at once
    clock.advance(1.1)
    assert open_tier.put(tier, chains.items(keys[10:20])).stored == 10
    assert tier.stats()["store_segments"] == 2  # after a failed sync the segment takes no more
    assert tier.counters["store_puts_refused_disk"] == 20
    tier.close()
    assert open_tier().match(keys) == 20


def test_a_failed_round_of_maintenance_is_tried_again(
    open_tier: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier(background=True, maintenance_s=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(tier.maintenance, "_evict", lambda: 1 / 0)
        tier.maintenance.wake()
        while tier.counters["store_maintenance_failures"] < 2:
            pass
    failures = tier.counters["store_maintenance_failures"]
    open_tier.put(tier, chains.items(chains.keys(1)))
    assert failures >= 2


def test_usage_log_with_a_torn_end(open_tier: Any, chains: Any, clock: Any, tmp_path: Path):
    keys = chains.keys(2)
    tier = open_tier()
    open_tier.put(tier, chains.items(keys))
    clock.advance(40 * 3600)
    tier.match(keys)
    tier.maintenance.tick()
    tier.close()
    log = next((tmp_path / "store" / "uses").iterdir())
    whole = log.read_bytes()
    for torn in (whole[:-1], whole[:5], whole + b"\xff" * 12, whole[:20] + b"?" + whole[21:], b"\xff" * 40):
        log.write_bytes(torn)
        tier = open_tier()
        assert tier.match(keys) == 2
        tier.close()


@pytest.mark.parametrize("size", [MIB])
def test_large_values_round_trip(size: int, open_tier: Any, chains: Any):
    tier = open_tier()
    keys = chains.keys(3)
    assert open_tier.put(tier, chains.items(keys, size)).stored == 3
    assert tier.get(keys[2]) == chains.value(keys[2], size)
