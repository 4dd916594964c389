"""Frames: how pages and window state travel in gRPC messages without passing through protobuf fields.

    0 magic "CDRF"   4 version u8   5 kind u8   6 zero u16   8 meta bytes u32   12 payload bytes u32
    16 meta, then payload

Little endian. ``meta`` is a small serialized protobuf record that says what the payload is; the payload
is raw. One frame is one message of about 1 MiB (``FRAME_BYTES``), built by a single join and read as a view.
Longer records travel as several frames (``split_record``, ``RecordAssembler``). Nothing here knows gRPC.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import xxhash
from cedar.kvstore.blank_bytes import blank_bytes
from cedar.kvstore.errors import FrameError

FRAME_BYTES: Final = 1 << 20
"""Payload to aim for in one frame: the size at which gRPC streams fastest."""
MAX_FRAME_BYTES: Final = 32 << 20
FRAME_HEADER_BYTES: Final = 16
FRAME_VERSION: Final = 1
CHECKSUM_BYTES: Final = 16
_MAGIC: Final = b"CDRF"
_HEADER: Final = struct.Struct("<4sBBHII")


class FrameKind(IntEnum):
    """What a frame carries; the proto record that ``meta`` holds is in brackets."""

    PAGES = 1  # stored values of consecutive pages (StoredMeta)
    WINDOW = 2  # a part of a window record (WindowMeta)
    FEATURES = 3  # rows of image features (FeatureMeta)
    EXPORT = 4  # stored values of any pages (ExportMeta)
    HANDOFF_HEADER = 16  # (HandoffHeader), no payload
    HANDOFF_REPLY = 17  # (HandoffReply), no payload
    HANDOFF_PAGES = 18  # stored values (PageMeta)
    HANDOFF_STATE = 19  # a part of the state record (StateMeta)
    HANDOFF_TOKEN = 20  # (FirstToken), no payload
    HANDOFF_FAILED = 21  # (HandoffFailed), no payload
    HANDOFF_DONE = 22  # (HandoffDone), no payload


class Serializable(Protocol):
    """A protobuf message, or anything that turns into bytes like one."""

    def SerializeToString(self) -> bytes:
        """The record's bytes."""


class Frame(NamedTuple):
    """A decoded frame; ``payload`` is a view into the message it came in."""

    kind: int
    meta: bytes
    payload: memoryview


def encode_frame(kind: int, meta: Serializable | bytes, *payload: bytes | bytearray | memoryview) -> bytes:
    """One message: header, meta and the payload parts back to back. One copy of each part."""
    length = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in payload)
    return b"".join((_head(kind, meta, length), *payload))


def blank_frame(kind: int, meta: Serializable | bytes, payload_bytes: int) -> tuple[bytes, memoryview]:
    """A message whose payload is to be written, to its last byte, through the view (see ``blank_bytes``)."""
    head = _head(kind, meta, payload_bytes)
    message, view = blank_bytes(len(head) + payload_bytes)
    view[: len(head)] = head
    return message, view[len(head) :]


def _head(kind: int, meta: Serializable | bytes, payload_bytes: int) -> bytes:
    """What stands before the payload."""
    record = meta if isinstance(meta, bytes) else meta.SerializeToString()
    total = FRAME_HEADER_BYTES + len(record) + payload_bytes
    if total > MAX_FRAME_BYTES:
        raise FrameError("frame", f"{total} bytes", f"at most {MAX_FRAME_BYTES} bytes; split the record")
    if not 0 <= kind <= 255:
        raise FrameError("kind", kind, "0 to 255")
    return _HEADER.pack(_MAGIC, FRAME_VERSION, kind, 0, len(record), payload_bytes) + record


def decode_frame(message: bytes, *, expect: int | None = None) -> Frame:
    """Take a message apart; FrameError when it is not a whole frame (of kind ``expect``)."""
    if type(message) is not bytes:
        raise FrameError("frame", type(message).__name__, "must be bytes")
    if len(message) < FRAME_HEADER_BYTES:
        raise FrameError("frame", f"{len(message)} bytes", f"at least {FRAME_HEADER_BYTES} bytes")
    magic, version, kind, zero, meta_bytes, payload_bytes = _HEADER.unpack_from(message)
    if magic != _MAGIC or zero != 0:
        raise FrameError("frame", bytes(message[:8]), "must start with a frame header")
    if version != FRAME_VERSION:
        raise FrameError("frame version", version, f"this build reads {FRAME_VERSION}")
    if FRAME_HEADER_BYTES + meta_bytes + payload_bytes != len(message):
        declared = f"{FRAME_HEADER_BYTES}+{meta_bytes}+{payload_bytes}"
        raise FrameError("frame", f"{len(message)} bytes", f"header declares {declared}")
    if expect is not None and kind != expect:
        raise FrameError("frame kind", kind, f"expected {FrameKind(expect).name}")
    start = FRAME_HEADER_BYTES + meta_bytes
    return Frame(kind, message[FRAME_HEADER_BYTES:start], memoryview(message)[start:])


def record_checksum(record: bytes | bytearray | memoryview) -> bytes:
    """xxh3_128 of a whole record, 16 bytes."""
    return xxhash.xxh3_128_digest(record)


def split_record(
    record: bytes | bytearray | memoryview, frame_bytes: int = FRAME_BYTES
) -> Iterator[tuple[int, memoryview]]:
    """Cut a record into (offset, view) pieces of at most ``frame_bytes``, in order; at least one piece."""
    view = memoryview(record).cast("B")
    for offset in range(0, max(len(view), 1), frame_bytes):
        yield offset, view[offset : offset + frame_bytes]


class RecordAssembler:
    """Puts a record together again from pieces that arrive in order.

    Refuses (FrameError) a size over ``limit_bytes``, a gap, an overlap, an early end, and a wrong checksum.
    Memory is taken as pieces arrive, so a false declaration costs nothing.
    """

    def __init__(self, total_bytes: int, checksum: bytes, *, limit_bytes: int) -> None:
        if not 0 < total_bytes <= limit_bytes:
            raise FrameError("total_bytes", total_bytes, f"1 to {limit_bytes}")
        self.total_bytes = total_bytes
        self._checksum = checksum
        self._parts: list[memoryview] = []
        self._have = 0

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return self._have == self.total_bytes

    def add(self, offset: int, piece: bytes | memoryview) -> None:
        """Take the next piece, which must start where the last one ended."""
        if offset != self._have:
            raise FrameError("offset", offset, f"next byte expected is {self._have}")
        if self._have + len(piece) > self.total_bytes or not len(piece):
            raise FrameError(
                "piece", f"{len(piece)} bytes", f"1 to {self.total_bytes - self._have} bytes are missing"
            )
        self._parts.append(memoryview(piece))
        self._have += len(piece)

    def finish(self) -> bytes:
        """The whole record, verified."""
        if not self.complete:
            raise FrameError("record", f"{self._have} bytes", f"ended before {self.total_bytes} bytes")
        record = b"".join(self._parts)
        if record_checksum(record) != self._checksum:
            raise FrameError("checksum", self._checksum.hex(), "differs from the record's")
        return record
