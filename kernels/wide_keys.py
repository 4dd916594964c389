"""Keys expanded once for all queries of a chunk, as the matrix units of attention take them (spec §3).

A chunk reads the same keys over and over: an entry for many queries and in every layer that shares its
source, a window key for up to W queries. The kernel on packed keys expands each of them for each query. Wide
keys are fp16 of the value times 2^-7, which holds every FP4 entry exactly, and window keys as that kernel
does: rounded to multiples of 2^-17, with a scale of at most 2^14.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from cedar.kernels import wide_keys_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging import INDEX_TYPES, Plane, check_plane

LEAST_ROWS: Final = 256  # below, kernels of few queries are at work, and layers are short
MOST_BYTES: Final = 640 << 20  # of expanded entries that may lie beside everything else
US_A_QUERY: Final = 0.08  # what a query and layer gains
US_AN_ENTRY: Final = 0.0004  # what expanding an entry costs


class WideKeys(NamedTuple):
    """Expanded keys of one layer, beside the packed ones."""

    entries: torch.Tensor | None  # fp16 [S, E, D]: entry e of sequence s; None in a layer without entries
    window: torch.Tensor  # fp16 [R, D]: the rows of the window buffer


class Shape(NamedTuple):
    """What of a layer's attention says whether there is a kernel for wide keys."""

    heads: int
    width: int  # channels of a head
    window: int  # rows of window keys a query
    half_rope: int  # pairs of channels that are turned


def expands(like: torch.Tensor, shape: Shape, *, rows: int, entries: int, layers: int) -> bool:
    """Whether attention of a chunk of `rows` queries should read wide keys, on the device of `like`;
    `entries` and `layers` as in `pays`.
    """
    return attends_wide(like, shape) and pays(rows, entries, layers, shape.width)


def attends_wide(like: torch.Tensor, shape: Shape) -> bool:
    """Whether there is a kernel for wide keys on the device of `like`: for 64 heads of 512, on Hopper."""
    fits = shape[:2] == (64, 512) and 0 < shape.window <= 128 and shape.half_rope <= 32
    if not fits or not like.is_cuda:
        return False
    from cedar.kernels.linear_triton import hopper

    return hopper(like.device.index or 0)


def pays(rows: int, entries: int, layers: int, width: int) -> bool:
    """Whether `rows` queries in each of `layers` layers gain more than it costs to expand `entries`, of all
    sequences together, of `width` channels, and whether those fit.
    """
    if rows < LEAST_ROWS or entries * width * 2 > MOST_BYTES:
        return False
    return entries * US_AN_ENTRY < rows * layers * US_A_QUERY


def rows_asked_for(rows: int, width: int) -> int:
    """How many rows of `width` channels to ask the allocator for where `rows` are wanted: few sizes, all
    within `MOST_BYTES`. Chunk after chunk of a long prompt wants a little more than was ever freed; were it
    given just that, each would leave a block behind that no later one fits.
    """
    most = MOST_BYTES // (2 * width)
    return rows if rows > most else min(1 << max(rows - 1, 0).bit_length(), most)


def expand_entries(
    pages: torch.Tensor, payload_plane: Plane, scale_plane: Plane, page_table: torch.Tensor, count: int
) -> torch.Tensor:
    """fp16 [S, count, D], value·2^-7: the first `count` entries of each sequence of page_table int [S, maxp].

    pages uint8 [P, page_bytes]. A sequence that has fewer gets what its table names there: page numbers
    outside of memory are clamped, as nothing selects those entries.
    """
    c = Contract("expand_entries")
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.require("payload_plane", payload_plane.row_bytes % 8 == 0, "has no whole groups of 16 channels a row")
    check_plane(c, "payload_plane", payload_plane)
    check_plane(
        c, "scale_plane", scale_plane, row_bytes=payload_plane.row_bytes // 8, rows=payload_plane.rows
    )
    room = page_table.shape[1] * payload_plane.rows if pages.shape[0] else 0
    c.require("count", 0 <= count <= room, f"is {count}, page_table has room for {room} a sequence")
    planes = (payload_plane, scale_plane)
    if pages.is_cuda:
        from cedar.kernels import wide_keys_triton

        if wide_keys_triton.fits(pages, planes):
            return wide_keys_triton.expand_entries(pages, planes, page_table, count)
    return wide_keys_ref.expand_entries(pages, planes, page_table, count)
