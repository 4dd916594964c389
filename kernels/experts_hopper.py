# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts of many tokens on Hopper: gate, up and SwiGLU in one kernel, down in another, on packed
MXFP4 weights (spec §3).

Weights stream through shared memory by bulk copies and go to wgmma's registers as exact bf16 (times 2^-32),
the slots' activations are gathered into shared memory as its other operand. A tile has N slots and, where
experts have somewhat more, EXTRA beside them that are multiplied only where a tile has that many; a program
takes MT times 64 rows of each weight, so that a tile's activations are read seldom. Activations are quantised
and ordered as expanded weights meet them (`quantise`); hidden ones are written in that order, quantised
already.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.codes_hopper import natural
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, half
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED_W = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))
SHARED_X = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
Packed = tuple[tuple[torch.Tensor, torch.Tensor], ...]
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [64, 128] bf16, 16 bytes a thread

# Eight E2M1 channels and their scale (two bf16, value·2^126) to eight bf16, by nibbles (3, 7), (2, 6), (1,
# 5), (0, 4).
_FP4_ASM = gl.constexpr("""
{
.reg .b32 a, b, c, d, s;
shr.b32 a, $8, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 a, $8, 0x80008000, a, 0xEA;
mul.rn.bf16x2 a, a, $9;
mov.b32 {$0, $1}, a;
shr.b32 b, $8, 2;
and.b32 b, b, 0x01C001C0;
shl.b32 s, $8, 4;
lop3.b32 b, s, 0x80008000, b, 0xEA;
mul.rn.bf16x2 b, b, $9;
mov.b32 {$2, $3}, b;
shl.b32 c, $8, 2;
and.b32 c, c, 0x01C001C0;
shl.b32 s, $8, 8;
lop3.b32 c, s, 0x80008000, c, 0xEA;
mul.rn.bf16x2 c, c, $9;
mov.b32 {$4, $5}, c;
shl.b32 d, $8, 6;
and.b32 d, d, 0x01C001C0;
shl.b32 s, $8, 12;
lop3.b32 d, s, 0x80008000, d, 0xEA;
mul.rn.bf16x2 d, d, $9;
mov.b32 {$6, $7}, d;
}
""")

# Words of 64 rows, 128 channels: a thread has four of rows g and g + 8, a scale group of each.
_WORDS4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
)
_GROUPS4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)


@gluon.constexpr_function
def wide(warps, n):
    """wgmma's sum [16 warps, n]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16])


@gluon.constexpr_function
def wide_left(warps, n):
    """wgmma's left operand [16 warps, 128]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16]), 2)


@gluon.jit
def round_trip(groups):
    """fp32 groups along the last axis of [A, B, 32], holding bf16 values, quantised and read back."""
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    code = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    down = ((254 - code) << 23).to(gl.float32, bitcast=True)
    back = gl.minimum(gl.maximum(groups * down, -448.0), 448.0).to(gl.float8e4nv).to(gl.float32)
    return back * (code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scales_of(scale, block, columns: gl.constexpr):
    """E8M0 bytes [64, 4] of 64 rows, channels 128·block on."""
    r3 = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS4)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _GROUPS4)))
    return gl.load(scale + r3[:, None] * (columns // 32) + block * 4 + group[None, :])


@gluon.jit
def expand(words, scales, N: gl.constexpr):
    """wgmma's left operand bf16·2^-32 [64, 128] of words [64, 16] and their scales."""
    power = gl.minimum(scales.to(gl.int32) + 94, 254) * 0x00800080
    wide_ = power[:, :, None] + gl.full([64, 4, 4], 0, gl.int32, _GROUPS4)
    scale = gl.convert_layout(gl.reshape(wide_, [64, 16]), _WORDS4)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _FP4_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale], is_pure=True, pack=1,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16),
    )  # fmt: skip
    front = gl.join(gl.join(d0, d1), gl.join(c0, c1))
    both = gl.join(front, gl.join(gl.join(b0, b1), gl.join(a0, a1)))  # [64, word, half, 2, 2]
    parts = gl.reshape(gl.permute(both, (0, 1, 4, 3, 2)), [64, 4, 8, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [64, 128]), wide_left(4, N))


