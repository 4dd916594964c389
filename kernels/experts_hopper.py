# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts of many tokens on Hopper: gate, up and SwiGLU in one kernel, down in another, on packed
MXFP4 weights (spec §3).

Weights stream through shared memory by bulk copies and go to wgmma's registers as exact bf16 (times 2^-32),
the slots' activations the same way into shared memory as its other operand: `quantise` lays them out tile by
tile, quantised and ordered as expanded weights meet them, and hidden ones are written so. A tile has N slots
and, where experts have somewhat more, EXTRA beside them that are multiplied only where a tile has that many;
a program takes MT times 64 rows of each weight, so that a tile's activations are read seldom.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.codes_hopper import natural
from cedar.kernels.experts_operands_hopper import (
    SHARED_W,
    SHARED_X,
    ended,
    multiply_rows,
    scales_of,
    wide,
)
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, half
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
def quantise(x_ptr, slots_ptr, out_ptr, places, k, columns, x_stride, BLOCKS: gl.constexpr):
    """Grid (ceil(places / 8), columns / (128 BLOCKS)): the row of each place's slot, if it has one."""
    L: gl.constexpr = natural(4, 8)
    grid_wait()
    grid_release()
    p = gl.program_id(0) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    slot = gl.load(slots_ptr + p, mask=p < places, other=-1)
    if gl.max(slot, axis=0) >= 0:
        mine = (slot >= 0)[:, None]
        row = x_ptr + (slot // k).to(gl.int64)[:, None] * x_stride
        to = out_ptr + p.to(gl.int64)[:, None] * columns
        for b in gl.static_range(BLOCKS):
            c = (gl.program_id(1) * BLOCKS + b) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
            x = gl.load(row + c[None, :], mask=mine, other=0.0).to(gl.float32)
            out = gl.reshape(round_trip(gl.reshape(x, [8, 4, 32])).to(gl.bfloat16), [8, 4, 4, 2, 4])
            y = gl.convert_layout(gl.reshape(gl.permute(out, (0, 2, 4, 1, 3)), [8, 128]), L)
            gl.store(to + c[None, :], y, mask=mine)


@gluon.jit
def place_of(channel):
    """Where `quantise` puts a channel."""
    m = channel % 128
    return channel - m + (((m % 32 // 8) * 4 + m % 4) * 4 + m // 32) * 2 + m % 8 // 4


@gluon.jit
def round_trip_rows(parts):
    """`round_trip` of groups along the middle axis of [A, 32, B]."""
    amax = gl.max(gl.abs(parts), axis=1)
    code = ((gl.maximum(amax, 1e-4) * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    code = gl.convert_layout(code, gl.SliceLayout(1, parts.type.layout))[:, None, :]
    down = ((254 - code) << 23).to(gl.float32, bitcast=True)
    back = (parts * down).to(gl.float8e4nv).to(gl.float32)
    return back * (code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _round(x):
    return half(x).to(gl.float32)


@gluon.jit
def finish_hidden(gate, up, slots, weight_ptr, out_ptr, first, row, inner, limit, N: gl.constexpr):
    """Rounds, clamps, SwiGLU, routing weight, FP8 round trip; written in the order in which w2 meets it."""
    L: gl.constexpr = wide(4, N)
    mine = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(0, L)))
    weight = gl.load(weight_ptr + gl.maximum(mine, 0))
    # The sums are 2^-32 of what they stand for: rounding, limits and products are scaled alike, exactly.
    most = limit * 2.3283064365386963e-10
    weight *= 18446744073709551616.0
    gate = gl.minimum(_round(gate), most)
    up = gl.minimum(gl.maximum(_round(up), -most), most)
    share = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(gate * -6196328018.7194805)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    hidden = _round(gate * share * up * weight[None, :])
    hidden = gl.convert_layout(gl.reshape(round_trip_rows(gl.reshape(hidden, [2, 32, N])), [64, N]), L)
    place = place_of(row + gl.arange(0, 64, layout=gl.SliceLayout(1, L)))
    spot = first + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    gl.store(
        out_ptr + spot[None, :].to(gl.int64) * inner + place[:, None], half(hidden), mask=(mine >= 0)[None, :]
    )


@gluon.jit
def _fetch_two(a_desc, b_desc, x_desc, e_desc, base, first, block, bar, a_s, b_s, x_s, e_s, there,
               BYTES: gl.constexpr, N: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Starts the copies of block `block` of two weights and a tile's activations."""
    mbarrier.expect(bar, BYTES, pred=there)
    tma.async_copy_global_to_shared(a_desc, [base, block * 16], bar, a_s, pred=there)
    tma.async_copy_global_to_shared(b_desc, [base, block * 16], bar, b_s, pred=there)
    tma.async_copy_global_to_shared(x_desc, [first, block * 128], bar, x_s, pred=there)
    if WIDE:
        tma.async_copy_global_to_shared(e_desc, [first + N, block * 128], bar, e_s, pred=there)


@gluon.jit
def _hidden_tile(
    w1_desc, w3_desc, x_desc, e_desc, slots, weight_ptr, scale1, scale3, out_ptr, base, first, row, inner,
    limit, g_s, u_s, x_s, e_s, bars,
    COLUMNS: gl.constexpr, N: gl.constexpr, EXTRA: gl.constexpr, MT: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = COLUMNS // 128
    E: gl.constexpr = EXTRA if EXTRA > 0 else 8
    BYTES: gl.constexpr = 64 * MT * 128 + (N + EXTRA if WIDE else N) * 256
    for i in gl.static_range(STAGES - 1):
        _fetch_two(w1_desc, w3_desc, x_desc, e_desc, base, first, i, bars.index(i), g_s.index(i),
                   u_s.index(i), x_s.index(i), e_s.index(i), i < BLOCKS, BYTES, N, WIDE)  # fmt: skip
    gate0 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    up0 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    gate1 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    up1 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    gate2 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    up2 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    gate3 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    up3 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    g_scales = scales_of(scale1, 0, COLUMNS)
    u_scales = scales_of(scale3, 0, COLUMNS)
    if MT == 2:
        h_scales = scales_of(scale1 + 2 * COLUMNS, 0, COLUMNS)
        v_scales = scales_of(scale3 + 2 * COLUMNS, 0, COLUMNS)
    for turn in range(BLOCKS):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        fill = turn + STAGES - 1
        to = fill % STAGES
        barrier()  # everybody is done with the stage that is filled next
        _fetch_two(w1_desc, w3_desc, x_desc, e_desc, base, first, fill, bars.index(to), g_s.index(to),
                   u_s.index(to), x_s.index(to), e_s.index(to), fill < BLOCKS, BYTES, N, WIDE)  # fmt: skip
        x = x_s.index(slot)
        e = e_s.index(slot)
        ahead = gl.minimum(turn + 1, BLOCKS - 1)
        gate0, gate2, _, _ = multiply_rows(
            g_s.index(slot), 0, g_scales, x, e, gate0, gate2, gate0, gate2, True, WIDE, N, E
        )
        g_scales = scales_of(scale1, ahead, COLUMNS)
        up0, up2, gate0, gate2 = multiply_rows(
            u_s.index(slot), 0, u_scales, x, e, up0, up2, gate0, gate2, False, WIDE, N, E
        )
        u_scales = scales_of(scale3, ahead, COLUMNS)
        if MT == 2:
            gate1, gate3, up0, up2 = multiply_rows(
                g_s.index(slot), 64, h_scales, x, e, gate1, gate3, up0, up2, False, WIDE, N, E
            )
            h_scales = scales_of(scale1 + 2 * COLUMNS, ahead, COLUMNS)
            up1, up3, gate1, gate3 = multiply_rows(
                u_s.index(slot), 64, v_scales, x, e, up1, up3, gate1, gate3, False, WIDE, N, E
            )
            v_scales = scales_of(scale3 + 2 * COLUMNS, ahead, COLUMNS)
            up1, up3 = ended(up1, up3, WIDE)
        else:
            up0, up2 = ended(up0, up2, WIDE)
    finish_hidden(gate0, up0, slots, weight_ptr, out_ptr, first, row, inner, limit, N)
    if WIDE:
        finish_hidden(gate2, up2, slots + N, weight_ptr, out_ptr, first + N, row, inner, limit, E)
    if MT == 2:
        finish_hidden(gate1, up1, slots, weight_ptr, out_ptr, first, row + 64, inner, limit, N)
        if WIDE:
            finish_hidden(gate3, up3, slots + N, weight_ptr, out_ptr, first + N, row + 64, inner, limit, E)


@gluon.jit
def hidden(
    w1_desc, w3_desc, x_desc, e_desc, slots_ptr, experts_ptr, weight_ptr, s1_ptr, s3_ptr, out_ptr,
    inner, limit,
    COLUMNS: gl.constexpr, N: gl.constexpr, EXTRA: gl.constexpr, MT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (inner / (64 MT), tiles): tiles of N + EXTRA slots."""
    E: gl.constexpr = EXTRA if EXTRA > 0 else 8
    grid_wait()
    grid_release()
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        first = tile * (N + EXTRA)
        slots = slots_ptr + first
        row = gl.program_id(0) * (64 * MT)
        base = expert * inner + row
        scale1 = s1_ptr + base.to(gl.int64) * (COLUMNS // 32)
        scale3 = s3_ptr + base.to(gl.int64) * (COLUMNS // 32)
        g_s = gl.allocate_shared_memory(gl.int32, [STAGES, 64 * MT, 16], SHARED_W)
        u_s = gl.allocate_shared_memory(gl.int32, [STAGES, 64 * MT, 16], SHARED_W)
        x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], SHARED_X)
        e_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, E, 128], SHARED_X)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        if EXTRA > 0:
            if gl.load(slots + N) >= 0:
                _hidden_tile(
                    w1_desc, w3_desc, x_desc, e_desc, slots, weight_ptr, scale1, scale3, out_ptr, base,
                    first, row, inner, limit, g_s, u_s, x_s, e_s, bars, COLUMNS, N, EXTRA, MT, STAGES,
                    True,
                )  # fmt: skip
            else:
                _hidden_tile(
                    w1_desc, w3_desc, x_desc, e_desc, slots, weight_ptr, scale1, scale3, out_ptr, base,
                    first, row, inner, limit, g_s, u_s, x_s, e_s, bars, COLUMNS, N, EXTRA, MT, STAGES,
                    False,
                )  # fmt: skip
        else:
            _hidden_tile(
                w1_desc, w3_desc, x_desc, e_desc, slots, weight_ptr, scale1, scale3, out_ptr, base,
                first, row, inner, limit, g_s, u_s, x_s, e_s, bars, COLUMNS, N, EXTRA, MT, STAGES,
                False,
            )  # fmt: skip


@gluon.jit
def _write(acc, slots, out_ptr, row, outputs, N: gl.constexpr):
    """A tile's results to their slots' rows."""
    L: gl.constexpr = wide(4, N)
    mine = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(0, L)))
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * outputs + r[:, None]
    gl.store(at, half(acc * 4294967296.0), mask=(mine >= 0)[None, :])


@gluon.jit
def _fetch_one(w_desc, x_desc, e_desc, base, first, block, bar, w_s, x_s, e_s, there,
               BYTES: gl.constexpr, N: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """`_fetch_two` of one weight."""
    mbarrier.expect(bar, BYTES, pred=there)
    tma.async_copy_global_to_shared(w_desc, [base, block * 16], bar, w_s, pred=there)
    tma.async_copy_global_to_shared(x_desc, [first, block * 128], bar, x_s, pred=there)
    if WIDE:
        tma.async_copy_global_to_shared(e_desc, [first + N, block * 128], bar, e_s, pred=there)


@gluon.jit
def _output_tile(
    w2_desc, x_desc, e_desc, slots, scale, out_ptr, base, first, row, outputs, w_s, x_s, e_s, bars,
    COLUMNS: gl.constexpr, N: gl.constexpr, EXTRA: gl.constexpr, MT: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = COLUMNS // 128
    E: gl.constexpr = EXTRA if EXTRA > 0 else 8
    BYTES: gl.constexpr = 64 * MT * 64 + (N + EXTRA if WIDE else N) * 256
    for i in gl.static_range(STAGES - 1):
        _fetch_one(w2_desc, x_desc, e_desc, base, first, i, bars.index(i), w_s.index(i), x_s.index(i),
                   e_s.index(i), i < BLOCKS, BYTES, N, WIDE)  # fmt: skip
    a0 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    a1 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    a2 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    a3 = gl.full([64, N], 0.0, gl.float32, wide(4, N))
    b0 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    b1 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    b2 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    b3 = gl.full([64, E], 0.0, gl.float32, wide(4, E))
    s0 = scales_of(scale, 0, COLUMNS)
    if MT > 1:
        s1 = scales_of(scale + 2 * COLUMNS, 0, COLUMNS)
    if MT > 2:
        s2 = scales_of(scale + 4 * COLUMNS, 0, COLUMNS)
        s3 = scales_of(scale + 6 * COLUMNS, 0, COLUMNS)
    for turn in range(BLOCKS):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        fill = turn + STAGES - 1
        to = fill % STAGES
        barrier()  # everybody is done with the stage that is filled next
        _fetch_one(w2_desc, x_desc, e_desc, base, first, fill, bars.index(to), w_s.index(to), x_s.index(to),
                   e_s.index(to), fill < BLOCKS, BYTES, N, WIDE)  # fmt: skip
        x = x_s.index(slot)
        e = e_s.index(slot)
        ahead = gl.minimum(turn + 1, BLOCKS - 1)
        w = w_s.index(slot)
        a0, b0, _, _ = multiply_rows(w, 0, s0, x, e, a0, b0, a0, b0, True, WIDE, N, E)
        s0 = scales_of(scale, ahead, COLUMNS)
        if MT > 1:
            a1, b1, a0, b0 = multiply_rows(w, 64, s1, x, e, a1, b1, a0, b0, False, WIDE, N, E)
            s1 = scales_of(scale + 2 * COLUMNS, ahead, COLUMNS)
        if MT > 2:
            a2, b2, a1, b1 = multiply_rows(w, 128, s2, x, e, a2, b2, a1, b1, False, WIDE, N, E)
            s2 = scales_of(scale + 4 * COLUMNS, ahead, COLUMNS)
            a3, b3, a2, b2 = multiply_rows(w, 192, s3, x, e, a3, b3, a2, b2, False, WIDE, N, E)
            s3 = scales_of(scale + 6 * COLUMNS, ahead, COLUMNS)
            a3, b3 = ended(a3, b3, WIDE)
        elif MT > 1:
            a1, b1 = ended(a1, b1, WIDE)
        else:
            a0, b0 = ended(a0, b0, WIDE)
    _write(a0, slots, out_ptr, row, outputs, N)
    if WIDE:
        _write(b0, slots + N, out_ptr, row, outputs, E)
    if MT > 1:
        _write(a1, slots, out_ptr, row + 64, outputs, N)
        if WIDE:
            _write(b1, slots + N, out_ptr, row + 64, outputs, E)
    if MT > 2:
        _write(a2, slots, out_ptr, row + 128, outputs, N)
        _write(a3, slots, out_ptr, row + 192, outputs, N)
        if WIDE:
            _write(b2, slots + N, out_ptr, row + 128, outputs, E)
            _write(b3, slots + N, out_ptr, row + 192, outputs, E)


@gluon.jit
def output(
    w2_desc, x_desc, e_desc, slots_ptr, experts_ptr, s2_ptr, out_ptr, outputs,
    COLUMNS: gl.constexpr, N: gl.constexpr, EXTRA: gl.constexpr, MT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / (64 MT), tiles)."""
    E: gl.constexpr = EXTRA if EXTRA > 0 else 8
    grid_wait()
    grid_release()
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        first = tile * (N + EXTRA)
        slots = slots_ptr + first
        row = gl.program_id(0) * (64 * MT)
        base = expert * outputs + row
        scale = s2_ptr + base.to(gl.int64) * (COLUMNS // 32)
        w_s = gl.allocate_shared_memory(gl.int32, [STAGES, 64 * MT, 16], SHARED_W)
        x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], SHARED_X)
        e_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, E, 128], SHARED_X)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        if EXTRA > 0:
            if gl.load(slots + N) >= 0:
                _output_tile(
                    w2_desc, x_desc, e_desc, slots, scale, out_ptr, base, first, row, outputs, w_s,
                    x_s, e_s, bars, COLUMNS, N, EXTRA, MT, STAGES, True,
                )  # fmt: skip
            else:
                _output_tile(
                    w2_desc, x_desc, e_desc, slots, scale, out_ptr, base, first, row, outputs, w_s,
                    x_s, e_s, bars, COLUMNS, N, EXTRA, MT, STAGES, False,
                )  # fmt: skip
        else:
            _output_tile(
                w2_desc, x_desc, e_desc, slots, scale, out_ptr, base, first, row, outputs, w_s, x_s,
                e_s, bars, COLUMNS, N, EXTRA, MT, STAGES, False,
            )  # fmt: skip


def blocks_each(width: int) -> int:
    """Blocks of 128 channels that a program of `quantise` has of so many channels."""
    return next(n for n in (5, 4, 3, 2, 1) if width // 128 % n == 0)


def experts(
    x: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    weights: torch.Tensor,
    packed: Packed,
    k: int,
    limit: float,
    slots: tuple[int, int],
    placed: bool = False,
) -> torch.Tensor:
    """bf16 [N·k, d]: every slot's output; tiles = (slots, owners, count) of `slots` = (N, EXTRA) slots each.

    x bf16 [N, d], or `placed`: as `quantise` writes it, a row a place; weights fp32 [N, k]; packed as in
    `experts_triton.grouped_experts`, all contiguous.
    """
    width = x.shape[1]
    (w1, s1), (w3, s3), (w2, s2) = packed
    count, inner = w1.shape[:2]
    n, extra = slots
    rows, stages, rows2, stages2 = (2, 3, 4, 3) if n == 64 else (2, 4, 2, 6)
    places = tiles[2] * (n + extra)
    seen = x
    if not placed:
        seen = torch.empty(places, width, dtype=torch.bfloat16, device=x.device)
        each = blocks_each(width)
        quantise[(triton.cdiv(places, 8), width // 128 // each)](
            x, tiles[0], seen, places, k, width, x.stride(0), each, num_warps=4, launch_pdl=True
        )
    filled = torch.empty(places, inner, dtype=torch.bfloat16, device=x.device)
    d1, d3 = (
        TensorDescriptor.from_tensor(
            w.view(torch.int32).view(count * inner, width // 8), [64 * rows, 16], SHARED_W.value
        )
        for w in (w1, w3)
    )
    hidden[(inner // (64 * rows), tiles[2])](
        d1, d3, *_rows(seen, n, extra), *tiles[:2], weights, s1, s3, filled, inner, limit, width, n, extra,
        rows, stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    y = torch.empty(weights.numel(), width, dtype=torch.bfloat16, device=x.device)
    d2 = TensorDescriptor.from_tensor(
        w2.view(torch.int32).view(count * width, inner // 8), [64 * rows2, 16], SHARED_W.value
    )
    output[(width // (64 * rows2), tiles[2])](
        d2, *_rows(filled, n, extra), *tiles[:2], s2, y, width, inner, n, extra, rows2, stages2, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return y


def _rows(x: torch.Tensor, n: int, extra: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of blocks of n and of `extra` rows by 128 channels."""
    first, more = (TensorDescriptor.from_tensor(x, [size, 128], SHARED_X.value) for size in (n, extra or 8))
    return first, more
