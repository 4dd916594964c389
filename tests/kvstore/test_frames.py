from __future__ import annotations

import random

import pytest
from cedar.kvstore.errors import FrameError
from cedar.kvstore.frames import (
    FRAME_HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameKind,
    RecordAssembler,
    decode_frame,
    encode_frame,
    record_checksum,
    split_record,
)
from cedar.v1 import store_pb2


def test_round_trip():
    meta = store_pb2.StoredMeta(page_keys=b"k" * 32, value_bytes=5)
    message = encode_frame(FrameKind.PAGES, meta, b"ab", memoryview(b"cd"), bytearray(b"e"))
    frame = decode_frame(message, expect=FrameKind.PAGES)
    assert frame.kind == FrameKind.PAGES
    assert store_pb2.StoredMeta.FromString(frame.meta) == meta
    assert frame.payload == b"abcde"
    assert frame.payload.obj is message


def test_golden_frame():
    assert encode_frame(FrameKind.WINDOW, b"me", b"payload").hex() == (
        "43445246010200000200000007000000" + b"mepayload".hex()
    )


def test_payload_and_meta_may_be_empty():
    frame = decode_frame(encode_frame(7, b""))
    assert (frame.meta, bytes(frame.payload)) == (b"", b"")


@pytest.mark.parametrize("message", [bytearray(b"CDRF"), memoryview(b"CDRF"), None, "CDRF"])
def test_only_bytes_are_frames(message: object):
    with pytest.raises(FrameError, match="must be bytes"):
        decode_frame(message)  # type: ignore[arg-type]


def test_another_kind_and_version_are_refused():
    message = encode_frame(FrameKind.WINDOW, b"")
    with pytest.raises(FrameError, match="expected PAGES"):
        decode_frame(message, expect=FrameKind.PAGES)
    with pytest.raises(FrameError, match="version"):
        decode_frame(message[:4] + b"\2" + message[5:])


def test_frames_have_a_limit():
    with pytest.raises(FrameError, match="split the record"):
        encode_frame(1, b"", bytes(MAX_FRAME_BYTES))
    with pytest.raises(FrameError, match="kind"):
        encode_frame(256, b"")


def test_ten_thousand_damaged_frames_are_refused_or_whole():
    rng = random.Random(11)
    good = encode_frame(FrameKind.PAGES, b"m" * 40, b"p" * 300)
    for _ in range(10_000):
        choice = rng.randrange(4)
        if choice == 0:
            message = rng.randbytes(rng.randrange(64))
        elif choice == 1:
            message = good[: rng.randrange(len(good))]
        elif choice == 2:
            message = good[:4] + rng.randbytes(12) + good[16:]
        else:
            damaged = bytearray(good)
            damaged[rng.randrange(FRAME_HEADER_BYTES)] = rng.randrange(256)
            message = bytes(damaged)
        try:
            frame = decode_frame(message)
        except FrameError:
            continue
        assert FRAME_HEADER_BYTES + len(frame.meta) + len(frame.payload) == len(message)


def test_a_long_record_is_cut_and_put_together():
    record = random.Random(3).randbytes(100_001)
    pieces = list(split_record(record, 4096))
    assert len(pieces) == 25
    assembler = RecordAssembler(len(record), record_checksum(record), limit_bytes=1 << 20)
    for offset, piece in pieces:
        assert not assembler.complete
        assembler.add(offset, piece)
    assert assembler.complete
    assert assembler.finish() == record


def test_an_empty_record_is_one_empty_piece():
    assert [(offset, bytes(piece)) for offset, piece in split_record(b"")] == [(0, b"")]


def test_records_that_do_not_add_up_are_refused():
    checksum = record_checksum(b"abcdef")
    for total in (0, -1, 11):
        with pytest.raises(FrameError, match="total_bytes"):
            RecordAssembler(total, checksum, limit_bytes=10)

    def assembler() -> RecordAssembler:
        made = RecordAssembler(6, checksum, limit_bytes=10)
        made.add(0, b"abc")
        return made

    with pytest.raises(FrameError, match="offset"):
        assembler().add(4, b"x")  # a gap
    with pytest.raises(FrameError, match="offset"):
        assembler().add(0, b"abc")  # again
    with pytest.raises(FrameError, match="missing"):
        assembler().add(3, b"defg")  # too much
    with pytest.raises(FrameError, match="missing"):
        assembler().add(3, b"")  # nothing, which would never end
    with pytest.raises(FrameError, match="ended before"):
        assembler().finish()
    wrong = assembler()
    wrong.add(3, b"deF")
    with pytest.raises(FrameError, match="checksum"):
        wrong.finish()
