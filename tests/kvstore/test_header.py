from __future__ import annotations

import random

import pytest
from cedar.kvstore.errors import CorruptValue, InvalidRequest
from cedar.kvstore.header import (
    FLAG_AFTER_REPLAY,
    HEADER_BYTES,
    open_value,
    read_header,
    seal_value,
    verify_value,
)
from hypothesis import given
from hypothesis import strategies as st

F, K = b"\xf0" * 32, b"\x0f" * 32
VALUE = seal_value(b"payload" * 40, fingerprint=F, page_key=K, tokens=32, flags=FLAG_AFTER_REPLAY)


def test_golden_value():
    assert VALUE[:HEADER_BYTES].hex() == (
        "434452500100010020000000180100000f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"
        "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0ff0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0"
        "f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0fe260e3165c6cf103c120cd4cd72291a"
    )


def test_round_trip_gives_a_view_of_the_payload():
    payload = open_value(VALUE, page_key=K, fingerprint=F, tokens=32, payload_bytes=280)
    assert isinstance(payload, memoryview)
    assert payload.obj is VALUE
    assert payload == b"payload" * 40
    header = read_header(VALUE)
    assert (header.flags, header.tokens, header.page_key, header.fingerprint) == (1, 32, K, F)


def test_equal_pages_make_equal_values():
    assert seal_value(bytearray(b"x"), fingerprint=F, page_key=K, tokens=1) == seal_value(
        memoryview(b"x"), fingerprint=F, page_key=K, tokens=1
    )


@pytest.mark.parametrize(
    ("expectation", "reason"),
    [
        ({"page_key": F}, "key"),
        ({"fingerprint": K}, "fingerprint"),
        ({"tokens": 31}, "tokens"),
        ({"payload_bytes": 281}, "length"),
    ],
)
def test_a_good_value_in_the_wrong_place_is_corrupt(expectation: dict, reason: str):
    with pytest.raises(CorruptValue) as caught:
        verify_value(VALUE, **expectation)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "short"),
        (VALUE[:95], "short"),
        (b"XXXX" + VALUE[4:], "magic"),
        (VALUE[:4] + b"\2\0" + VALUE[6:], "version"),
        (VALUE[:6] + b"\xff\0" + VALUE[8:], "flags"),
        (VALUE[:-1], "length"),
        (VALUE + b"x", "length"),
        (VALUE[:-1] + b"x", "checksum"),
    ],
)
def test_damage_is_named(value: bytes, reason: str):
    with pytest.raises(CorruptValue) as caught:
        verify_value(value)
    assert caught.value.reason == reason


def test_every_single_bit_matters():
    for bit in range(len(VALUE) * 8):
        damaged = bytearray(VALUE)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptValue):
            verify_value(bytes(damaged))


@given(st.binary(max_size=400))
def test_random_bytes_are_never_a_value(data: bytes):
    with pytest.raises(CorruptValue):
        verify_value(data)


def test_a_large_page_with_one_flipped_bit_anywhere_is_found():
    rng = random.Random(5)
    value = bytearray(seal_value(rng.randbytes(227_840), fingerprint=F, page_key=K, tokens=256))
    verify_value(value)
    for _ in range(200):
        bit = rng.randrange(len(value) * 8)
        value[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptValue):
            verify_value(value)
        value[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_key": b"k"}, "page_key"),
        ({"fingerprint": b"f"}, "fingerprint"),
        ({"flags": 2}, "flags"),
        ({"tokens": 0}, "tokens"),
        ({"payload": b""}, "payload"),
    ],
)
def test_what_cannot_be_sealed_is_named(change: dict, field: str):
    good: dict = {"payload": b"x", "fingerprint": F, "page_key": K, "tokens": 1}
    arguments = good | change
    with pytest.raises(InvalidRequest, match=field):
        seal_value(arguments.pop("payload"), **arguments)
