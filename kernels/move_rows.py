"""Rows of bytes copied to where a table says, or nowhere: one launch on a GPU, however many stay behind."""

from __future__ import annotations

import torch
from cedar.kernels import move_rows_ref, paging_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging import INDEX_TYPES


def move_rows(source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
    """Copies row rows[i] of source uint8 [M, B] to row places[i] of target uint8 [R, B], in place.

    rows, places int [n]; nothing is copied where places[i] is negative. No place may be named twice. An index
    out of range raises PageRangeError (CPU; on a GPU with CEDAR_CHECK_INDICES=1, else it is not copied).
    """
    c = Contract("move_rows")
    c.expect("source", source, "M B", torch.uint8)
    c.expect("rows", rows, "n", *INDEX_TYPES)
    c.expect("target", target, "R B", torch.uint8)
    c.expect("places", places, "n", *INDEX_TYPES)
    for name, tensor in (("source", source), ("target", target)):
        c.require(name, tensor.is_contiguous(), "must be contiguous")
    paging_ref.check_range("rows", rows, 0, source.shape[0])
    paging_ref.check_range("places", places, -(1 << 31), target.shape[0])
    if source.is_cuda:
        from cedar.kernels import move_rows_triton

        move_rows_triton.move_rows(source, rows, target, places)
        return
    move_rows_ref.move_rows(source, rows, target, places)
