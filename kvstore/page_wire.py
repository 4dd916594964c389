"""Pages on the wire: the frames of a put, and the checked values of a GetPages answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final

from cedar.kvstore.errors import CorruptValue, FrameError
from cedar.kvstore.frames import FrameKind, blank_frame, decode_frame, encode_frame
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.keys import KEY_BYTES
from cedar.kvstore.stall_watch import StallWatch
from cedar.v1 import store_pb2
from google.protobuf.message import DecodeError

MAX_PAGES_A_FRAME: Final = 256
PUT_FRAME_BYTES: Final = 1920 << 10
"""Payload of a put's frame: eight pages of V4.1-Flash, two writes of a segment. To receive these costs a node
less than twice as many of 1 MiB, and nobody waits for the first page of a put."""


def page_frames(
    keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int, tenant: bytes
) -> Iterator[bytes]:
    """Frames of sealed values of consecutive pages, each about PUT_FRAME_BYTES of values of one size."""
    start = 0
    while start < len(keys):
        size = len(values[start])
        end = start + 1
        while (
            end < len(keys)
            and len(values[end]) == size
            and (end - start + 1) * size <= PUT_FRAME_BYTES
            and end - start < MAX_PAGES_A_FRAME
        ):
            end += 1
        meta = store_pb2.StoredMeta(
            page_keys=b"".join(keys[start:end]),
            value_bytes=size,
            first_page=first_page + start,
            tenant=tenant,
        )
        yield encode_frame(FrameKind.PAGES, meta, *values[start:end])
        start = end


class PagesFrame:
    """One frame of leading pages of ``keys``, read from the disk straight into the message that is sent.

    ``about``: fields of its StoredMeta besides keys and sizes.
    """

    def __init__(self, keys: Sequence[bytes], **about: Any) -> None:
        self._keys = keys
        self._about = about
        self._message = b""
        self._payload = memoryview(b"")
        self._count = self._value_bytes = 0

    def place(self, count: int, value_bytes: int) -> list[memoryview]:
        """Where ``count`` values of this size are to be written; the ``place`` of ``SsdTier.read_into``."""
        self._count, self._value_bytes = count, value_bytes
        self._message, self._payload = blank_frame(FrameKind.PAGES, self._meta(count), count * value_bytes)
        return [self._payload[i * value_bytes : (i + 1) * value_bytes] for i in range(count)]

    def message(self, count: int) -> bytes:
        """The frame of the first ``count`` values, those that were written."""
        if count == self._count:
            return self._message
        return encode_frame(FrameKind.PAGES, self._meta(count), self._payload[: count * self._value_bytes])

    def _meta(self, count: int) -> store_pb2.StoredMeta:
        return store_pb2.StoredMeta(
            page_keys=b"".join(self._keys[:count]), value_bytes=self._value_bytes, **self._about
        )


async def verified_values(
    call: Any,
    keys: Sequence[bytes],
    *,
    fingerprint: bytes | None,
    stall_timeout_s: float,
    max_value_bytes: int,
) -> AsyncGenerator[list[memoryview], None]:
    """The pages in order, frame by frame, each verified against its key; ``call``: of GetPages.

    Ends where the store ends. A frame or value that is not what was asked for raises FrameError or
    CorruptValue, after the good ones before it; TimeoutError when nothing comes for ``stall_timeout_s``; an
    RPC error as gRPC raises it.
    """
    position = 0
    messages = call.__aiter__()
    with StallWatch(stall_timeout_s) as watch:
        while position < len(keys):
            try:
                message = await watch.within(messages.__anext__())
            except StopAsyncIteration:
                return
            good: list[memoryview] = []
            try:
                for value in _values_of(message, keys, position, max_value_bytes):
                    verify_value(value, page_key=keys[position], fingerprint=fingerprint)
                    good.append(value)
                    position += 1
            except CorruptValue:
                if good:
                    yield good
                raise
            yield good


def _values_of(
    message: bytes, keys: Sequence[bytes], position: int, max_value_bytes: int
) -> list[memoryview]:
    frame = decode_frame(message, expect=FrameKind.PAGES)
    try:
        meta = store_pb2.StoredMeta.FromString(frame.meta)
    except DecodeError as error:
        raise FrameError("meta", f"{len(frame.meta)} bytes", str(error)) from None
    count, rest = divmod(len(meta.page_keys), KEY_BYTES)
    if not count or rest or meta.page_keys != b"".join(keys[position : position + count]):
        raise CorruptValue("key", f"the store sent other pages than number {position} and after")
    size = meta.value_bytes
    payload = frame.payload
    if not HEADER_BYTES < size <= max_value_bytes or size * count != len(payload):
        raise FrameError("value_bytes", size, f"{count} values in {len(payload)}")
    return [payload[start : start + size] for start in range(0, len(payload), size)]
