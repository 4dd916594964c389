# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rows moved on a GPU, a program each, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_row(from_ptr, source, from_rows, to_ptr, target, to_rows, ROW: tl.constexpr, B: tl.constexpr):
    """One row of ROW bytes, unless an index is out of range."""
    if (source >= 0) & (source < from_rows) & (target >= 0) & (target < to_rows):
        at = tl.arange(0, B)
        row = tl.load(from_ptr + source * ROW + at, mask=at < ROW, other=0)
        tl.store(to_ptr + target * ROW + at, row, mask=at < ROW)


@triton.jit(do_not_specialize=["from_rows", "to_rows"])
def _move(
    from_ptr, row_ptr, to_ptr, place_ptr, from_rows, to_rows, ROW: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Grid (rows)."""
    number = tl.program_id(0)
    source = tl.load(row_ptr + number).to(tl.int64)
    target = tl.load(place_ptr + number).to(tl.int64)
    copy_row(from_ptr, source, from_rows, to_ptr, target, to_rows, ROW, B)


def move_rows(source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
    """As the public function."""
    count, width = rows.shape[0], source.shape[1]
    if count:
        _move[(count,)](
            source, rows.contiguous(), target, places.contiguous(), source.shape[0], target.shape[0],
            width, triton.next_power_of_2(width),
        )  # fmt: skip
