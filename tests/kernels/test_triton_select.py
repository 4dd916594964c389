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
@pytest.mark.parametrize(
    ("count", "k"), [(33, 50), (100, 7), (2500, 40), (9_001, 512), (20_000, 40), (20_000, 700)]
)
def test_top_k(kind: str, count: int, k: int) -> None:
    from cedar.kernels import select_triton

    x = rows(kind, count)
    assert torch.equal(select_triton.top_k(x, k), select_ref.top_k(x, k))


def test_a_k_that_no_path_was_made_for() -> None:
    from cedar.kernels import select_triton

    x = rows("ties", 9_000)
    assert torch.equal(select_triton.top_k(x, 3_000), select_ref.top_k(x, 3_000))


@pytest.mark.parametrize("kind", ["random", "ties", "few", "equal"])
def test_many_long_rows(kind: str) -> None:
    from cedar.kernels import select_many_triton

    x = rows(kind, 65_536 + 77)
    assert select_many_triton.fits(40, x.shape[1])
    got = torch.empty(2, 40, dtype=torch.int32)
    select_many_triton.select(x, x, got, 0, 1)
    assert torch.equal(got, select_ref.top_k(x, 40))


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


@pytest.mark.parametrize("chunks", [0, 1])
def test_the_newest_block_is_kept(chunks: int) -> None:
    from cedar.kernels import select_slices_triton

    best = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))
    visible = torch.tensor([4999 * 8 + 3, 77], dtype=torch.int32)
    best[1, 10:] = -INF
    best[:, -1] = -40.0
    best[1, 9] = -30.0
    best[1, -1] = -INF
    want = best.clone()
    want[0, 4999], want[1, 9] = INF, INF
    got = torch.empty(2, 20, dtype=torch.int32)
    select_slices_triton.select(best, visible, got, 1, 8, chunks)
    assert torch.equal(got, select_ref.top_k(want, 20))
