"""A store written by another build, newer or older: what is not understood is a miss, never a crash."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import lmdb
import pytest
from cedar.kvstore.segment import map_bytes_for

from .store_child import count, items_of, keys_of, open_tier


def written(directory: Path) -> Path:
    """A store with two chains; its only segment."""
    tier = open_tier(directory)
    for salt in (0, 1):
        assert tier.put(items_of(salt, 4)).result(30).stored == 4
    tier.close()
    return directory / "segments" / "00000001"


def rewrite(segment: Path, table: bytes, key: bytes, value: bytes) -> None:
    with lmdb.open(str(segment), max_dbs=3, map_size=map_bytes_for(1 << 20)) as env:
        inner = env.open_db(table)
        with env.begin(write=True) as txn:
            txn.put(key, value, db=inner)


def read(segment: Path, table: bytes, key: bytes) -> bytes:
    with lmdb.open(str(segment), max_dbs=3, map_size=map_bytes_for(1 << 20)) as env:
        inner = env.open_db(table)
        with env.begin() as txn:
            found: bytes | None = txn.get(key, db=inner)
            assert found is not None
            return found


def test_a_segment_of_another_version(tmp_path: Path) -> None:
    segment = written(tmp_path / "store")
    about = read(segment, b"about", b"created")
    rewrite(segment, b"about", b"created", struct.pack("<I", 99) + about[4:])
    tier = open_tier(tmp_path / "store")
    assert tier.put(items_of(2, 4)).result(30).stored == 4, "it works"
    for _ in range(20):
        tier.maintenance.tick()
    assert count(tier, 0, 4) == [4, 0, 0], "values that are understood come over"
    tier.check_integrity(deep=True)
    tier.close()


def test_a_value_of_another_version_is_a_miss(tmp_path: Path) -> None:
    segment = written(tmp_path / "store")
    key = keys_of(0, 4)[2]
    value = bytearray(read(segment, b"values", key))
    value[4:6] = struct.pack("<H", 2)
    rewrite(segment, b"values", key, bytes(value))
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, 4) == [3, 1, 0]
    assert count(tier, 1, 4) == [4, 0, 0]
    assert tier.put(items_of(0, 4)).result(30).stored == 1, "and may be put in this build's form"
    assert count(tier, 0, 4) == [4, 0, 0]
    tier.close()


def test_a_row_of_another_version_is_a_miss(tmp_path: Path) -> None:
    segment = written(tmp_path / "store")
    key = keys_of(0, 4)[2]
    row = bytearray(read(segment, b"rows", key))
    row[0] = 9
    rewrite(segment, b"rows", key, bytes(row))
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, 4) == [3, 1, 0]
    assert tier.put(items_of(0, 4)).result(30).stored == 1
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
