"""The files of a segment: what is in them, what a start makes of them, and what is taken out of them."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore import segment as segment_module
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.commit import INDEX_LAG_S
from cedar.kvstore.errors import CorruptValue, NotInMemory
from cedar.kvstore.header import seal_value
from cedar.kvstore.records import BLOCK_BYTES, HEAD_BYTES, span
from cedar.kvstore.rows import Row, pack_row, unpack_row
from cedar.kvstore.segment import Segment
from cedar.kvstore.segment_index import IndexDamaged
from cedar.kvstore.ssd_tier import SsdTier
from cedar.kvstore.values_file import WRITE_BYTES, ValuesFile
from hypothesis import given
from hypothesis import strategies as st


def page(number: int, size: int = 3000) -> tuple[bytes, bytes, Row]:
    """A page that is like no other."""
    key = random.Random(number).randbytes(32)
    value = seal_value(random.Random(key).randbytes(size), fingerprint=b"f" * 32, page_key=key, tokens=8)
    return key, value, Row(len(value), 100.0 + number, number, b"tenant %d" % (number % 3))


def make(path: Path, batches: list[list[tuple[bytes, bytes, Row]]]) -> Segment:
    segment = Segment.create(path, 1, durable=True, created_s=50.0)
    for batch in batches:
        segment.append(batch)
    return segment


def load(path: Path) -> tuple[Segment, list[tuple[bytes, Row]]]:
    return Segment.load(path, 1, durable=True)


def flat(rows: list[tuple[bytes, Row]]) -> list[tuple[bytes, int, float, int, bytes]]:
    return [(key, row.size, row.used_s, row.page_index, row.tenant) for key, row in rows]


@given(
    key=st.binary(min_size=32, max_size=32),
    row=st.builds(
        Row,
        size=st.integers(1, 2**32 - 1),
        used_s=st.floats(0, 1e12),
        page_index=st.integers(0, 2**32 - 1),
        tenant=st.binary(max_size=64),
        offset=st.integers(0, 2**60),
        dead=st.booleans(),
        erased=st.booleans(),
    ),
    bit=st.integers(0, 10_000),
)
def test_a_row_is_what_was_put_or_refused(key: bytes, row: Row, bit: int):
    packed = pack_row(key, row)
    assert unpack_row(packed, row.offset) == (key, row)
    flipped = bytearray(packed)
    flipped[bit % (8 * len(packed)) // 8] ^= 1 << bit % 8
    for bad, offset in ((bytes(flipped), row.offset), (packed, row.offset + 4096), (packed[:-1], row.offset)):
        with pytest.raises(CorruptValue):
            unpack_row(bad, offset)


@pytest.mark.parametrize("indexed", [0, 3, 6], ids=["no index", "half of it", "all of it"])
def test_what_was_appended_is_loaded(indexed: int, tmp_path: Path):
    pages = [page(number, size) for number, size in enumerate((1, 3000, 4096, 3 * WRITE_BYTES, 100_000, 9))]
    segment = make(tmp_path / "1", [])
    for number, each in enumerate(pages):
        segment.append([each])
        if number + 1 == indexed:
            segment.write_index()
    segment.close()
    again, rows = load(tmp_path / "1")
    assert flat(rows) == flat([(key, row) for key, _, row in pages])
    assert (again.created_s, again.damaged, again.closed_to_writes) == (50.0, False, False)
    assert again.found_by_record == 6 - indexed
    for (key, value, _), (_, row) in zip(pages, rows, strict=True):
        assert row.offset % BLOCK_BYTES == HEAD_BYTES
        assert again.read(row.offset, row.size) == value
        assert again.header(row.offset, row.size).page_key == key
    assert again.end_bytes == sum(span(len(value)) for _, value, _ in pages)
    assert again.end_bytes == (tmp_path / "1" / "values.dat").stat().st_size
    again.close()


def test_what_a_killed_process_left_is_on_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Records in the page cache that were never synced: a put that finds them there must not be misled."""
    make(tmp_path / "1", [[page(1)], [page(2)]]).close()
    order: list[str] = []
    sync = ValuesFile.sync
    monkeypatch.setattr(ValuesFile, "sync", lambda file: (order.append("synced"), sync(file)))
    segment, rows = load(tmp_path / "1")
    assert (order, len(rows)) == (["synced"], 2)
    segment.close()

    def fail(file: ValuesFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(ValuesFile, "sync", fail)
        with pytest.raises(OSError, match="cannot be synced"):
            load(tmp_path / "1")
    segment, rows = load(tmp_path / "1")
    assert len(rows) == 2, "and they are left where they are"
    segment.close()


@pytest.mark.parametrize("kept", [0, 5, 200, 3000, 4096, 9000, 60_000])
def test_a_torn_end_is_cut_off_and_written_over(kept: int, tmp_path: Path):
    """Of the last record, ``kept`` bytes are there, and rubbish behind them."""
    segment = make(tmp_path / "1", [[page(1)], [page(2, 60_000)]])
    end = segment.end_bytes - span(60_096)
    segment.close()
    path = tmp_path / "1" / "values.dat"
    os.truncate(path, end + kept)
    with path.open("ab") as file:
        file.write(random.Random(kept).randbytes(10_000))
    again, rows = load(tmp_path / "1")
    assert [key for key, _ in rows] == [page(1)[0]]
    assert (again.end_bytes, path.stat().st_size, again.unowned) == (end, end, [])
    assert not again.closed_to_writes
    again.append([page(3), page(4)])
    again.close()
    again, rows = load(tmp_path / "1")
    assert [key for key, _ in rows] == [page(number)[0] for number in (1, 3, 4)]
    again.close()


def test_records_behind_a_damaged_one_are_found(tmp_path: Path):
    """The end of what is whole is not the end of what was acknowledged."""
    segment = make(tmp_path / "1", [[page(number)] for number in range(6)])
    segment.close()
    path = tmp_path / "1" / "values.dat"
    with path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 700)
        file.write(b"damage")  # in its value
        file.seek(4 * BLOCK_BYTES)
        file.write(b"damage")  # in its head
    again, rows = load(tmp_path / "1")
    assert [key for key, _ in rows] == [page(number)[0] for number in (0, 1, 3, 5)]
    assert again.unowned == [(2 * BLOCK_BYTES, BLOCK_BYTES), (4 * BLOCK_BYTES, BLOCK_BYTES)]
    again.erase()
    again.close()
    assert path.read_bytes()[2 * BLOCK_BYTES : 3 * BLOCK_BYTES] == bytes(BLOCK_BYTES)
    again, rows = load(tmp_path / "1")
    assert len(rows) == 4
    assert again.unowned == []
    again.close()


