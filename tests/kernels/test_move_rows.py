"""Rows that are moved, and rows that stay: reference and kernel alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cedar.kernels import move_rows as public
from cedar.kernels import move_rows_ref
from cedar.kernels.contract import ContractError
from cedar.kernels.paging import PageRangeError

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def kernel() -> Move:
    pytest.importorskip("triton")
    from cedar.kernels import move_rows_triton

    return move_rows_triton.move_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
@pytest.mark.parametrize("kind", ["reference", "kernel", "public"])
@pytest.mark.parametrize("width", [1, 66, 128])
def test_rows_go_where_they_are_sent(kind: str, width: int) -> None:
    move = {
        "reference": lambda: move_rows_ref.move_rows,
        "kernel": kernel,
        "public": lambda: public.move_rows,
    }
    source = torch.randint(
        0, 255, (6, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width)
    )
    target = torch.full((9, width), 255, dtype=torch.uint8)
    move[kind]()(source, torch.tensor([5, 0, 3, 0]), target, torch.tensor([2, -1, 8, 0]))
    assert torch.equal(target[[2, 8, 0]], source[[5, 3, 0]])
    assert bool((target[[1, 3, 4, 5, 6, 7]] == 255).all())


def test_misuse_is_refused() -> None:
    source, target = torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8)
    rows, places = torch.tensor([0, 1]), torch.tensor([0, 3])
    with pytest.raises(PageRangeError, match="rows holds 3"):
        public.move_rows(source, rows + 2, target, places)
    with pytest.raises(PageRangeError, match="places holds 4"):
        public.move_rows(source, rows, target, places + 1)
    with pytest.raises(ContractError, match="target must be"):
        public.move_rows(source, rows, target[:, :7], places)
    with pytest.raises(ContractError, match="target must be contiguous"):
        public.move_rows(source, rows, torch.zeros(8, 4, dtype=torch.uint8).T, places)
