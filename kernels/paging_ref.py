"""Truth for rows in pages: finding them, reading them, writing them."""

from __future__ import annotations

import os

import torch

Planes = tuple[tuple[int, int, int], ...]  # (offset, row_bytes, rows) each, with as many rows a page


class PageRangeError(ValueError):
    """A page id, sequence or entry number outside of what it indexes; the message names the argument."""


def checks_indices() -> bool:
    """Whether GPU calls read their indices back to refuse those out of range (CEDAR_CHECK_INDICES=1)."""
    return os.environ.get("CEDAR_CHECK_INDICES") == "1"


def rows_view(pages: torch.Tensor, plane: tuple[int, int, int]) -> torch.Tensor:
    """The rows of one plane as a view uint8 [P, rows, row_bytes] of pages [P, page_bytes]."""
    offset, row_bytes, rows = plane
    return pages[:, offset : offset + rows * row_bytes].view(pages.shape[0], rows, row_bytes)


def check_range(name: str, values: torch.Tensor, low: int, limit: int) -> None:
    """Refuses integer `values` outside [low, limit).

    On the CPU, and elsewhere when asked (`checks_indices`), since looking waits for the device there.
    """
    if values.numel() == 0 or (values.device.type != "cpu" and not checks_indices()):
        return
    least, most = (int(v) for v in torch.aminmax(values))
    if least < low or most >= limit:
        raise PageRangeError(f"{name} holds {least if least < low else most}, outside [{low}, {limit})")


def bounded(name: str, index: torch.Tensor, limit: int) -> torch.Tensor:
    """`index` in [0, limit): refused on the CPU when outside, clamped elsewhere, so nothing reads outside."""
    if index.device.type == "cpu":
        check_range(name, index, 0, limit)
        return index
    return index.clamp(0, limit - 1)


def locate(
    pages: torch.Tensor,
    rows: int,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
    name: str = "entry",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page id and row of every entry, int64 [*entry.shape]; page 0, row 0 for a negative entry.

    seq broadcasts against entry, which errors call `name`. Raises PageRangeError on the CPU.
    """
    sequences, per_sequence = page_table.shape
    seq = bounded("seq", seq, sequences).to(torch.int64)
    index = bounded(name, entry.clamp_min(0), per_sequence * rows).to(torch.int64)
    column = torch.div(index, rows, rounding_mode="floor")
    page = page_table[seq, column].to(torch.int64).masked_fill_(entry < 0, 0)
    return bounded("page_table (where read)", page, pages.shape[0]), index.sub_(column, alpha=rows)


def gather(
    pages: torch.Tensor,
    planes: Planes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
    name: str = "entry",
) -> tuple[torch.Tensor, ...]:
    """Rows uint8 [*entry.shape, row_bytes] of each plane; whatever some row holds where entry is negative."""
    if page_table.numel() == 0 or pages.shape[0] == 0:  # nothing can be read: all must be pads
        check_range(name, entry, torch.iinfo(entry.dtype).min, 0)
        return tuple(pages.new_zeros(*entry.shape, plane[1]) for plane in planes)
    seq = seq.view(-1, *([1] * (entry.dim() - 1)))
    page, row = locate(pages, planes[0][2], page_table, seq, entry, name)
    return tuple(rows_view(pages, plane)[page, row] for plane in planes)


def gather_prefix(
    pages: torch.Tensor, planes: Planes, page_table: torch.Tensor, visible: torch.Tensor, count: int
) -> tuple[torch.Tensor, ...]:
    """The first `count` rows uint8 [S, count, row_bytes] of sequences with page_table [S, maxp].

    visible int [S] says how many rows of each are its own; pages beyond those are not looked up.
    """
    rows = planes[0][2]
    needed = -(-count // rows)
    if needed > page_table.shape[1]:
        room = page_table.shape[1] * rows
        raise PageRangeError(f"visible reaches entry {count - 1}, page_table has room for {room} a sequence")
    first = torch.arange(0, needed * rows, rows, device=pages.device)
    page = page_table[:, :needed].to(torch.int64).masked_fill_(first >= visible.unsqueeze(-1), 0)
    page = bounded("page_table (where read)", page, pages.shape[0])
    return tuple(rows_view(pages, plane)[page].flatten(1, 2)[:, :count] for plane in planes)


def scatter(
    pages: torch.Tensor,
    planes: Planes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
) -> None:
    """Writes rows uint8 [M, row_bytes] of each plane to entries [M] of sequences [M], in place."""
    if entry.numel() == 0:
        return
    check_range("entry", entry, 0, page_table.shape[1] * planes[0][2])
    page, row = locate(pages, planes[0][2], page_table, seq, entry)
    for plane, new in zip(planes, rows, strict=True):
        rows_view(pages, plane)[page, row] = new