@gluon.jit
def quantise(x_ptr, out_ptr, tokens, columns, x_stride):
    """Grid (ceil(tokens / 8), columns / 128)."""
    L: gl.constexpr = natural(4, 8)
    grid_wait()
    grid_release()
    t = gl.program_id(0) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    mine = (t < tokens)[:, None]
    row = t.to(gl.int64)[:, None]
    x = gl.load(x_ptr + row * x_stride + c[None, :], mask=mine, other=0.0).to(gl.float32)
    out = gl.reshape(round_trip(gl.reshape(x, [8, 4, 32])).to(gl.bfloat16), [8, 4, 4, 2, 4])
    y = gl.convert_layout(gl.reshape(gl.permute(out, (0, 2, 4, 1, 3)), [8, 128]), L)
    gl.store(out_ptr + row * columns + c[None, :], y, mask=mine)


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
    back = gl.minimum(gl.maximum(parts * down, -448.0), 448.0).to(gl.float8e4nv).to(gl.float32)
    return back * (code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _copy(shared, x_ptr, rows, block, pred):
    """Starts copying channels 128·block on of the rows at offsets `rows` into shared memory."""
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))
    async_copy.async_copy_global_to_shared(
        shared, x_ptr + rows[:, None] + block * 128 + c[None, :], mask=pred & (rows[:, None] >= 0)
    )


@gluon.jit
def _round(x):
    return half(x).to(gl.float32)


@gluon.jit
def finish_hidden(gate, up, slots, weight_ptr, out_ptr, row, inner, limit, N: gl.constexpr):
    """Rounds, clamps, SwiGLU, routing weight, FP8 round trip; written in the order in which w2 meets it."""
    L: gl.constexpr = wide(4, N)
    mine = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(0, L)))
    weight = gl.load(weight_ptr + gl.maximum(mine, 0))
    gate = gl.minimum(_round(gate * 4294967296.0), limit)
    up = gl.minimum(gl.maximum(_round(up * 4294967296.0), -limit), limit)
    hidden = _round(gate / (1.0 + gl.exp(-gate)) * up * weight[None, :])
    hidden = gl.convert_layout(gl.reshape(round_trip_rows(gl.reshape(hidden, [2, 32, N])), [64, N]), L)
    place = place_of(row + gl.arange(0, 64, layout=gl.SliceLayout(1, L)))
    at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * inner + place[:, None]
    gl.store(at, half(hidden), mask=(mine >= 0)[None, :])


@gluon.jit
def _multiply(left, right, acc, extra, more, wider, E: gl.constexpr):
    """acc and, where the tile is wider, more with a product added: one wait for both."""
    if wider:
        a = warpgroup_mma(left, right, acc, is_async=True)
        b = warpgroup_mma(gl.convert_layout(left, wide_left(4, E)), extra, more, is_async=True)
        acc, more = warpgroup_mma_wait(0, deps=(a, b))
    else:
        acc = warpgroup_mma(left, right, acc)
    return acc, more


