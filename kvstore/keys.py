"""Names of pages: a hash chain over format, model, tenant, tokens and images.

    root_key      = SHA-256("cedar.root/1"  ‖ format ‖ fingerprint ‖ recipe ‖ tenant domain)
    page_key(i)   = SHA-256("cedar.page/1"  ‖ key of page i-1 (or root) ‖ token ids ‖ images)
    tail_digest   = SHA-256("cedar.tail/1"  ‖ key of the last full page ‖ token ids after it ‖ images)

The first ``RUN_TAG_BYTES`` of a key name the *run* the page belongs to, the next byte is the page's place:
consecutive pages of a chain make a run, and take over the first bytes of its first page's hash. So whoever
has a key knows where it is placed (``placement``), and a run lies together in every index. A run is
``RUN_PAGES`` long, but in the first ``HEAD_PAGES`` of a chain only ``HEAD_RUN_PAGES``: that is where prompts
with a common beginning part, and what follows should not all lie with it. 216 bits of the hash remain.

Every field is tagged and length-prefixed (``tag u8 ‖ length u32 LE ‖ bytes``), so no two different inputs
give the same hash input. Token ids are u32 LE. Every image position carries the same token id, so an image
enters by the hash of its content, with the part of its span that lies in the page.
Golden vectors: ``tests/kvstore/test_keys.py``. Changing any byte here changes every key ever stored.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cedar.kvstore.errors import InvalidRequest

KEY_BYTES: Final = 32
RUN_TAG_BYTES: Final = 4
RUN_PAGES: Final = 16
HEAD_PAGES: Final = 16
HEAD_RUN_PAGES: Final = 4
CONTENT_HASH_BYTES: Final = 32

_ROOT: Final = b"cedar.root/1"
_PAGE: Final = b"cedar.page/1"
_TAIL: Final = b"cedar.tail/1"
_TAG_DOMAIN, _TAG_FORMAT, _TAG_FINGERPRINT, _TAG_RECIPE, _TAG_TENANT = 1, 2, 3, 4, 5
_TAG_PARENT, _TAG_IDS, _TAG_IMAGE = 16, 17, 18
_NO_PAGE: Final = b"\xff"  # in the place of a root's place: the page after it begins a run
_FIELD: Final = struct.Struct("<BI")
_IMAGE: Final = struct.Struct("<III")
_KEY: Final = struct.Struct(f"{KEY_BYTES}s")


class ImageSpan(Protocol):
    """An image inside a prompt: positions ``[start, start + length)``."""

    @property
    def start(self) -> int:
        """First position of the span."""

    @property
    def length(self) -> int:
        """Positions in the span."""

    @property
    def content_hash(self) -> bytes:
        """32 bytes over the image's bytes, size and preprocessing."""


@dataclass(frozen=True)
class ImagePart:
    """The part of an image that lies in one page (or tail).

    ``offset``: position in the page where it starts; ``length``: positions in the page;
    ``first_slot``: index within the image's span of its first position in this page.
    """

    offset: int
    length: int
    content_hash: bytes
    first_slot: int


def tenant_domain(secret: bytes, tenant: str) -> bytes:
    """Salt of a tenant, 32 bytes: the gateway's secret over the authenticated name, never a client's word."""
    if not secret:
        raise InvalidRequest("secret", secret, "must not be empty")
    return hmac.new(secret, tenant.encode(), hashlib.sha256).digest()


def root_key(format_id: bytes, fingerprint: bytes, tenant_domain: bytes, *, recipe: bytes = b"") -> bytes:
    """Key before the first page, 32 bytes.

    ``format_id``: ``PageLayout.format_id``. ``fingerprint``: 32 bytes over weights, config and format.
    ``recipe``: names a class of numerics whose pages are not to be shared with others; empty shares.
    """
    _expect_length("fingerprint", fingerprint, KEY_BYTES)
    digest = _digest(
        (_TAG_DOMAIN, _ROOT),
        (_TAG_FORMAT, format_id),
        (_TAG_FINGERPRINT, fingerprint),
        (_TAG_RECIPE, recipe),
        (_TAG_TENANT, tenant_domain),
    )
    return digest[:RUN_TAG_BYTES] + _NO_PAGE + digest[RUN_TAG_BYTES + 1 :]


def page_key(parent: bytes, ids: Sequence[int], images: Sequence[ImagePart] = ()) -> bytes:
    """Key of the page that holds ``ids`` and follows ``parent`` (a page key or the root key)."""
    return _in_run(parent, _chain(_PAGE, parent, _id_bytes(ids), images))


