"""Which window record continues a prompt: the longest whose tokens and images the prompt starts with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from cedar.kvstore.keys import ImageSpan, image_parts, tail_digest


class WindowRecord(Protocol):
    """Name of a window record: the key of its last full page (or root), its position n, and a digest."""

    @property
    def page_key(self) -> bytes:
        """Key of the last full page before position n, or the root key."""

    @property
    def tokens(self) -> int:
        """Position n: tokens whose state the record holds."""

    @property
    def digest(self) -> bytes:
        """``keys.tail_digest`` of the tokens and images after that page."""


RecordT = TypeVar("RecordT", bound=WindowRecord)


def window_digest(
    root: bytes,
    keys: Sequence[bytes],
    ids: Sequence[int],
    images: Sequence[ImageSpan],
    page_tokens: int,
    tokens: int,
) -> tuple[bytes, bytes]:
    """(page key, digest) under which the state after the first ``tokens`` of ``ids`` is filed.

    ``keys`` are the chain keys of ``ids`` (at least the full pages before ``tokens``).
    """
    pages = tokens // page_tokens
    start = pages * page_tokens
    parent = keys[pages - 1] if pages else root
    return parent, tail_digest(parent, ids[start:tokens], image_parts(images, start, tokens))


def longest_window(
    records: Iterable[RecordT],
    root: bytes,
    keys: Sequence[bytes],
    ids: Sequence[int],
    images: Sequence[ImageSpan],
    page_tokens: int,
    *,
    below: int | None = None,
) -> RecordT | None:
    """The record with the most tokens that is a prefix of ``ids``, or None.

    ``below``: only records with fewer tokens than this (default ``len(ids)``: at least one token must be
    left to run, or there are no logits). Only records under a page that ``keys`` holds can match.
    """
    limit = len(ids) if below is None else min(below, len(ids))
    for record in sorted(records, key=lambda r: r.tokens, reverse=True):
        pages = record.tokens // page_tokens
        if 0 < record.tokens < limit and pages <= len(keys):
            named = window_digest(root, keys, ids, images, page_tokens, record.tokens)
            if named == (record.page_key, record.digest):
                return record
    return None
