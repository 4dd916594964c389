# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Selection among scores: which way a top k goes, block maxima, the pool of positions (spec §3).

`select_slices_triton` reads a row twice, on a bound that never fails; `select_many_triton` once, on a
guess, which pays where the rows do not fit the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels import select_many_triton, select_slices_triton

MANY = 2**24  # scores beyond which reading them twice costs more than a guess


def _select(scores: torch.Tensor, visible: torch.Tensor, k: int, mode: int, divisor: int) -> torch.Tensor:
    rows, count = scores.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    if count == 0:
        return out.fill_(-1)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    way = (
        select_many_triton
        if rows * count > MANY and select_many_triton.fits(k, count)
        else select_slices_triton
    )
    way.select(scores, visible, out, mode, divisor)
    return out


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [N, k]: ascending positions of the k greatest scores [N, M] fp32, -1 at the end; -inf is never
    chosen.
    """
    return _select(scores, scores, k, 0, 1)


def keep_blocks(best: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """int32 [N, keep]: ascending ids of the blocks kept, of their greatest scores [N, blocks]; the newest
    always is.
    """
    return _select(best, visible.contiguous(), keep, 1, block)


@triton.jit
def _maxima(scores_ptr, visible_ptr, best_ptr, count, blocks, block, BW: tl.constexpr, B: tl.constexpr):
    """Grid (ceil(blocks / B), rows)."""
    row = tl.program_id(1).to(tl.int64)
    limit = tl.minimum(tl.load(visible_ptr + row), count)
    which = tl.program_id(0) * B + tl.arange(0, B)
    within = tl.arange(0, BW)
    place = which[:, None] * block + within[None, :]
    x = tl.load(
        scores_ptr + row * count + place,
        mask=(place < limit) & (within < block)[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    tl.store(best_ptr + row * blocks + which, tl.max(x, axis=1), mask=which < blocks)


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """The same from scores fp32 [N, M]; `keep_blocks` where the score kernel has written the maxima
    already.
    """
    rows, count = scores.shape
    blocks = -(-count // block)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    if rows and blocks:
        _maxima[(triton.cdiv(blocks, 256), rows)](
            scores.contiguous(),
            visible.contiguous(),
            best,
            count,
            blocks,
            block,
            triton.next_power_of_2(block),
            256,
        )
    return keep_blocks(best, visible, block, keep)


@triton.jit
def _positions(blocks_ptr, visible_ptr, out_ptr, keep, block, B: tl.constexpr):
    """Grid (ceil(keep·block / B), rows)."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * B + tl.arange(0, B)
    which = tl.load(blocks_ptr + row * keep + slot // block, mask=slot < keep * block, other=-1)
    position = which * block + slot % block
    position = tl.where((which >= 0) & (position < tl.load(visible_ptr + row)), position, -1)
    tl.store(out_ptr + row * keep * block + slot, position.to(tl.int32), mask=slot < keep * block)


def block_positions(blocks: torch.Tensor, block: int, visible: torch.Tensor) -> torch.Tensor:
    """int32 [N, keep·block]: the visible positions of blocks int32 [N, keep]."""
    rows, keep = blocks.shape
    out = torch.empty(rows, keep * block, dtype=torch.int32, device=blocks.device)
    if rows and keep:
        _positions[(triton.cdiv(keep * block, 1024), rows)](
            blocks.contiguous(), visible.contiguous(), out, keep, block, 1024
        )
    return out


@triton.jit
def _take(candidates_ptr, columns_ptr, out_ptr, width, k, B: tl.constexpr):
    """Grid (ceil(k / B), rows)."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * B + tl.arange(0, B)
    column = tl.load(columns_ptr + row * k + slot, mask=slot < k, other=-1)
    column = tl.minimum(column, width - 1)
    taken = tl.load(candidates_ptr + row * width + column, mask=column >= 0, other=-1)
    tl.store(out_ptr + row * k + slot, taken, mask=slot < k)


def take(candidates: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int32 [N, k]: candidates[n, columns[n]], -1 where the column is."""
    out = torch.empty_like(columns)
    rows, k = columns.shape
    if rows and k:
        _take[(triton.cdiv(k, 512), rows)](
            candidates.contiguous(), columns.contiguous(), out, candidates.shape[1], k, 512
        )
    return out