def test_a_record_of_another_segment_or_place_is_none(tmp_path: Path):
    """Blocks that a file system gave to the wrong file."""
    make(tmp_path / "1", [[page(1), page(2), page(3)]]).close()
    other = Segment.create(tmp_path / "2", 2, durable=True, created_s=1.0)
    other.append([page(7)])
    other.close()
    path = tmp_path / "1" / "values.dat"
    data = path.read_bytes()
    foreign = (tmp_path / "2" / "values.dat").read_bytes()
    path.write_bytes(foreign + data[2 * BLOCK_BYTES :] + data[:BLOCK_BYTES])
    again, rows = load(tmp_path / "1")
    assert rows == []
    again.close()


def test_rows_that_a_tree_lost_are_found_between_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """LMDB checks nothing: after a flipped bit in a branch page it may give fewer rows, and no error."""
    segment = make(tmp_path / "1", [[page(number)] for number in range(9)])
    segment.write_index()
    segment.close()
    read_index = segment_module.read_index

    def forgetful(directory: Path) -> Any:
        found = read_index(directory)
        assert found is not None
        del found.rows[2:5]
        del found.rows[-1]
        return found

    monkeypatch.setattr(segment_module, "read_index", forgetful)
    again, rows = load(tmp_path / "1")
    assert [key for key, _ in rows] == [page(number)[0] for number in range(9)]
    assert (again.found_by_record, again.damaged, again.closed_to_writes) == (4, True, True)
    again.close()


def test_a_dead_row_stays_dead(tmp_path: Path):
    segment = make(tmp_path / "1", [[page(1), page(2)]])
    segment.write_index()
    rows = load(tmp_path / "1")[1]
    segment.mark_dead(rows[:1])
    segment.write_index()
    segment.close()
    again, rows = load(tmp_path / "1")
    assert [row.dead for _, row in rows] == [True, False]
    again.close()


