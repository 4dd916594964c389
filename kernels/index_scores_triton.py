# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Index scores on packed keys in pages, fp32: relu, head weights, visibility and block maxima in one pass
(spec §3).

On Hopper with 32 heads of 128 `index_score_one_hopper`, `index_scores_fp8_triton` and `index_scores_hopper`
do the work; here are the kernel for every other shape and the choice.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from cedar.kernels.packed_triton import e2m1, exponent_value

BLOCK = 8  # positions of a candidate block


@triton.jit
def _scores(
    q_ptr, q_scale_ptr, weight_ptr, pages_ptr, table_ptr, seq_ptr, visible_ptr, entries_ptr, out_ptr,
    best_ptr,
    page_count, sequences, table_width, width, best_width, heads,
    ROWS: tl.constexpr, PAGE: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    HALF: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, GATHER: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(width / BN), tokens)."""
    token = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = tl.arange(0, HALF)
    head = tl.arange(0, BH)
    if GATHER:
        entry = tl.load(entries_ptr + token * width + key, mask=key < width, other=-1).to(tl.int32)
        present = entry >= 0
    else:
        entry = key
        present = key < tl.minimum(tl.load(visible_ptr + token), width)
    row = token * heads + head
    packed = tl.load(q_ptr + row[:, None] * HALF + pair[None, :], mask=head[:, None] < heads, other=0).to(
        tl.int32
    )
    code = tl.load(
        q_scale_ptr + row[:, None] * (HALF // 16) + pair[None, :] // 16, mask=head[:, None] < heads, other=0
    )
    factor = exponent_value(code)
    q_even = e2m1(packed & 15) * factor
    q_odd = e2m1(packed >> 4) * factor
    sequence = tl.minimum(tl.maximum(tl.load(seq_ptr + token), 0), sequences - 1).to(tl.int64)
    column = tl.minimum(tl.maximum(entry, 0) // ROWS, table_width - 1)
    page = tl.load(table_ptr + sequence * table_width + column, mask=present, other=0)
    at = pages_ptr + tl.minimum(tl.maximum(page, 0), page_count - 1).to(tl.int64) * PAGE
    line = tl.maximum(entry, 0) % ROWS
    packed = tl.load(
        at[:, None] + PAYLOAD + line[:, None] * HALF + pair[None, :], mask=present[:, None], other=0
    ).to(tl.int32)
    code = tl.load(
        at[:, None] + SCALES + line[:, None] * (HALF // 16) + pair[None, :] // 16,
        mask=present[:, None],
        other=0,
    )
    factor = exponent_value(code)
    s = tl.dot(e2m1(packed & 15) * factor, tl.trans(q_even), input_precision="ieee")
    s += tl.dot(e2m1(packed >> 4) * factor, tl.trans(q_odd), input_precision="ieee")
    weight = tl.load(weight_ptr + row, mask=head < heads, other=0.0).to(tl.float32)
    score = tl.sum(tl.maximum(s, 0.0) * weight[None, :], axis=1)
    score = tl.where(present, score, float("-inf"))
    tl.store(out_ptr + token * width + key, score, mask=key < width)
    if BLOCKS:
        best = tl.max(tl.reshape(score, [BN // 8, 8]), axis=1)
        block = tl.program_id(0) * (BN // 8) + tl.arange(0, BN // 8)
        tl.store(best_ptr + token * best_width + block, best, mask=block < best_width)


@cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


def scores(
    q_payload: torch.Tensor,
    q_scales: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    planes: tuple[tuple[int, int, int], ...],
    page_table: torch.Tensor,
    seq: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    *,
    entries: torch.Tensor | None = None,
    blocks: bool = False,
    neighbours: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores fp32 [N, width] and, with `blocks`, the greatest of every 8 [N, ceil(width/8)] (else None).

    `entries` [N, width] scores those instead of 0 .. width-1 (-1: none), and `visible` is not read.
    `neighbours` tokens of one sequence share a pass over its keys. The keys, page_table and seq must be older
    than the launch before this call: `index_score_one_hopper` does not wait for that one to read them.
    """
    tokens, heads, half = q_payload.shape
    out = torch.empty(tokens, width, dtype=torch.float32, device=q_payload.device)
    best_width = -(-width // BLOCK)
    best = torch.empty(tokens, best_width, dtype=torch.float32, device=out.device) if blocks else None
    if tokens == 0 or width == 0:
        return out, best
    maxima = best if best is not None else out
    table, owner = page_table.contiguous(), seq.contiguous()
    named = entries.contiguous() if entries is not None else owner
    limits = (pages.shape[0], table.shape[0], table.shape[1])
    place = (planes[0][2], pages.stride(0), planes[0][0], planes[1][0])
    q, q_s, w = q_payload.contiguous(), q_scales.contiguous(), weights.contiguous()
    sources = (pages, table, owner, visible.contiguous())
    if q.is_cuda and heads == 32 and half == 64 and _hopper(q.device.index or 0):
        together = neighbours if neighbours is not None else min(64, max(1, tokens // table.shape[0]))
        sizes = (*limits, width, best_width)
        if entries is None and together == 1:
            from cedar.kernels import index_score_one_hopper

            if index_score_one_hopper.fits(pages, planes):
                # Copies made here are younger than the keys.
                early = table is page_table and owner is seq
                index_score_one_hopper.launch(
                    (q, q_s, w, *sources, out, maxima, *sizes), (*place, blocks), early=early
                )
                return out, best
        if entries is None and together > 8:
            from cedar.kernels import index_scores_fp8_triton

            chunk = 256
            wide = torch.empty(tokens + 8, heads * 2 * half, dtype=torch.float8_e5m2, device=q.device)
            wide_w = torch.empty(tokens + 8, heads, dtype=torch.float32, device=q.device)
            index_scores_fp8_triton.expand_queries[(tokens,)](q, q_s, w, wide, wide_w, num_warps=4)
            index_scores_fp8_triton.score_many[(triton.cdiv(width, 128), triton.cdiv(tokens, chunk))](
                wide, wide_w, *sources, out, maxima, tokens, *sizes, chunk, *place, chunk, blocks,
                num_warps=8, maxnreg=128,
            )  # fmt: skip
            return out, best
        from cedar.kernels.index_scores_hopper import decode_scores

        share = 1 if entries is not None else together
        tiles = triton.cdiv(width, 64)
        rows = triton.cdiv(tokens, share)
        each = max(1, triton.cdiv(tiles * rows, 132 * 6))
        decode_scores[(triton.cdiv(tiles, each), rows)](
            q, q_s, w, *sources, named, out, maxima, tokens, *sizes, each,
            *place, 64, share, entries is not None, blocks, num_warps=4,
        )  # fmt: skip
        return out, best
    block = 32
    _scores[(triton.cdiv(width, block), tokens)](
        q, q_s, w, *sources, named, out, maxima, *limits, width, best_width, heads,
        *place, half, max(16, triton.next_power_of_2(heads)), block, entries is not None, blocks, num_warps=4,
    )  # fmt: skip
    return out, best
