"""What the store already has of a prompt, and what that saves. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cedar.v1 import common_pb2 as common
from cedar.v1 import stages_pb2 as stages


@dataclass(frozen=True)
class Hit:
    """``pages``: leading pages in the store; ``window``: the record that continues the prompt exactly, if
    any."""

    pages: int = 0
    window: stages.WindowRef | None = None


def first_computed(hit: Hit, page_tokens: int, window_tokens: int) -> int:
    """The first position that Prefill runs through the network: exactly n with window state, else the
    replay's start."""
    if hit.window is not None:
        return hit.window.tokens
    return max(0, hit.pages * page_tokens - window_tokens)


def images_needed(images: Iterable[common.ImageSpan], start: int) -> list[common.ImageSpan]:
    """Images whose features are read when positions from ``start`` on are computed."""
    return [image for image in images if image.start + image.length > start]


def resumed_hit(hit: Hit, state_restored: bool) -> Hit:
    """The hit to name when a stream is given to another Decode worker: as the first attempt went, not as it
    was planned."""
    return hit if state_restored else Hit(hit.pages)


def pages_needed(tokens: int, max_tokens: int, page_tokens: int) -> int:
    """Pages that a sequence may come to hold."""
    return -(-(tokens + max_tokens) // page_tokens)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(ids)}I", *ids)
