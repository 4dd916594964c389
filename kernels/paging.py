"""Rows in pages.

A page is a run of bytes in which each kind of row has its plane; a page table says which pages, in order, are
a sequence's. Entry e of a sequence is row e % rows of page page_table[seq, e // rows].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import paging_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging_ref import PageRangeError

__all__ = ["PageRangeError", "Plane", "check_plane", "gather_rows", "scatter_rows"]


class Plane(NamedTuple):
    """Where rows of one kind lie in every page: `rows` of `row_bytes`, contiguous from byte `offset`."""

    offset: int
    row_bytes: int
    rows: int


INDEX_TYPES = (torch.int32, torch.int64)


def check_plane(
    c: Contract, name: str, plane: Plane, row_bytes: int | None = None, rows: int | None = None
) -> None:
    """Refuses a plane that leaves the page (bound as B), or whose row size or count is not the one wanted."""
    c.require(name, plane.rows > 0 and plane.offset >= 0 and plane.row_bytes > 0, f"is no plane: {plane}")
    end = plane.offset + plane.rows * plane.row_bytes
    c.require(name, end <= c.dims["B"], f"ends at byte {end} of pages of {c.dims['B']}")
    c.require(
        name, row_bytes in (None, plane.row_bytes), f"has rows of {plane.row_bytes} bytes, not {row_bytes}"
    )
    c.require(name, rows in (None, plane.rows), f"has {plane.rows} rows a page, not {rows}")


def gather_rows(
    pages: torch.Tensor, plane: Plane, page_table: torch.Tensor, seq: torch.Tensor, entry: torch.Tensor
) -> torch.Tensor:
    """Reads rows by entry number: uint8 [M, ..., row_bytes]; a negative entry is a pad and gives zeros.

    pages uint8 [P, page_bytes]; page_table int [S, maxp] (ids beyond a sequence's pages are never read);
    seq int [M] and entry int [M], [M, K] or [M, K, L], row m of entry belonging to sequence seq[m].
    Raises PageRangeError (CPU) naming seq, entry or page_table when one points outside.
    """
    c = Contract("gather_rows")
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.expect("seq", seq, "M", *INDEX_TYPES)
    c.expect("entry", entry, " ".join(["M", "K", "L"][: entry.dim()]), *INDEX_TYPES)
    check_plane(c, "plane", plane)
    (rows,) = paging_ref.gather(pages, (plane,), page_table, seq, entry)
    return rows.masked_fill_((entry < 0).unsqueeze(-1), 0)


def scatter_rows(
    pages: torch.Tensor,
    plane: Plane,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Writes rows uint8 [M, row_bytes] into pages, in place, at entry [M] of sequence seq [M].

    Arguments and errors as `gather_rows`, but a negative entry is refused. No (seq, entry) may be named
    twice.
    """
    c = Contract("scatter_rows")
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.expect("seq", seq, "M", *INDEX_TYPES)
    c.expect("entry", entry, "M", *INDEX_TYPES)
    c.expect("rows", rows, "M R", torch.uint8)
    check_plane(c, "plane", plane, row_bytes=c.dims["R"])
    paging_ref.scatter(pages, (plane,), page_table, seq, entry, (rows,))
