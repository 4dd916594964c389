# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts of many tokens on Hopper (spec §3): rows quantised to their places, then two launches of
`experts_trades_hopper.products`.

Activations lie place by place, 80 places a tile, quantised, read back, and ordered as expanded weights meet
them: of 128 channels of a row, m stands at ((m % 32 // 8 · 4 + m % 4) · 4 + m // 32) · 2 + m % 8 // 4.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.codes_hopper import natural
from cedar.kernels.experts_trades_hopper import launch
from cedar.kernels.grid_hopper import grid_release, grid_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

Packed = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@gluon.jit
def round_trip(groups):
    """fp32 groups along the last axis of [A, B, 32], holding bf16 values, quantised and read back."""
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    code = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    down = ((254 - code) << 23).to(gl.float32, bitcast=True)
    back = (groups * down).to(gl.float8e4nv).to(gl.float32)  # the conversion saturates
    return back * (code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def quantised_blocks(x, mine, BLOCKS: gl.constexpr):
    """Eight rows' 128 BLOCKS channels at x, of rows that are `mine`, quantised and ordered: a block each."""
    blocks = ()
    for b in gl.static_range(BLOCKS):
        row = gl.load(x + b * 128, mask=mine[:, None], other=0.0).to(gl.float32)
        out = gl.reshape(round_trip(gl.reshape(row, [8, 4, 32])).to(gl.bfloat16), [8, 4, 4, 2, 4])
        y = gl.reshape(gl.permute(out, (0, 2, 4, 1, 3)), [8, 128])
        blocks = blocks + (gl.convert_layout(y, natural(4, 8)),)  # type: ignore[assignment] # noqa: RUF005  (Triton knows no other way)
    return blocks


@gluon.jit
def store_blocks(blocks, out, places, mine, columns, k, BLOCKS: gl.constexpr):
    """Stores what `quantised_blocks` gave to the rows of `out` that the k choices at `places` have."""
    for choice in range(k):
        place = gl.load(places + choice, mask=mine, other=0, cache_modifier=".cg")
        to = out + place.to(gl.int64)[:, None] * columns
        for b in gl.static_range(BLOCKS):
            gl.store(to + b * 128, blocks[b], mask=mine[:, None])


@gluon.jit
def quantise(x_ptr, places_ptr, out_ptr, tokens, k, columns, x_stride, BLOCKS: gl.constexpr):
    """Grid (ceil(tokens / 8), columns / (128 BLOCKS)): a token's row to the places of its k choices."""
    L: gl.constexpr = natural(4, 8)
    grid_wait()
    grid_release()
    t = gl.program_id(0) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    c = gl.program_id(1) * (128 * BLOCKS) + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    blocks = quantised_blocks(x_ptr + t.to(gl.int64)[:, None] * x_stride + c, t < tokens, BLOCKS)
    store_blocks(blocks, out_ptr + c, places_ptr + t * k, t < tokens, columns, k, BLOCKS)


@gluon.jit
def round_trip_rows(parts):
    """`round_trip` of groups along the middle axis of [A, 32, B]."""
    amax = gl.max(gl.abs(parts), axis=1)
    code = ((gl.maximum(amax, 1e-4) * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    code = gl.convert_layout(code, gl.SliceLayout(1, parts.type.layout))[:, None, :]
    down = ((254 - code) << 23).to(gl.float32, bitcast=True)
    back = (parts * down).to(gl.float8e4nv).to(gl.float32)
    return back * (code << 23).to(gl.float32, bitcast=True)


def blocks_each(width: int) -> int:
    """Blocks of 128 channels that a program of `quantise` has of so many channels."""
    return next(n for n in (5, 4, 3, 2, 1) if width // 128 % n == 0)


def quantised(x: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """bf16 [count, d]: each choice's token of x bf16 [N, d], contiguous, at its place (int32 [N·k]) of
    `count`, as expanded weights meet it; other rows are whatever they are.
    """
    tokens, width = x.shape
    out = torch.empty(count, width, dtype=torch.bfloat16, device=x.device)
    each = blocks_each(width)
    quantise[(triton.cdiv(tokens, 8), width // 128 // each)](
        x, places, out, tokens, places.numel() // tokens, width, width, each, num_warps=4, launch_pdl=True
    )
    return out


def experts(
    seen: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    weights: torch.Tensor,
    packed: Packed,
    limit: float,
) -> torch.Tensor:
    """bf16 [N·k, d]: every slot's output; tiles = (slots, owners, count) of 80 places each.

    seen bf16 [places, d] as `quantised` has it; weights fp32 [N, k]; packed as in
    `experts_triton.grouped_experts`, all contiguous.
    """
    gate, up, down = packed
    hidden = torch.empty(seen.shape[0], gate[0].shape[1], dtype=torch.bfloat16, device=seen.device)
    launch((gate, up), seen, tiles, weights, hidden, limit, True)
    y = torch.empty(weights.numel(), seen.shape[1], dtype=torch.bfloat16, device=seen.device)
    launch((down, down), hidden, tiles, weights, y, limit, False)
    return y