def test_no_waiting_for_the_disk(tmp_path: Path):
    segment = make(tmp_path / "1", [[page(1, 50_000)]])
    ((_, row),) = load(tmp_path / "1")[1]
    into = memoryview(bytearray(row.size))
    segment.read_into(row.offset, into, wait=False)
    assert into == page(1, 50_000)[1]
    fd = os.open(tmp_path / "1" / "values.dat", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with pytest.raises(NotInMemory):
        segment.read_into(row.offset, into, wait=False)
    segment.read_into(row.offset, into)
    assert into == segment.read(row.offset, row.size) == page(1, 50_000)[1]
    with pytest.raises(CorruptValue, match="short"):
        segment.read(row.offset, 100_000)
    segment.close()


# ---- through the tier ----


def crashed(tier: SsdTier, directory: Path) -> None:
    """Make of ``directory`` what kill -9 at this moment would leave, and end the tier."""
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    tier.close()
    shutil.rmtree(directory)
    copy.rename(directory)


def test_the_index_follows_in_its_own_time(open_tier: Any, chains: Any, clock: ManualClock, tmp_path: Path):
    index = tmp_path / "store" / "segments" / "00000001" / "data.mdb"
    tier = open_tier()
    keys = chains.keys(4)
    open_tier.put(tier, chains.items(keys[:2]))
    assert not index.exists(), "a put needs none"
    clock.advance(INDEX_LAG_S)
    tier.maintenance.tick()
    tier._writer.call(lambda: None).result(10)
    tier._writer.call(lambda: None).result(10)
    assert index.exists()
    open_tier.put(tier, chains.items(keys[2:]))
    crashed(tier, tmp_path / "store")
    tier = open_tier()
    assert tier.counters["store_pages_found_by_record"] == 2
    assert tier.counters["store_segments_damaged"] == 0
    assert [tier.get(key) for key in keys] == [chains.value(key) for key in keys]
    assert open_tier.put(tier, chains.items(chains.keys(1, salt=1))).stored == 1
    assert tier.stats()["store_segments"] == 1, "it goes on in the same segment"


def test_an_index_that_cannot_be_written_costs_nothing(
    open_tier: Any, chains: Any, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier(segment_bytes=8 * BLOCK_BYTES)
    keys = chains.keys(40)

    def fail(*_: Any, **__: Any) -> int:
        raise (OSError(errno.ENOSPC, "full"), IndexDamaged("no"), MemoryError())[len(tried) % 3]

    tried: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("cedar.kvstore.segment_index.write_index", fail)
        for start in range(0, 40, 4):
            assert open_tier.put(tier, chains.items(keys)[start : start + 4]).stored == 4
            clock.advance(INDEX_LAG_S)
            tried.append(start)
            tier.maintenance.tick()
        assert tier.stats()["store_segments"] == 5
        assert tier.match(keys) == 40
        assert tier.remove(keys[:1]).result(10) > 0, "a removal too"
        crashed(tier, tmp_path / "store")
    assert not list((tmp_path / "store").rglob("data.mdb"))
    tier = open_tier()
    assert [tier.get(key) is not None for key in keys] == [False, *[True] * 39]
    tier.check_integrity(deep=True)


def test_a_purge_takes_every_copy_off_the_disk(
    open_tier: Any, chains: Any, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that was replaced in the same segment, one that was carried on, one of a commit that failed."""
    tier = open_tier()
    keys = chains.keys(6)
    items = chains.items(keys)
    open_tier.put(tier, items[:3])
    clock.advance(73 * 3600)  # all of it is past its time
    open_tier.put(tier, items[:3])
    failing = list(items[3:])
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, "no")

        patch.setattr(ValuesFile, "sync", fail)
        patch.setattr(ValuesFile, "truncate", fail)
        assert open_tier.put(tier, failing).reason == "disk"
    clock.advance(2)
    other = chains.items(chains.keys(2, salt=5))
    other = [type(item)(item.key, item.value, item.page_index, b"other") for item in other]
    open_tier.put(tier, other)
    files = list((tmp_path / "store" / "segments").glob("*/values.dat"))
    held = b"".join(path.read_bytes() for path in files)
    assert [held.count(item.value[96:1000]) for item in items] == [2, 2, 2, 1, 1, 1]
    gone, size = tier.purge(b"tenant")
    assert (len(gone), size) == (6, 3 * len(items[0].value))
    held = b"".join(path.read_bytes() for path in files)
    assert [held.count(item.value[96:1000]) for item in items] == [0] * 6
    assert [held.count(item.value[96:1000]) for item in other] == [1, 1]
    assert b"tenant\0" not in held
    assert [tier.get(item.key) for item in other] == [item.value for item in other]
    crashed(tier, tmp_path / "store")
    for index in (tmp_path / "store").rglob("data.mdb"):
        index.unlink()
    tier = open_tier()
    assert tier.match(keys) == 0
    assert [tier.get(item.key) for item in other] == [item.value for item in other]
    tier.check_integrity(deep=True)
