"""What a request must look like before the node acts on it. Every fault is an InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cedar.kvstore.config import NodeConfig
from cedar.kvstore.errors import CorruptValue, InvalidRequest
from cedar.kvstore.frames import CHECKSUM_BYTES, FrameKind, decode_frame
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.keys import KEY_BYTES, split_keys
from cedar.kvstore.put import PutItem
from cedar.kvstore.rows import MAX_TENANT_BYTES
from cedar.kvstore.window_tier import WindowName
from cedar.v1 import store_pb2
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def expect_known_fields(message: Message) -> None:
    """Refuse a message with fields that this build does not know: it would be obeyed in part."""
    unknown: Any = UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({field.field_number for field in unknown})
        raise InvalidRequest(message.DESCRIPTOR.name, f"unknown fields {numbers}", "not known to this store")


def expect_key(field: str, key: bytes) -> bytes:
    """A key of 32 bytes."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(field, f"{len(key)} bytes", f"must be {KEY_BYTES} bytes")
    return key


def requested_keys(joined: bytes, config: NodeConfig) -> list[bytes]:
    """The keys of a read: at least one, at most ``max_keys``."""
    keys = split_keys(joined, limit=config.max_keys)
    if not keys:
        raise InvalidRequest("page_keys", "none", "at least one key")
    return keys


def items_of_frame(
    message: bytes, config: NodeConfig, fingerprint: bytes | None
) -> tuple[list[PutItem], bytes]:
    """The verified values of one PutPages frame, and the model fingerprint that all of them carry.

    ``fingerprint``: that of the frames before, None in the first.
    """
    frame = decode_frame(message, expect=FrameKind.PAGES)
    meta = store_pb2.StoredMeta.FromString(frame.meta)
    expect_known_fields(meta)
    keys = requested_keys(meta.page_keys, config)
    if not HEADER_BYTES < meta.value_bytes <= config.max_value_bytes:
        limit = f"above {HEADER_BYTES}, at most {config.max_value_bytes}"
        raise InvalidRequest("value_bytes", meta.value_bytes, limit)
    if meta.value_bytes * len(keys) != len(frame.payload):
        wanted = f"{len(keys)} values of {meta.value_bytes} bytes"
        raise InvalidRequest(
            "payload", f"{len(frame.payload)} bytes", f"page_keys and value_bytes say {wanted}"
        )
    tenant = expect_tenant(meta.tenant)
    if meta.first_page + len(keys) >= 1 << 32:
        raise InvalidRequest("first_page", meta.first_page, "the chain must stay below 2**32 pages")
    items = []
    for number, key in enumerate(keys):
        value = frame.payload[number * meta.value_bytes : (number + 1) * meta.value_bytes]
        try:
            header = verify_value(value, page_key=key, fingerprint=fingerprint)
        except CorruptValue as error:
            raise InvalidRequest("value", f"number {number}", str(error)) from None
        if fingerprint is None:
            fingerprint = expect_fingerprint(header.fingerprint, config.fingerprints)
        items.append(PutItem(key, value, meta.first_page + number, tenant))
    assert fingerprint is not None
    return items, fingerprint


def expect_tenant(tenant: bytes) -> bytes:
    """A tenant domain, or nothing."""
    if len(tenant) > MAX_TENANT_BYTES:
        raise InvalidRequest("tenant", f"{len(tenant)} bytes", f"at most {MAX_TENANT_BYTES} bytes")
    return tenant


def expect_fingerprint(fingerprint: bytes, allowed: Sequence[bytes]) -> bytes:
    """The fingerprint of a model that this node serves."""
    if allowed and fingerprint not in allowed:
        raise InvalidRequest("fingerprint", fingerprint.hex(), "not a model of this store")
    return fingerprint


@dataclass(frozen=True)
class WindowPiece:
    """One verified PutWindow frame."""

    name: WindowName
    total_bytes: int
    offset: int
    checksum: bytes
    piece: memoryview
    tenant: bytes = b""

    def continues(self, first: WindowPiece) -> bool:
        """Whether this belongs to the same record as the first piece of its call."""
        mine = (self.name, self.total_bytes, self.checksum)
        return mine == (first.name, first.total_bytes, first.checksum)


def window_piece(message: bytes) -> WindowPiece:
    """Take a PutWindow frame apart."""
    frame = decode_frame(message, expect=FrameKind.WINDOW)
    meta = store_pb2.WindowMeta.FromString(frame.meta)
    expect_known_fields(meta)
    if len(meta.checksum) != CHECKSUM_BYTES:
        raise InvalidRequest("checksum", f"{len(meta.checksum)} bytes", f"must be {CHECKSUM_BYTES} bytes")
    name = window_name(meta.page_key, meta.tokens, meta.digest)
    tenant = expect_tenant(meta.tenant)
    return WindowPiece(name, meta.total_bytes, meta.offset, meta.checksum, frame.payload, tenant)


def window_name(page_key: bytes, tokens: int, digest: bytes) -> WindowName:
    """The name of a window record."""
    if tokens < 1:
        raise InvalidRequest("tokens", tokens, "at least 1")
    return WindowName(expect_key("page_key", page_key), tokens, expect_key("digest", digest))
