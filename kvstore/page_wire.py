"""Pages on the wire: the frames of a put, and the checked values of a GetPages answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final

from cedar.kvstore.errors import CorruptValue, FrameError, InvalidRequest
from cedar.kvstore.frames import FRAME_BYTES, FrameKind, decode_frame, encode_frame
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.keys import KEY_BYTES, split_keys
from cedar.v1 import store_pb2
from google.protobuf.message import DecodeError

MAX_PAGES_A_FRAME: Final = 256


def page_frames(
    keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int, tenant: bytes
) -> Iterator[bytes]:
    """Frames of sealed values of consecutive pages, each about FRAME_BYTES of values of one size."""
    start = 0
    while start < len(keys):
        size = len(values[start])
        end = start + 1
        while (
            end < len(keys)
            and len(values[end]) == size
            and (end - start + 1) * size <= FRAME_BYTES
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


async def verified_values(
    call: Any,
    keys: Sequence[bytes],
    *,
    fingerprint: bytes | None,
    stall_timeout_s: float,
    max_value_bytes: int,
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """(index, value) of each page in order, verified against its key.

    Ends where the store ends. A frame or value that is not what was asked for raises FrameError or
    CorruptValue; TimeoutError when nothing comes for ``stall_timeout_s``; an RPC error as gRPC raises it.
    """
    position = 0
    messages = call.__aiter__()
    while position < len(keys):
        async with asyncio.timeout(stall_timeout_s):
            try:
                message = await messages.__anext__()
            except StopAsyncIteration:
                return
        for value in _values_of(message, keys, position, max_value_bytes):
            verify_value(value, page_key=keys[position], fingerprint=fingerprint)
            yield position, value
            position += 1


def _values_of(
    message: bytes, keys: Sequence[bytes], position: int, max_value_bytes: int
) -> list[memoryview]:
    frame = decode_frame(message, expect=FrameKind.PAGES)
    try:
        meta = store_pb2.StoredMeta.FromString(frame.meta)
        named = split_keys(meta.page_keys)
    except (DecodeError, InvalidRequest) as error:
        raise FrameError("meta", f"{len(frame.meta)} bytes", str(error)) from None
    if not named or named != list(keys[position : position + len(named)]):
        raise CorruptValue("key", f"the store sent other pages than number {position} and after")
    size = meta.value_bytes
    if not HEADER_BYTES < size <= max_value_bytes or size * len(named) != len(frame.payload):
        raise FrameError(
            "value_bytes", size, f"{len(meta.page_keys) // KEY_BYTES} values in {len(frame.payload)}"
        )
    return [frame.payload[size * i : size * (i + 1)] for i in range(len(named))]
