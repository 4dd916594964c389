from __future__ import annotations

import random

import pytest
from cedar.kvstore.blank_bytes import blank_bytes
from cedar.kvstore.errors import FrameError
from cedar.kvstore.frames import (
    FRAME_HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameKind,
    RecordAssembler,
    blank_frame,
    decode_frame,
    encode_frame,
    record_checksum,
    split_record,
)
from cedar.kvstore.page_wire import PagesFrame
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


def test_a_blank_frame_is_the_same_message_once_it_is_written():
    for size in (0, 1, 1000, 1 << 20):
        payload = random.Random(size).randbytes(size)
        message, view = blank_frame(FrameKind.WINDOW, b"me", size)
        view[:] = payload
        view.release()
        assert type(message) is bytes
        assert message == encode_frame(FrameKind.WINDOW, b"me", payload)
        assert hash(message) == hash(bytes(bytearray(message)))
    with pytest.raises(FrameError, match="split the record"):
        blank_frame(1, b"", MAX_FRAME_BYTES)


def test_the_view_of_blank_bytes_keeps_them():
    for _ in range(50):
        view = blank_bytes(1 << 20)[1]
        others = [blank_bytes(1 << 20) for _ in range(3)]
        for number, (_, other) in enumerate(others):
            other[:] = bytes([number]) * len(other)
        view[:] = b"x" * len(view)
        assert [set(message) for message, _ in others] == [{0}, {1}, {2}]
        assert bytes(view) == b"x" * len(view)
    for size in (-1, 0, 1):
        with pytest.raises(ValueError, match="at least 2 bytes"):
            blank_bytes(size)


def test_a_frame_of_pages_read_into_place_is_cut_to_what_was_read():
    keys = [bytes([number]) * 32 for number in range(5)]
    values = [bytes([100 + number]) * 300 for number in range(3)]
    frame = PagesFrame(keys, first_page=7, tenant=b"t")
    for value, view in zip(values, frame.place(3, 300), strict=True):
        view[:] = value
    for count in (3, 2, 1):
        meta = store_pb2.StoredMeta(
            page_keys=b"".join(keys[:count]), value_bytes=300, first_page=7, tenant=b"t"
        )
        assert frame.message(count) == encode_frame(FrameKind.PAGES, meta, *values[:count])


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