@gluon.jit
def hidden(
    w1_desc,
    w3_desc,
    x_ptr,
    slots_ptr,
    experts_ptr,
    weight_ptr,
    s1_ptr,
    s3_ptr,
    out_ptr,
    inner,
    k,
    limit,
    COLUMNS: gl.constexpr,
    N: gl.constexpr,
    EXTRA: gl.constexpr,
    MT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (inner / (64 MT), tiles): tiles of N + EXTRA slots."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    E: gl.constexpr = EXTRA if EXTRA > 0 else 8
    grid_wait()
    grid_release()
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        slots = slots_ptr + tile * (N + EXTRA)
        wider = EXTRA > 0
        if EXTRA > 0:
            wider = gl.load(slots + N) >= 0
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
        rows = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(1, _COPY)))
        rows = (gl.maximum(rows, 0) // k).to(gl.int64) * COLUMNS
        more = gl.load(slots + (N if EXTRA > 0 else 0) + gl.arange(0, E, layout=gl.SliceLayout(1, _COPY)))
        more = (gl.maximum(more, 0) // k).to(gl.int64) * COLUMNS
        for i in gl.static_range(STAGES - 1):
            if i < BLOCKS:
                mbarrier.expect(bars.index(i), 64 * MT * 128)
                tma.async_copy_global_to_shared(w1_desc, [base, i * 16], bars.index(i), g_s.index(i))
                tma.async_copy_global_to_shared(w3_desc, [base, i * 16], bars.index(i), u_s.index(i))
                _copy(x_s.index(i), x_ptr, rows, i, True)
                if EXTRA > 0:
                    _copy(e_s.index(i), x_ptr, more, i, True)
            async_copy.commit_group()
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
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            barrier()
            fill = turn + STAGES - 1
            to = fill % STAGES
            there = fill < BLOCKS
            mbarrier.expect(bars.index(to), 64 * MT * 128, pred=there)
            tma.async_copy_global_to_shared(
                w1_desc, [base, fill * 16], bars.index(to), g_s.index(to), pred=there
            )
            tma.async_copy_global_to_shared(
                w3_desc, [base, fill * 16], bars.index(to), u_s.index(to), pred=there
            )
            _copy(x_s.index(to), x_ptr, rows, fill, there)
            if EXTRA > 0:
                _copy(e_s.index(to), x_ptr, more, fill, there)
            async_copy.commit_group()
            right = x_s.index(slot).permute((1, 0))
            extra = e_s.index(slot).permute((1, 0))
            ahead = gl.minimum(turn + 1, BLOCKS - 1)
            left = expand(g_s.index(slot).slice(0, 64, dim=0).load(_WORDS4), g_scales, N)
            g_scales = scales_of(scale1, ahead, COLUMNS)
            gate0, gate2 = _multiply(left, right, gate0, extra, gate2, wider, E)
            left = expand(u_s.index(slot).slice(0, 64, dim=0).load(_WORDS4), u_scales, N)
            u_scales = scales_of(scale3, ahead, COLUMNS)
            up0, up2 = _multiply(left, right, up0, extra, up2, wider, E)
            if MT == 2:
                left = expand(g_s.index(slot).slice(64, 64, dim=0).load(_WORDS4), h_scales, N)
                h_scales = scales_of(scale1 + 2 * COLUMNS, ahead, COLUMNS)
                gate1, gate3 = _multiply(left, right, gate1, extra, gate3, wider, E)
                left = expand(u_s.index(slot).slice(64, 64, dim=0).load(_WORDS4), v_scales, N)
                v_scales = scales_of(scale3 + 2 * COLUMNS, ahead, COLUMNS)
                up1, up3 = _multiply(left, right, up1, extra, up3, wider, E)
        async_copy.wait_group(0)
        finish_hidden(gate0, up0, slots, weight_ptr, out_ptr, row, inner, limit, N)
        if EXTRA > 0:
            finish_hidden(gate2, up2, slots + N, weight_ptr, out_ptr, row, inner, limit, E)
        if MT == 2:
            finish_hidden(gate1, up1, slots, weight_ptr, out_ptr, row + 64, inner, limit, N)
            if EXTRA > 0:
                finish_hidden(gate3, up3, slots + N, weight_ptr, out_ptr, row + 64, inner, limit, E)
        for j in gl.static_range(STAGES):
            mbarrier.invalidate(bars.index(j))


@gluon.jit
def _write(acc, slots, out_ptr, row, outputs, N: gl.constexpr):
    """A tile's results to their slots' rows."""
    L: gl.constexpr = wide(4, N)
    mine = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(0, L)))
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * outputs + r[:, None]
    gl.store(at, half(acc * 4294967296.0), mask=(mine >= 0)[None, :])