def tail_digest(parent_key: bytes, ids_after: Sequence[int], images_after: Sequence[ImagePart] = ()) -> bytes:
    """Digest of the tokens after the last full page, which a window record is filed under."""
    return _chain(_TAIL, parent_key, _id_bytes(ids_after), images_after)


def chain_keys(
    root: bytes,
    ids: Sequence[int],
    images: Sequence[ImageSpan],
    page_tokens: int,
    *,
    pages: int | None = None,
) -> list[bytes]:
    """Keys of the full pages of a prompt (of the first ``pages`` of them), in order.

    ``images`` are spans in absolute positions. A page that is not full has no key.
    About 9 µs a page of 256 tokens.
    """
    if page_tokens < 1:
        raise InvalidRequest("page_tokens", page_tokens, "at least 1")
    full = len(ids) // page_tokens
    count = full if pages is None else min(pages, full)
    raw = memoryview(_id_bytes(ids[: count * page_tokens]))
    spans = sorted(images, key=lambda span: span.start)
    keys = []
    parent = root
    for page in range(count):
        start = page * page_tokens
        parts = image_parts(spans, start, start + page_tokens) if spans else ()
        digest = _chain(_PAGE, parent, raw[4 * start : 4 * (start + page_tokens)], parts)
        parent = _in_run(parent, digest)
        keys.append(parent)
    return keys


def image_parts(images: Iterable[ImageSpan], start: int, end: int) -> tuple[ImagePart, ...]:
    """The parts of ``images`` that lie in positions ``[start, end)``, in order of position."""
    parts = []
    for span in images:
        first = max(span.start, start)
        last = min(span.start + span.length, end)
        if first < last:
            parts.append(ImagePart(first - start, last - first, bytes(span.content_hash), first - span.start))
    return tuple(sorted(parts, key=lambda part: part.offset))


def split_keys(joined: bytes, *, field: str = "page_keys", limit: int | None = None) -> list[bytes]:
    """Cut concatenated 32-byte keys apart; InvalidRequest when the length is odd or over ``limit`` keys."""
    count, rest = divmod(len(joined), KEY_BYTES)
    if rest:
        raise InvalidRequest(field, f"{len(joined)} bytes", f"must be a multiple of {KEY_BYTES} bytes")
    if limit is not None and count > limit:
        raise InvalidRequest(field, f"{count} keys", f"at most {limit} keys")
    return [key for (key,) in _KEY.iter_unpack(joined)]


def _in_run(parent: bytes, digest: bytes) -> bytes:
    """The page's key: its hash, with the tag of the run and the page's place in it at the front."""
    place = parent[RUN_TAG_BYTES] + 1  # 0, 1 ... in the head, then HEAD_PAGES, ... again and again
    if place >= HEAD_PAGES + RUN_PAGES:
        place = 0 if parent[RUN_TAG_BYTES : RUN_TAG_BYTES + 1] == _NO_PAGE else HEAD_PAGES
    begins = place % HEAD_RUN_PAGES == 0 if place < HEAD_PAGES else place == HEAD_PAGES
    tag = digest[:RUN_TAG_BYTES] if begins else parent[:RUN_TAG_BYTES]
    return tag + bytes((place,)) + digest[RUN_TAG_BYTES + 1 :]


def _chain(domain: bytes, parent: bytes, ids: bytes | memoryview, images: Sequence[ImagePart]) -> bytes:
    _expect_length("parent", parent, KEY_BYTES)
    fields: list[tuple[int, bytes | memoryview]] = [
        (_TAG_DOMAIN, domain),
        (_TAG_PARENT, parent),
        (_TAG_IDS, ids),
    ]
    for part in images:
        _expect_length("content_hash", part.content_hash, CONTENT_HASH_BYTES)
        position = _IMAGE.pack(part.offset, part.length, part.first_slot)
        fields.append((_TAG_IMAGE, position + part.content_hash))
    return _digest(*fields)


def _digest(*fields: tuple[int, bytes | memoryview]) -> bytes:
    pieces: list[bytes | memoryview] = []
    for tag, value in fields:
        pieces.append(_FIELD.pack(tag, len(value)))
        pieces.append(value)
    return hashlib.sha256(b"".join(pieces)).digest()


def _id_bytes(ids: Sequence[int]) -> bytes:
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("ids", "token ids", f"integers from 0 to 2**32-1 ({error})") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _expect_length(field: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise InvalidRequest(field, f"{len(value)} bytes", f"must be {length} bytes")
