from __future__ import annotations

import os

import pytest
from cedar.kvstore import joining
from cedar.kvstore.joining import SMALL_BYTES, join


@pytest.mark.parametrize(
    "sizes", [[], [0], [1, 2, 3], [SMALL_BYTES], [10, 0, 3 * SMALL_BYTES, 7], [SMALL_BYTES - 1]]
)
def test_joins_as_bytes_do(sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    mixed = [memoryview(part) if i % 2 else bytearray(part) for i, part in enumerate(parts)]
    joined = join(mixed)
    assert type(joined) is bytes
    assert joined == b"".join(parts)
    assert hash(joined) == hash(b"".join(parts))


def test_each_result_is_its_own() -> None:
    one, two = join([b"a" * SMALL_BYTES]), join([b"b" * SMALL_BYTES])
    assert one == b"a" * SMALL_BYTES
    assert two == b"b" * SMALL_BYTES


def test_typed_views_are_taken_as_bytes() -> None:
    words = memoryview(bytearray(4 * SMALL_BYTES)).cast("I")
    assert len(join([words])) == 4 * SMALL_BYTES


def test_without_cpython_it_is_a_plain_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_allocate", None)
    assert join([b"x" * SMALL_BYTES, b"y"]) == b"x" * SMALL_BYTES + b"y"