@gluon.jit
def output(
    w2_desc,
    x_ptr,
    slots_ptr,
    experts_ptr,
    s2_ptr,
    out_ptr,
    outputs,
    COLUMNS: gl.constexpr,
    N: gl.constexpr,
    EXTRA: gl.constexpr,
    MT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (outputs / (64 MT), tiles)."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    E: gl.constexpr = EXTRA if EXTRA > 0 else 8
    grid_wait()
    grid_release()
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        slots = slots_ptr + tile * (N + EXTRA)
        wider = EXTRA > 0
        if EXTRA > 0:
            wider = gl.load(slots + N) >= 0
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
        rows = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(1, _COPY)))
        rows = gl.maximum(rows, 0).to(gl.int64) * COLUMNS
        more = gl.load(slots + (N if EXTRA > 0 else 0) + gl.arange(0, E, layout=gl.SliceLayout(1, _COPY)))
        more = gl.maximum(more, 0).to(gl.int64) * COLUMNS
        for i in gl.static_range(STAGES - 1):
            if i < BLOCKS:
                mbarrier.expect(bars.index(i), 64 * MT * 64)
                tma.async_copy_global_to_shared(w2_desc, [base, i * 16], bars.index(i), w_s.index(i))
                _copy(x_s.index(i), x_ptr, rows, i, True)
                if EXTRA > 0:
                    _copy(e_s.index(i), x_ptr, more, i, True)
            async_copy.commit_group()
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
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            barrier()
            fill = turn + STAGES - 1
            to = fill % STAGES
            there = fill < BLOCKS
            mbarrier.expect(bars.index(to), 64 * MT * 64, pred=there)
            tma.async_copy_global_to_shared(
                w2_desc, [base, fill * 16], bars.index(to), w_s.index(to), pred=there
            )
            _copy(x_s.index(to), x_ptr, rows, fill, there)
            if EXTRA > 0:
                _copy(e_s.index(to), x_ptr, more, fill, there)
            async_copy.commit_group()
            right = x_s.index(slot).permute((1, 0))
            extra = e_s.index(slot).permute((1, 0))
            ahead = gl.minimum(turn + 1, BLOCKS - 1)
            left = expand(w_s.index(slot).slice(0, 64, dim=0).load(_WORDS4), s0, N)
            s0 = scales_of(scale, ahead, COLUMNS)
            a0, b0 = _multiply(left, right, a0, extra, b0, wider, E)
            if MT > 1:
                left = expand(w_s.index(slot).slice(64, 64, dim=0).load(_WORDS4), s1, N)
                s1 = scales_of(scale + 2 * COLUMNS, ahead, COLUMNS)
                a1, b1 = _multiply(left, right, a1, extra, b1, wider, E)
            if MT > 2:
                left = expand(w_s.index(slot).slice(128, 64, dim=0).load(_WORDS4), s2, N)
                s2 = scales_of(scale + 4 * COLUMNS, ahead, COLUMNS)
                a2, b2 = _multiply(left, right, a2, extra, b2, wider, E)
                left = expand(w_s.index(slot).slice(192, 64, dim=0).load(_WORDS4), s3, N)
                s3 = scales_of(scale + 6 * COLUMNS, ahead, COLUMNS)
                a3, b3 = _multiply(left, right, a3, extra, b3, wider, E)
        async_copy.wait_group(0)
        _write(a0, slots, out_ptr, row, outputs, N)
        if EXTRA > 0:
            _write(b0, slots + N, out_ptr, row, outputs, E)
        if MT > 1:
            _write(a1, slots, out_ptr, row + 64, outputs, N)
            if EXTRA > 0:
                _write(b1, slots + N, out_ptr, row + 64, outputs, E)
        if MT > 2:
            _write(a2, slots, out_ptr, row + 128, outputs, N)
            _write(a3, slots, out_ptr, row + 192, outputs, N)
            if EXTRA > 0:
                _write(b2, slots + N, out_ptr, row + 128, outputs, E)
                _write(b3, slots + N, out_ptr, row + 192, outputs, E)
        for j in gl.static_range(STAGES):
            mbarrier.invalidate(bars.index(j))


def experts(
    x: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    weights: torch.Tensor,
    packed: Packed,
    k: int,
    limit: float,
    slots: tuple[int, int],
) -> torch.Tensor:
    """bf16 [N·k, d]: every slot's output; tiles = (slots, owners, count) of `slots` = (N, EXTRA) slots each.

    x bf16 [N, d]; weights fp32 [N, k]; packed as in `experts_triton.grouped_experts`, all contiguous.
    """
    tokens, width = x.shape
    (w1, s1), (w3, s3), (w2, s2) = packed
    count, inner = w1.shape[:2]
    n, extra = slots
    rows, stages, rows2, stages2 = (2, 3, 4, 3) if n == 64 else (2, 4, 2, 6)
    seen = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    quantise[(triton.cdiv(tokens, 8), width // 128)](
        x, seen, tokens, width, x.stride(0), num_warps=4, launch_pdl=True
    )
    filled = torch.empty(tokens * k, inner, dtype=torch.bfloat16, device=x.device)
    d1, d3 = (
        TensorDescriptor.from_tensor(
            w.view(torch.int32).view(count * inner, width // 8), [64 * rows, 16], SHARED_W.value
        )
        for w in (w1, w3)
    )
    hidden[(inner // (64 * rows), tiles[2])](
        d1, d3, seen, *tiles[:2], weights, s1, s3, filled, inner, k, limit, width, n, extra, rows, stages,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    y = torch.empty(tokens * k, width, dtype=torch.bfloat16, device=x.device)
    d2 = TensorDescriptor.from_tensor(
        w2.view(torch.int32).view(count * width, inner // 8), [64 * rows2, 16], SHARED_W.value
    )
    output[(width // (64 * rows2), tiles[2])](
        d2, filled, *tiles[:2], s2, y, width, inner, n, extra, rows2, stages2, num_warps=4, launch_pdl=True
    )
    return y
