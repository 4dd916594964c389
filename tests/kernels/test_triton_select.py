"""Selection in Triton's interpreter: sets equal to the reference's, ties to the lower position, ascending."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import select_ref

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")

INF = float("inf")


def rows(kind: str, count: int) -> torch.Tensor:
    x = torch.randn(2, count, generator=torch.Generator().manual_seed(count))
    if kind == "ties":
        x = (x * 3).round()
    elif kind == "few":
        x[:, 30:] = -INF
    elif kind == "equal":
        x = torch.zeros(2, count)
        x[0, ::2] = -0.0
    return x


@pytest.mark.parametrize("kind", ["random", "ties", "few", "equal"])
@pytest.mark.parametrize(("count", "k"), [(33, 50), (100, 7), (2500, 40)])
def test_top_k(kind: str, count: int, k: int) -> None:
    from cedar.kernels import select_triton

    x = rows(kind, count)
    got = select_triton._select(x, x, k, 0, 1, short=512)
    assert torch.equal(got, select_ref.top_k(x, k))


def test_candidate_blocks_and_positions() -> None:
    from cedar.kernels import select_triton

    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([50, 21, 0], dtype=torch.int32)
    blocks = select_ref.candidate_blocks(x, visible, 4, 5)
    assert torch.equal(select_triton.candidate_blocks(x, visible, 4, 5), blocks)
    pool = select_ref.block_positions(blocks, 4, visible)
    assert torch.equal(select_triton.block_positions(blocks, 4, visible), pool)
    columns = torch.tensor([[0, 3, -1]] * 3, dtype=torch.int32)
    assert torch.equal(select_triton.take(pool, columns), select_ref.take(pool, columns))


def test_the_newest_block_is_kept_in_a_long_row() -> None:
    from cedar.kernels import select_triton

    best = torch.randn(2, 1500, generator=torch.Generator().manual_seed(2))
    visible = torch.tensor([1499 * 8 + 3, 77], dtype=torch.int32)
    best[1, 10:] = -INF
    best[:, -1] = -40.0
    best[1, 9] = -30.0
    best[1, -1] = -INF
    want = best.clone()
    want[0, 1499], want[1, 9] = INF, INF
    got = select_triton._select(best, visible, 20, 1, 8, short=256)
    assert torch.equal(got, select_ref.top_k(want, 20))
