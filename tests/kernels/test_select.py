"""Selection against brute force, with ties, pads and rows of every length."""

from __future__ import annotations

import random

import pytest
import torch
from cedar.kernels.select import block_positions, candidate_blocks, take_candidates, top_k

INF = float("inf")


def slow_top_k(row: list[float], k: int) -> list[int]:
    found = sorted((p for p, s in enumerate(row) if s > -INF), key=lambda p: (-row[p], p))[:k]
    return sorted(found) + [-1] * (k - len(found))


def slow_blocks(row: list[float], visible: int, block: int, keep: int) -> list[int]:
    best: dict[int, float] = {}
    for p in range(visible):
        best[p // block] = max(best.get(p // block, -INF), row[p])
    if visible:
        best[(visible - 1) // block] = INF
    found = sorted(sorted(best, key=lambda b: (-best[b], b))[:keep])
    return found + [-1] * (keep - len(found))


def tied_scores(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Few distinct values, negatives among them, so that ties are everywhere."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (rows, columns), generator=g).double() / 8
    return scores.masked_fill(torch.rand(rows, columns, generator=g) < 0.1, -INF)


@pytest.mark.parametrize("columns", [0, 1, 5, 6, 7, 64, 301])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_top_k(columns: int, dtype: torch.dtype) -> None:
    scores = tied_scores(9, columns, columns).to(dtype)
    for k in (1, 6, 40):
        got = top_k(scores, k)
        assert got.dtype == torch.int32
        assert got.tolist() == [slow_top_k(row, k) for row in scores.tolist()]


def test_equal_scores_choose_the_lowest_positions() -> None:
    assert top_k(torch.full((2, 1000), -1.5), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert top_k(torch.full((1, 8), -INF), 3).tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(("block", "keep"), [(1, 3), (4, 4), (8, 2), (3, 50)])
def test_candidate_blocks_and_their_positions(block: int, keep: int) -> None:
    pick = random.Random(block)
    scores = tied_scores(24, 61, block).clamp_min(-9)  # all finite: visibility alone hides
    visible = torch.tensor([0, 1, 61] + [pick.randint(0, 61) for _ in range(21)], dtype=torch.int32)
    blocks = candidate_blocks(scores, visible, block, keep)
    assert blocks.tolist() == [
        slow_blocks(row, v, block, keep) for row, v in zip(scores.tolist(), visible.tolist(), strict=True)
    ]
    positions = block_positions(blocks, block, visible)
    assert positions.shape == (24, keep * block)
    for row, kept, v in zip(positions.tolist(), blocks.tolist(), visible.tolist(), strict=True):
        wanted = [p for b in kept if b >= 0 for p in range(b * block, min((b + 1) * block, v))]
        assert row == wanted + [-1] * (len(row) - len(wanted))


def test_the_newest_block_is_kept_though_it_scores_least() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, -9.0, 100.0]])
    blocks = candidate_blocks(scores, torch.tensor([6]), 2, 2)
    assert blocks.tolist() == [[0, 2]]  # 100 is not visible, block 2 holds the newest visible position


def test_take_candidates() -> None:
    candidates = torch.tensor([[4, 5, 9, -1], [2, -1, -1, -1]], dtype=torch.int32)
    columns = torch.tensor([[0, 2, -1], [0, -1, -1]], dtype=torch.int32)
    assert take_candidates(candidates, columns).tolist() == [[4, 9, -1], [2, -1, -1]]
