"""Packs: what goes in comes out verified, and nothing damaged comes out as anything but damage."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from cedar.kvstore import pack_file
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.packs import BadPack, PackReader, PackWriter, Page


def packed(pages: list[Page]) -> bytes:
    sink = io.BytesIO()
    writer = PackWriter(sink)
    for page in pages:
        writer.add(page)
    writer.finish()
    return sink.getvalue()


def reader(data: bytes) -> PackReader:
    return PackReader(lambda offset, length: data[offset : offset + length], len(data))


@pytest.fixture
def pages(chains) -> list[Page]:
    keys = chains.keys(7)
    sizes = [3392, 3392, 64, 5000, 3392, 1, 3392]
    return [
        Page(key, chains.value(key, size), index, b"t" * (index % 3), 1.5 * index)
        for index, (key, size) in enumerate(zip(keys, sizes, strict=True))
    ]


@pytest.mark.parametrize("batch_bytes", [1, 4000, 1 << 20])
def test_round_trip(pages: list[Page], batch_bytes: int) -> None:
    pack = reader(packed(pages))
    got = [(p.key, v, p.page_index, p.tenant, p.age_s) for p, v in pack.read(batch_bytes=batch_bytes)]
    assert got == [(p.key, p.value, p.page_index, p.tenant, p.age_s) for p in pages]
    assert pack.value(pack.pages[3]) == pages[3].value


def test_an_empty_pack_is_a_pack() -> None:
    assert reader(packed([])).pages == []


def test_nothing_damaged_enters(pages: list[Page], chains) -> None:
    writer = PackWriter(io.BytesIO())
    flipped = bytearray(pages[0].value)
    flipped[200] ^= 1
    for value, key in ((bytes(flipped), pages[0].key), (pages[1].value, pages[0].key)):
        with pytest.raises(CorruptValue):
            writer.add(Page(key, value))
    with pytest.raises(CorruptValue):
        writer.add(Page(pages[0].key, pages[0].value, tenant=b"x" * 65))
    assert writer.values == 0


def test_every_truncation_is_refused(pages: list[Page]) -> None:
    data = packed(pages[:2])
    for length in range(0, len(data), 61):
        with pytest.raises(BadPack):
            reader(data[:length])
    with pytest.raises(BadPack):
        reader(data + b"x")


def test_a_flipped_bit_costs_at_most_its_page(pages: list[Page]) -> None:
    data = packed(pages)
    true = {p.key: p.value for p in pages}
    rng = random.Random(3)
    for _ in range(300):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            got = list(reader(bytes(flipped)).read())
        except BadPack:
            continue
        damaged = [value for _, value in got if isinstance(value, CorruptValue)]
        assert len(damaged) == 1
        assert len(got) == len(pages)
        assert all(isinstance(v, CorruptValue) or true[p.key] == v for p, v in got)


def test_a_read_that_comes_short_is_damage(pages: list[Page]) -> None:
    data = packed(pages)
    pack = reader(data)
    pack._read_at = lambda offset, length: data[offset : offset + length - 1]
    outcomes = [value for _, value in pack.read(batch_bytes=1)]
    assert all(isinstance(value, CorruptValue) for value in outcomes)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, pages: list[Page]) -> None:
    path = tmp_path / "a.pack"
    with pytest.raises(RuntimeError), pack_file.writing(path) as writer:  # noqa: PT012
        writer.add(pages[0])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pack_file.writing(path) as writer:
        for page in pages:
            writer.add(page)
        assert not path.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    with pack_file.reading(path) as pack:
        assert [p.key for p in pack.pages] == [p.key for p in pages]
    path.write_bytes(b"something else entirely, and long enough to hold a trailer of 48 bytes")
    with pytest.raises(BadPack, match=r"a\.pack"), pack_file.reading(path):
        pass
