"""Image features from an Encoder worker to Prefill, as frames with one checksum over all rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import grpc
from cedar.actors.channels import Channels
from cedar.actors.errors import Corrupt, DeadlinePassed, StageError, Unavailable
from cedar.actors.status import from_status
from cedar.kvstore.frames import FrameKind, decode_frame, encode_frame, record_checksum, split_record
from cedar.kvstore.rpc import ServiceStub
from cedar.v1 import stages_pb2
from cedar.v1.stages_pb2 import FeatureMeta, FeaturesRequest

_ENCODER = "encoder"
_RETRY_S = 0.1


def feature_frames(content_hash: bytes, rows: int, width: int, data: bytes) -> Iterator[bytes]:
    """Frames of bf16 rows ``[rows, width]``."""
    meta = FeatureMeta(content_hash=content_hash, rows=rows, width=width, checksum=record_checksum(data))
    for _, part in split_record(data):
        yield encode_frame(FrameKind.FEATURES, meta, part)


async def fetch_features(
    channels: Channels,
    address: str,
    content_hash: bytes,
    *,
    tenant: bytes,
    rows: int,
    width: int,
    timeout_s: float,
) -> bytes:
    """bf16 rows ``[rows, width]`` of one image that was encoded for ``tenant``, verified.

    An encoder that cannot be reached is tried again until ``timeout_s`` is over. NotFound when the features
    have expired there, Corrupt when they are not what was asked for; all errors name the encoder stage.
    """
    deadline = time.monotonic() + timeout_s
    failure: StageError = DeadlinePassed(f"encoder: no features within {timeout_s:g} s", stage=_ENCODER)
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with channels.to(address) as channel:
                stub = ServiceStub(channel, stages_pb2.DESCRIPTOR.services_by_name["Encode"])
                request = FeaturesRequest(content_hash=content_hash, tenant=tenant)
                frames = stub.GetFeatures(request, timeout=left)
                return await _gather(frames, content_hash, rows, width)
        except grpc.aio.AioRpcError as error:
            failure = from_status(error, _ENCODER)
            if not isinstance(failure, Unavailable):
                raise failure from None
        await asyncio.sleep(_RETRY_S)
    raise failure


async def _gather(frames: AsyncIterator[bytes], content_hash: bytes, rows: int, width: int) -> bytes:
    size = rows * width * 2
    parts: list[memoryview] = []
    have = 0
    checksum = b""
    async for message in frames:
        frame = decode_frame(message, expect=FrameKind.FEATURES)
        meta = FeatureMeta.FromString(frame.meta)
        if (meta.content_hash, meta.rows, meta.width) != (content_hash, rows, width):
            raise Corrupt(
                f"encoder: features of {meta.rows} x {meta.width}, expected {rows} x {width}", stage=_ENCODER
            )
        checksum = meta.checksum
        parts.append(frame.payload)
        have += len(frame.payload)
        if have > size:
            break
    data = b"".join(parts)
    if len(data) != size or record_checksum(data) != checksum:
        raise Corrupt(f"encoder: {len(data)} bytes of features, expected {size}, or damaged", stage=_ENCODER)
    return data
