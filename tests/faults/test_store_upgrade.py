"""A store written by another build, newer or older: what is not understood is a miss, never a crash."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import lmdb
import pytest
import xxhash
from cedar.kvstore.records import HEAD_BYTES
from cedar.kvstore.ssd_tier import SsdTier

from .store_child import count, items_of, keys_of, open_tier, value_of


def written(directory: Path) -> tuple[Path, dict[bytes, int]]:
    """A store with two chains: its only segment, and where the values of the first chain are in it."""
    tier = open_tier(directory)
    for salt in (0, 1):
        assert tier.put(items_of(salt, 4)).result(30).stored == 4
    places = {key: offset_of(tier, key) for key in keys_of(0, 4)}
    tier.close()
    return directory / "segments" / "00000001", places


def offset_of(tier: SsdTier, key: bytes) -> int:
    entry = tier._index.get(key)
    assert entry is not None
    return entry.offset


def change_index(segment: Path, key: bytes, at: int, new: bytes) -> None:
    """Overwrite some bytes of a row of the index."""
    with lmdb.open(str(segment), max_dbs=0, map_size=1 << 20) as env, env.begin(write=True) as txn:
        row = bytearray(txn.get(key))
        row[at : at + len(new)] = new
        assert txn.put(key, bytes(row))


def change_value(segment: Path, at: int, new: bytes) -> None:
    with open(segment / "values.dat", "r+b") as file:
        file.seek(at)
        file.write(new)


def test_an_index_of_another_version(tmp_path: Path) -> None:
    segment, _ = written(tmp_path / "store")
    change_index(segment, b"about the segment", 0, struct.pack("<I", 99))
    tier = open_tier(tmp_path / "store")
    assert tier.counters["store_segments_damaged"] == 1
    assert count(tier, 0, 4) == [4, 0, 0], "records that are understood are found without it"
    assert tier.put(items_of(2, 4)).result(30).stored == 4, "it works"
    tier.close()
    tier = open_tier(tmp_path / "store")
    assert tier.counters["store_segments_damaged"] == 0, "the index was made anew"
    assert [count(tier, salt, 4) for salt in range(3)] == [[4, 0, 0]] * 3
    tier.check_integrity(deep=True)
    tier.close()


def test_a_value_of_another_version_is_a_miss(tmp_path: Path) -> None:
    segment, places = written(tmp_path / "store")
    key = keys_of(0, 4)[2]
    change_value(segment, places[key] + 4, struct.pack("<H", 2))
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, 4) == [3, 1, 0]
    assert count(tier, 1, 4) == [4, 0, 0]
    assert tier.put(items_of(0, 4)).result(30).stored == 1, "and may be put in this build's form"
    assert count(tier, 0, 4) == [4, 0, 0]
    tier.close()


def test_a_row_of_another_version_is_not_needed(tmp_path: Path) -> None:
    segment, places = written(tmp_path / "store")
    change_index(segment, struct.pack(">Q", places[keys_of(0, 4)[2]]), 0, b"\x09")
    tier = open_tier(tmp_path / "store")
    assert tier.counters["store_pages_found_by_record"] == 1
    assert count(tier, 0, 4) == count(tier, 1, 4) == [4, 0, 0]
    tier.close()


def test_a_record_of_another_version_is_a_miss(tmp_path: Path) -> None:
    segment, places = written(tmp_path / "store")
    at = places[keys_of(0, 4)[2]]
    with open(segment / "values.dat", "r+b") as file:  # such as that build would write, checksum and all
        file.seek(at - HEAD_BYTES)
        head = bytearray(file.read(HEAD_BYTES + 96))
        head[4:6] = struct.pack("<H", 9)
        checksum = xxhash.xxh3_64(bytes(head[:120]) + bytes(head[HEAD_BYTES:])).intdigest()
        head[120:HEAD_BYTES] = struct.pack("<Q", checksum)
        file.seek(at - HEAD_BYTES)
        file.write(head)
    os.unlink(segment / "data.mdb")
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, 4) == [3, 1, 0]
    assert count(tier, 1, 4) == [4, 0, 0]
    assert tier.put(items_of(0, 4)).result(30).stored == 1
    tier.close()


def test_a_segment_of_the_first_format_is_a_miss(tmp_path: Path) -> None:
    """It kept its values inside LMDB."""
    segment = tmp_path / "store" / "segments" / "00000007"
    segment.mkdir(parents=True)
    key = keys_of(0, 1)[0]
    with lmdb.open(str(segment), max_dbs=3, map_size=16 << 20) as env:
        tables = {name: env.open_db(name) for name in (b"values", b"rows", b"about")}
        with env.begin(write=True) as txn:
            txn.put(b"created", struct.pack("<Id", 1, 1.0), db=tables[b"about"])
            txn.put(key, value_of(key), db=tables[b"values"])
            txn.put(key, bytes(36) + b"tenant", db=tables[b"rows"])
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, 1) == [0, 1, 0]
    assert not segment.exists()
    assert tier.put(items_of(0, 4)).result(30).stored == 4, "it works"
    assert tier.stats()["store_segments"] == 1
    tier.close()


@pytest.mark.parametrize("digit", range(0, 60, 3))
def test_a_damaged_time_file_ends_no_page(digit: int, tmp_path: Path) -> None:
    """A digit of it turned into a 9, or something that is no digit."""
    written(tmp_path / "store")
    path = tmp_path / "store" / "time.json"
    text = path.read_text()
    path.write_text(text[:digit] + "9" + text[digit + 1 :])
    tier = open_tier(tmp_path / "store")
    tier.maintenance.tick()
    assert count(tier, 0, 4) == count(tier, 1, 4) == [4, 0, 0]
    tier.close()


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"store_s": "soon"}), json.dumps({"version": 7})])
def test_a_time_file_of_another_form(text: str, tmp_path: Path) -> None:
    written(tmp_path / "store")
    (tmp_path / "store" / "time.json").write_text(text)
    (tmp_path / "store" / "something new").mkdir()
    (tmp_path / "store" / "segments" / "not a number").mkdir()
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, 4) == count(tier, 1, 4) == [4, 0, 0]
    tier.close()
