"""A stored value: a 96-byte header, then the page.

    0  magic "CDRP"   4  version u16   6  flags u16   8  tokens u32   12  payload bytes u32
    16 page key [32]  48 model fingerprint [32]       80 xxh3_128 of bytes 0..80 and the payload [16]

Little endian. Key and length are inside the value, so a value that was swapped, misdirected or cut is found
like one with a flipped bit. Equal pages give equal values: no clock and no writer enters.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash
from cedar.kvstore.errors import CorruptValue, InvalidRequest
from cedar.kvstore.keys import KEY_BYTES

HEADER_BYTES: Final = 96
CHECKSUM_BYTES: Final = 16
HEADER_VERSION: Final = 1
FLAG_AFTER_REPLAY: Final = 1
"""The page was computed after a bounded replay: its bytes depend slightly on where the hit was."""
KNOWN_FLAGS: Final = FLAG_AFTER_REPLAY

_MAGIC: Final = b"CDRP"
_FIELDS: Final = struct.Struct("<4sHHII32s32s")
_TOKENS: Final = struct.Struct("<I")
assert _FIELDS.size + CHECKSUM_BYTES == HEADER_BYTES


class ValueHeader(NamedTuple):
    """What a stored value says about itself."""

    flags: int
    tokens: int
    payload_bytes: int
    page_key: bytes
    fingerprint: bytes
    checksum: bytes


def seal_value(
    payload: bytes | bytearray | memoryview,
    *,
    fingerprint: bytes,
    page_key: bytes,
    tokens: int,
    flags: int = 0,
) -> bytes:
    """Header and payload as one ``bytes``: what is put, sent and stored. One copy of the payload."""
    if len(page_key) != KEY_BYTES:
        raise InvalidRequest("page_key", f"{len(page_key)} bytes", f"must be {KEY_BYTES} bytes")
    if len(fingerprint) != KEY_BYTES:
        raise InvalidRequest("fingerprint", f"{len(fingerprint)} bytes", f"must be {KEY_BYTES} bytes")
    if flags & ~KNOWN_FLAGS:
        raise InvalidRequest("flags", flags, f"only bits of {KNOWN_FLAGS:#x}")
    if not 0 < tokens < 1 << 32:
        raise InvalidRequest("tokens", tokens, "1 to 2**32-1")
    view = memoryview(payload).cast("B")
    if not 0 < len(view) < 1 << 32:
        raise InvalidRequest("payload", f"{len(view)} bytes", "1 to 2**32-1 bytes")
    fields = _FIELDS.pack(_MAGIC, HEADER_VERSION, flags, tokens, len(view), page_key, fingerprint)
    return b"".join((fields, _checksum(fields, view), view))


def read_header(value: bytes | bytearray | memoryview, size: int | None = None) -> ValueHeader:
    """The header alone, payload unverified; CorruptValue when it is not one or the length differs.

    ``size``: of the whole value, where ``value`` is only its beginning.
    """
    size = len(value) if size is None else size
    if len(value) < HEADER_BYTES:
        raise CorruptValue("short", f"{len(value)} bytes")
    magic, version, flags, tokens, payload_bytes, key, fingerprint = _FIELDS.unpack_from(value)
    if magic != _MAGIC:
        raise CorruptValue("magic")
    if version != HEADER_VERSION:
        raise CorruptValue("version", f"{version}, this build reads {HEADER_VERSION}")
    if flags & ~KNOWN_FLAGS:
        raise CorruptValue("flags", f"{flags:#x}")
    if payload_bytes != size - HEADER_BYTES:
        raise CorruptValue("length", f"header says {payload_bytes}, value has {size - HEADER_BYTES}")
    checksum = bytes(value[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES])
    return ValueHeader(flags, tokens, payload_bytes, key, fingerprint, checksum)


def tokens_of(value: bytes | memoryview) -> int:
    """What the header of a verified value says of its tokens."""
    return int(_TOKENS.unpack_from(value, 8)[0])


def verify_value(
    value: bytes | memoryview,
    *,
    page_key: bytes | None = None,
    fingerprint: bytes | None = None,
    tokens: int | None = None,
    payload_bytes: int | None = None,
) -> ValueHeader:
    """Check form, checksum, and each expectation that is given. CorruptValue names what failed."""
    header = read_header(value)
    view = memoryview(value)
    if _checksum(view[: _FIELDS.size], view[HEADER_BYTES:]) != header.checksum:
        raise CorruptValue("checksum")
    if page_key is not None and header.page_key != page_key:
        raise CorruptValue("key", "the value belongs to another page")
    if fingerprint is not None and header.fingerprint != fingerprint:
        raise CorruptValue("fingerprint", "the value belongs to another model")
    if tokens is not None and header.tokens != tokens:
        raise CorruptValue("tokens", f"{header.tokens}, expected {tokens}")
    if payload_bytes is not None and header.payload_bytes != payload_bytes:
        raise CorruptValue("length", f"{header.payload_bytes}, expected {payload_bytes}")
    return header


def open_value(
    value: bytes | memoryview,
    *,
    page_key: bytes | None = None,
    fingerprint: bytes | None = None,
    tokens: int | None = None,
    payload_bytes: int | None = None,
) -> memoryview:
    """The verified payload, a view into ``value``; CorruptValue when anything differs."""
    verify_value(
        value, page_key=page_key, fingerprint=fingerprint, tokens=tokens, payload_bytes=payload_bytes
    )
    return memoryview(value)[HEADER_BYTES:]


def _checksum(fields: bytes | memoryview, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(payload)
    return digest.digest()
