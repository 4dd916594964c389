"""Where every row of a page lies: the one description shared by kernels, wire and store.

A page holds the packed global entries and index keys of ``page_tokens`` consecutive tokens, for every
layer that is a key/value source. Sections follow in source order, each made of four planes:

    main payload (head_dim/2 bytes a row) · main scales (head_dim/16) · index payload (index_head_dim/2)
    · index scales (index_head_dim/32)

A source of ratio m has one row for m tokens, so ``page_tokens / m`` rows in a page. Rows of a plane are
contiguous; each plane starts at a multiple of 16 bytes. Spec sections 4 and 5. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LAYOUT_VERSION: Final = 1
PLANE_ALIGNMENT_BYTES: Final = 16
MAX_PAGE_TOKENS: Final = 1 << 16
MAX_PAGE_BYTES: Final = 1 << 26


class LayoutError(ValueError):
    """A page cannot be laid out: names the field, its value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"page layout: {field}={value!r}, must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True)
class Plane:
    """Rows of one kind in one page: row r lies at ``offset + r * row_bytes``."""

    offset: int
    row_bytes: int
    rows: int

    @property
    def end(self) -> int:
        """First byte after the plane."""
        return self.offset + self.row_bytes * self.rows


@dataclass(frozen=True)
class SourceLayout:
    """The four planes of one source layer; ``ratio`` tokens share a row."""

    layer: int
    ratio: int
    main_payload: Plane
    main_scales: Plane
    index_payload: Plane
    index_scales: Plane

    @property
    def planes(self) -> tuple[Plane, Plane, Plane, Plane]:
        """The planes in the order in which they lie in the page."""
        return (self.main_payload, self.main_scales, self.index_payload, self.index_scales)


@dataclass(frozen=True)
class PageLayout:
    """Offsets of every plane of every source in one page of ``page_tokens`` tokens."""

    page_tokens: int
    sources: tuple[SourceLayout, ...]
    page_bytes: int

    @classmethod
    def build(
        cls,
        *,
        sources: Sequence[tuple[int, int]],
        head_dim: int,
        index_head_dim: int,
        page_tokens: int,
    ) -> PageLayout:
        """Lay out a page for ``sources`` = (layer, ratio) pairs in layer order.

        Raises LayoutError when a dimension does not divide into whole scale groups, when ``page_tokens``
        is not a multiple of every ratio, or when layers are not strictly ascending.
        """
        _check(sources, head_dim, index_head_dim, page_tokens)
        row_widths = (head_dim // 2, head_dim // 16, index_head_dim // 2, index_head_dim // 32)
        offset = 0
        sections = []
        for layer, ratio in sources:
            rows = page_tokens // ratio
            planes = []
            for row_bytes in row_widths:
                planes.append(Plane(offset, row_bytes, rows))
                offset = _align(planes[-1].end)
            sections.append(SourceLayout(layer, ratio, *planes))
        if offset > MAX_PAGE_BYTES:
            raise LayoutError("page_bytes", offset, f"at most {MAX_PAGE_BYTES}")
        return cls(page_tokens=page_tokens, sources=tuple(sections), page_bytes=offset)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of packed rows a token, without alignment."""
        return sum(p.row_bytes * p.rows for s in self.sources for p in s.planes) / self.page_tokens

    @property
    def format_id(self) -> bytes:
        """Stable description of the format; two layouts agree on every byte iff these are equal.

        ASCII: layout version, the packings in use (little endian, even channel in the low nibble, E4M3
        scales for a group of 16, E8M0 for 32), tokens a page, and every plane as offset+row_bytes*rows.
        """
        parts = [
            f"cedar-page/{LAYOUT_VERSION}",
            "le,lo-nibble,e2m1/e4m3x16,e2m1/e8m0x32",
            f"t{self.page_tokens}",
        ]
        for source in self.sources:
            planes = ",".join(f"{p.offset}+{p.row_bytes}*{p.rows}" for p in source.planes)
            parts.append(f"L{source.layer}/{source.ratio}:{planes}")
        parts.append(f"b{self.page_bytes}")
        return ";".join(parts).encode("ascii")

    def source(self, layer: int) -> SourceLayout:
        """The planes of source ``layer``; KeyError if that layer stores nothing."""
        for source in self.sources:
            if source.layer == layer:
                return source
        raise KeyError(f"layer {layer} is not a key/value source; sources: {[s.layer for s in self.sources]}")


def _align(offset: int) -> int:
    return -(-offset // PLANE_ALIGNMENT_BYTES) * PLANE_ALIGNMENT_BYTES


def _check(sources: Sequence[tuple[int, int]], head_dim: int, index_head_dim: int, page_tokens: int) -> None:
    if head_dim <= 0 or head_dim % 16:
        raise LayoutError("head_dim", head_dim, "a positive multiple of 16")
    if index_head_dim <= 0 or index_head_dim % 32:
        raise LayoutError("index_head_dim", index_head_dim, "a positive multiple of 32")
    if not 0 < page_tokens <= MAX_PAGE_TOKENS:
        raise LayoutError("page_tokens", page_tokens, f"1 to {MAX_PAGE_TOKENS}")
    if not sources:
        raise LayoutError("sources", list(sources), "at least one (layer, ratio)")
    previous = -1
    for layer, ratio in sources:
        if layer <= previous:
            raise LayoutError("sources", [s[0] for s in sources], "layers in strictly ascending order")
        previous = layer
        if ratio < 1:
            raise LayoutError("ratio", ratio, "at least 1")
        if page_tokens % ratio:
            raise LayoutError(
                "page_tokens", page_tokens, f"a multiple of every ratio, here {ratio} of layer {layer}"
            )
