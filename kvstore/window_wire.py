"""Window records on the wire: cut into frames, and put together again with every check."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from cedar.kvstore.errors import CorruptValue, FrameError
from cedar.kvstore.frames import (
    CHECKSUM_BYTES,
    FrameKind,
    RecordAssembler,
    decode_frame,
    encode_frame,
    split_record,
)
from cedar.kvstore.window_tier import WindowName
from cedar.v1 import store_pb2


def window_frames(
    name: WindowName, record: bytes, checksum: bytes, *, tenant: bytes = b"", purges: Sequence[int] = ()
) -> Iterator[bytes]:
    """Frames of one record, in order. ``purges``: between nodes, of the tenant, as the sender knows them."""
    meta = store_pb2.WindowMeta(
        page_key=name.page_key,
        tokens=name.tokens,
        digest=name.digest,
        total_bytes=len(record),
        checksum=checksum,
        tenant=tenant,
        purges=purges,
    )
    for offset, piece in split_record(record):
        meta.offset = offset
        yield encode_frame(FrameKind.WINDOW, meta, piece)


async def assemble_window(messages: AsyncIterator[bytes], name: WindowName, limit_bytes: int) -> bytes:
    """The record that a GetWindow answer holds. FrameError, CorruptValue when it is not the one asked for."""
    assembler: RecordAssembler | None = None
    async for message in messages:
        frame = decode_frame(message, expect=FrameKind.WINDOW)
        meta = store_pb2.WindowMeta.FromString(frame.meta)
        if (meta.page_key, meta.tokens, meta.digest) != name:
            raise CorruptValue("key", "the store sent another window record")
        if assembler is None:
            if len(meta.checksum) != CHECKSUM_BYTES:
                raise FrameError("checksum", f"{len(meta.checksum)} bytes", f"must be {CHECKSUM_BYTES}")
            assembler = RecordAssembler(meta.total_bytes, meta.checksum, limit_bytes=limit_bytes)
        assembler.add(meta.offset, frame.payload)
    if assembler is None:
        raise FrameError("frames", 0, "at least one")
    return assembler.finish()
