# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention on packed pages: RoPE of q, both key sets, one softmax with a sink, inverse RoPE, in
one pass (spec §3).

On Hopper with 64 heads of 512 `sparse_attention_trades_hopper` does the work, `sparse_attention_hopper` where
more than two programs share a query, `sparse_attention_wide_hopper` for a chunk whose keys are expanded
already, `sparse_attention_teams_hopper` where queries are few; where heads have 128 channels
`sparse_attention_few_hopper`. Here are the kernel for every other shape and the choice. Page and row numbers
outside what they index are clamped, so nothing out of bounds is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import hopper
from cedar.kernels.packed_triton import INTERPRETED, bf16_round, e2m1, to_bf16
from cedar.kernels.wide_keys import Shape, WideKeys, attends_wide

LOG2_E = 1.4426950408889634
MULTIPROCESSORS = 132


@triton.jit
def _half(x):
    """Operand of a dot: fp16, which holds FP4 and FP8 keys exactly; wide where the interpreter wants it."""
    return x if INTERPRETED else x.to(tl.float16)


@triton.jit
def _turn(even, odd, cos, sin):
    return bf16_round(even * cos - odd * sin), bf16_round(even * sin + odd * cos)


@triton.jit
def _rope_columns(cos_ptr, sin_ptr, token, HALF: tl.constexpr, HALF_ROPE: tl.constexpr):
    """cos and sin [HALF] of a token's channel pairs; 1 and 0 where nothing turns."""
    turn = tl.arange(0, HALF) - (HALF - HALF_ROPE)
    cos = tl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)
    sin = tl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _fold(q_even, q_odd, k_even, k_odd, present, state, scale):
    """Takes one tile of keys [BN, HALF] into (acc even, acc odd, running maximum, sum)."""
    acc_even, acc_odd, top, total = state
    s = tl.dot(q_even, tl.trans(_half(k_even)), input_precision="ieee")
    s += tl.dot(q_odd, tl.trans(_half(k_odd)), input_precision="ieee")
    s = tl.where(present[None, :], s * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2(s - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc_even = acc_even * shrink[:, None] + tl.dot(_half(p), _half(k_even), input_precision="ieee")
    acc_odd = acc_odd * shrink[:, None] + tl.dot(_half(p), _half(k_odd), input_precision="ieee")
    return acc_even, acc_odd, new_top, total * shrink + tl.sum(p, axis=1)


@triton.jit
def _attend(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, heads, scale,
    ROWS: tl.constexpr, PAGE: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    ENTRIES: tl.constexpr,
    HALF: tl.constexpr, HALF_ROPE: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, ceil(heads / BH))."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    pair = tl.arange(0, HALF)
    q_at = (token * heads + head)[:, None] * (2 * HALF) + 2 * pair[None, :]
    q_even = tl.load(q_ptr + q_at, mask=head[:, None] < heads, other=0.0).to(tl.float32)
    q_odd = tl.load(q_ptr + q_at + 1, mask=head[:, None] < heads, other=0.0).to(tl.float32)
    if HALF_ROPE > 0:
        cos, sin = _rope_columns(cos_ptr, sin_ptr, token, HALF, HALF_ROPE)
        q_even, q_odd = _turn(q_even, q_odd, cos, sin)
    q_even = _half(q_even)
    q_odd = _half(q_odd)
    acc = tl.zeros([BH, HALF], tl.float32)
    state = (acc, acc, tl.full([BH], -1e30, tl.float32), tl.zeros([BH], tl.float32))
    lane = tl.arange(0, BN)
    if ENTRIES:
        sequence = tl.minimum(tl.maximum(tl.load(seq_ptr + token), 0), sequences - 1).to(tl.int64)
        for start in range(0, entry_count, BN):
            entry = tl.load(
                entries_ptr + token * entry_count + start + lane, mask=start + lane < entry_count, other=-1
            )
            present = entry >= 0
            column = tl.minimum(tl.maximum(entry, 0) // ROWS, table_width - 1)
            page = tl.load(table_ptr + sequence * table_width + column, mask=present, other=0)
            page = tl.minimum(tl.maximum(page, 0), page_count - 1).to(tl.int64)
            row = tl.maximum(entry, 0) % ROWS
            at = pages_ptr + page * PAGE
            packed = tl.load(
                at[:, None] + PAYLOAD + row[:, None] * HALF + pair[None, :], mask=present[:, None], other=0
            ).to(tl.int32)
            code = tl.load(
                at[:, None] + SCALES + row[:, None] * (HALF // 8) + pair[None, :] // 8,
                mask=present[:, None],
                other=0,
            )
            factor = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            state = _fold(
                q_even, q_odd, e2m1(packed & 15) * factor, e2m1(packed >> 4) * factor, present, state, scale
            )
    for start in range(0, row_count, BN):
        row = tl.load(rows_ptr + token * row_count + start + lane, mask=start + lane < row_count, other=-1)
        present = row >= 0
        row = tl.minimum(row, window_count - 1).to(tl.int64)
        at = window_ptr + row[:, None] * (2 * HALF + HALF // 16)
        code = tl.load(at + 2 * HALF + pair[None, :] // 16, mask=present[:, None], other=0).to(tl.int32)
        factor = (code << 23).to(tl.float32, bitcast=True)
        low = tl.load(at + 2 * pair[None, :], mask=present[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        high = tl.load(at + 2 * pair[None, :] + 1, mask=present[:, None], other=0).to(
            tl.float8e4nv, bitcast=True
        )
        low = low.to(tl.float32) * factor
        high = high.to(tl.float32) * factor
        state = _fold(q_even, q_odd, low, high, present, state, scale)
    acc_even, acc_odd, top, total = state
    sink = tl.load(sink_ptr + head, mask=head < heads, other=0.0) * 1.4426950408889634
    peak = tl.maximum(top, sink)
    factor = tl.exp2(top - peak) / (total * tl.exp2(top - peak) + tl.exp2(sink - peak))
    _write(acc_even * factor[:, None], acc_odd * factor[:, None], out_ptr + q_at, head[:, None] < heads,
           cos_ptr, sin_ptr, token, HALF, HALF_ROPE)  # fmt: skip


@triton.jit
def _write(even, odd, at, mask, cos_ptr, sin_ptr, token, HALF: tl.constexpr, HALF_ROPE: tl.constexpr):
    """o rounded, turned back, rounded; both channels of every pair."""
    if HALF_ROPE > 0:
        cos, sin = _rope_columns(cos_ptr, sin_ptr, token, HALF, HALF_ROPE)
        even, odd = _turn(bf16_round(even), bf16_round(odd), cos, -sin)
    tl.store(at, to_bf16(even), mask=mask)
    tl.store(at + 1, to_bf16(odd), mask=mask)


FEW = 7  # queries up to which many small programs beat a few large ones (heads of 512)


def choose_splits(tokens: int, entries: int) -> int:
    """Programs a query is shared out over, so that a small batch fills the chip."""
    tiles = -(-entries // 64)
    return max(1, min(MULTIPROCESSORS // max(1, tokens), 1 + tiles, 32)) if tiles else 1


def sparse_attention(
    q: torch.Tensor,
    pages: torch.Tensor | None,
    planes: tuple[tuple[int, int, int], ...],
    page_table: torch.Tensor | None,
    seq: torch.Tensor | None,
    entries: torch.Tensor | None,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    sink: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: WideKeys | None = None,
    *,
    splits: int | None = None,
    few: bool | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """bf16 [N, H, D]. With rope = (cos, sin) fp32 [N, R/2], q comes before its RoPE and o leaves after the
    inverse.

    Contracts are the public function's, `settled` too; `splits` overrides `choose_splits`, `few` whether the
    queries count as few (both on Hopper only).
    """
    tokens, heads, width = q.shape
    q = q.contiguous()
    names = (page_table, seq, entries, window_rows, sink, *(rope or ()))
    # what is copied, or made, here is not older
    settled = settled and window.shape[0] > 0 and all(x is None or x.is_contiguous() for x in names)
    out = torch.empty_like(q)
    if tokens == 0:
        return out
    if window.shape[0] == 0:  # no row to point at: every row number must be -1
        window = window.new_zeros(1, window.shape[1])
    count = entries.shape[1] if entries is not None else 0
    half_rope = rope[0].shape[1] if rope is not None else 0
    sink = sink.contiguous()
    cos, sin = (part.contiguous() for part in rope) if rope is not None else (sink, sink)
    if pages is None or page_table is None or not (pages.shape[0] and page_table.numel()):
        count = 0  # nothing to point at: every entry must be -1
    if wide is not None and wide.entries is not None and not wide.entries.shape[1]:
        count = 0
    if count and entries is not None and pages is not None and page_table is not None and seq is not None:
        sources = (pages, page_table.contiguous(), seq.contiguous(), entries.contiguous())
        limits = (pages.shape[0], page_table.shape[0], page_table.shape[1])
        place = (planes[0][2], pages.stride(0), planes[0][0], planes[1][0])
    else:
        count, sources, limits, place = (
            0,
            (window, window_rows, window_rows, window_rows),
            (1, 1, 1),
            (1, 16, 0, 0),
        )
    scale = width**-0.5 * LOG2_E
    rows = window_rows.contiguous()
    sizes = (*limits, window.shape[0], count, rows.shape[1])
    given = (q, cos, sin, *sources, window, rows, sink, out)
    if q.is_cuda and hopper(q.device.index or 0):
        small = few_parts(tokens, heads, width, count, rows.shape[1], half_rope) if few is not False else None
        large = heads == 64 and width == 512 and 0 < rows.shape[1] <= 128 and half_rope <= 256
        shape = Shape(heads, width, rows.shape[1], half_rope)
        if wide is not None and wide.window.shape[0] and attends_wide(q, shape):
            from cedar.kernels.sparse_attention_wide_hopper import attend_wide

            return attend_wide(
                q, cos if half_rope else None, sin if half_rope else None,
                wide.entries if count else None, sources[2] if count else None, sources[3] if count else None,
                wide.window, rows, sink, out,
            )  # fmt: skip
        if small is not None and (few or not large or tokens <= FEW):
            _attend_few(given, small, sizes, place, scale, half_rope, settled)
            return out
        if large:
            parts = choose_splits(tokens, count) if splits is None else splits
            _attend_hopper(given, parts, sizes, place, scale, half_rope, settled)
            return out
    block = min(64, max(16, triton.next_power_of_2(heads)))
    _attend[(tokens, triton.cdiv(heads, block))](
        *given, *sizes, heads, scale,
        *place, count > 0, width // 2, half_rope, block, 32, num_warps=4,
    )  # fmt: skip
    return out


def few_parts(
    tokens: int, heads: int, width: int, entries: int, rows: int, half_rope: int
) -> tuple[int, int, int] | None:
    """Warps of a program, and programs that take window rows, and entries, of a query, where queries are few:
    of `attend_teams`, or of `attend_few` with heads of 128. None where it does not fit.

    A program has 16 heads and eight keys a warp: as few as let all programs run at once, for as many queries
    as a step of these is padded to, lest the order of sums and so the bits be others there. Parts of
    `attend_few` may hold 64 MiB, its counters (eight words each) 256 KiB.
    """
    if width not in (128, 512) or 2 * half_rope > width or not rows + entries:
        return None
    groups = tokens * -(-heads // 16)
    if width == 128:
        near, far = -(-rows // 32), -(-entries // 32)
        fits = tokens * (near + far) * heads * 256 <= 1 << 26 and near + far <= 64 and groups * 8 <= 65_536
        return (4, near, far) if fits else None
    from cedar.kernels.sparse_attention_until_hopper import BLOCKS, MOST

    groups = triton.next_power_of_2(tokens) * -(-heads // 16)
    for warps in (4, 8, 16):
        near, far = -(-rows // (8 * warps)), -(-entries // (8 * warps))
        if near + far <= MOST and groups * (near + far) <= (MULTIPROCESSORS if warps < 16 else BLOCKS):
            return warps, near, far
    return None


def _attend_few(
    given: tuple[torch.Tensor, ...],
    parts: tuple[int, int, int],
    sizes: tuple[int, ...],
    place: tuple[int, ...],
    scale: float,
    half_rope: int,
    settled: bool,
) -> None:
    q = given[0]
    tokens, heads, width = q.shape
    warps, near, far = parts
    splits = near + far
    grid = (splits, -(-heads // 16), tokens)
    index = q.device.index or 0
    if width == 512:
        from cedar.kernels.sparse_attention_teams_hopper import attend_teams
        from cedar.kernels.sparse_attention_until_hopper import parts as places_of_parts

        attend_teams[grid](
            *given, *places_of_parts(index), *sizes, scale,
            *place, near, splits, heads, half_rope, sizes[1] == 1, settled, num_warps=warps, launch_pdl=True,
        )  # fmt: skip
        return
    from cedar.kernels.grid_hopper import counters
    from cedar.kernels.sparse_attention_few_hopper import attend_few

    part = torch.empty(tokens, splits, heads, width, dtype=torch.float16, device=q.device)
    lse = torch.empty(tokens, heads, -(-splits // 4) * 4, dtype=torch.float32, device=q.device)
    attend_few[grid](
        *given, part, lse, counters(index), *sizes, scale,
        *place, near, splits, heads, half_rope, sizes[1] == 1, num_warps=warps, launch_pdl=True,
    )  # fmt: skip


def _attend_hopper(
    given: tuple[torch.Tensor, ...],
    parts: int,
    sizes: tuple[int, ...],
    place: tuple[int, ...],
    scale: float,
    half_rope: int,
    settled: bool,
) -> None:
    q = given[0]
    tiles = -(-sizes[4] // 64)
    names = 64 * triton.next_power_of_2(max(1, tiles))
    if parts <= 2 and tiles <= 8:  # most of the time is in the loop over tiles, and the names of keys fit
        from cedar.kernels import cluster_hopper, sparse_attention_swap_hopper
        from cedar.kernels.sparse_attention_trades_hopper import (
            PRODUCE_REGISTERS,
            WEIGH_REGISTERS,
            attend_trades,
        )

        cluster_hopper.launch(
            attend_trades, (q.shape[0], 1, 1) if parts == 1 else (1, q.shape[0], 1), parts,
            *given, *sizes, scale * 128.0, *place, tiles, names, half_rope, parts, settled,
            WEIGH_REGISTERS, PRODUCE_REGISTERS,
            num_warps=4, end=sparse_attention_swap_hopper.AREA.value if parts == 2 else 0,
        )  # fmt: skip
        return
    from cedar.kernels.grid_hopper import counters
    from cedar.kernels.sparse_attention_hopper import FOLLOW_REGISTERS, PRODUCE_REGISTERS, attend_hopper

    part, lse = q, given[9]
    if parts > 1:
        part = torch.empty(q.shape[0], parts, *q.shape[1:], dtype=torch.float16, device=q.device)
        lse = torch.empty(q.shape[0], parts, q.shape[1], dtype=torch.float32, device=q.device)
    attend_hopper[(q.shape[0], parts)](
        *given, part, lse, counters(q.device.index or 0), *sizes, scale * 128.0,
        *place, tiles, names, half_rope, parts, FOLLOW_REGISTERS, PRODUCE_REGISTERS,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
