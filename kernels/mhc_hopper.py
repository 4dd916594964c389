# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A sublayer's boundary and mix for many tokens on Hopper, one launch: streams read once and written once
(spec §6).

A program takes 64 tokens and a share of the channels, 64 at a time: streams come by bulk copies, are expanded
in place and leave by bulk copies, and meanwhile are wgmma's right operand against the projection, whose fp32
values go in as three exact bf16 parts, one above the other in the rows of the left operand. The programs of a
tile then meet: each norms its own channels and turns the sums of some tokens into pre, post and comb.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.grid_hopper import barrier, counters, grid_release, grid_wait, half, meet
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
EL = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))


@gluon.constexpr_function
def parts_layout(splits, each):
    """[splits, each] within a warp, warps alike."""
    bases = []
    n = 1
    while n < splits:
        bases.append([n, 0])
        n *= 2
    m = 1
    while m < each:
        bases.append([0, m])
        m *= 2
    lanes = bases[:5]
    while len(lanes) < 5:
        lanes.append([0, 0])
    return gl.DistributedLinearLayout(bases[5:], lanes, [[0, 0], [0, 0]], [], [splits, each])


@gluon.jit
def _sum(part, at, mask):
    return gl.sum(gl.load(part + at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)


@gluon.jit
def _sig(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _inverse(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _even(a, b, c, d, eps):
    r = _inverse((((a + b) + c) + d) + eps)
    return a * r, b * r, c * r, d * r


@gluon.jit
def _soft(a, b, c, d, eps):
    top = gl.maximum(gl.maximum(a, b), gl.maximum(c, d))
    a = gl.exp(a - top)
    b = gl.exp(b - top)
    c = gl.exp(c - top)
    d = gl.exp(d - top)
    r = _inverse(((a + b) + c) + d)
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@gluon.jit
def _mixed(x0, x1, x2, x3, y, c0, c1, c2, c3, p):
    new = c0[:, None] * x0 + c1[:, None] * x1
    new = new + c2[:, None] * x2
    new = new + c3[:, None] * x3
    return half(new + p[:, None] * y)


@gluon.jit
def _fn(fn_ptr, width, at):
    """A operands [64, 64] of fn[mix, at..]: rows 0-31 the leading parts, rows 32-63 the next; then what is
    left.
    """
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, LEFT))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, LEFT))
    mix = gl.minimum(r % 32, 23)  # the last eight are not read
    v = gl.load(fn_ptr + mix[:, None] * (4 * width) + at + c[None, :])
    lead = (r < 32)[:, None]
    u = v - gl.where(lead, 0.0, (v.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True))
    first = (u.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    rest = gl.where(lead, 0.0, u - (u.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True))
    second = (rest.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return first, second


@gluon.jit
def sublayer_tiles(
    x_desc,
    y_desc,
    out_desc,
    post_ptr,
    comb_ptr,
    pre_ptr,
    norm_ptr,
    row_ptr,
    fn_ptr,
    scale_ptr,
    base_ptr,
    part_ptr,
    rows_ptr,
    count_ptr,
    new_pre_ptr,
    new_post_ptr,
    new_comb_ptr,
    tokens,
    width,
    eps,
    mix_eps,
    hc_eps,
    rounds,
    SPLITS: gl.constexpr,
    SP2: gl.constexpr,
    TS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (SPLITS, ceil(tokens / 64))."""
    split = gl.program_id(0)
    tile = gl.program_id(1)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 64, 64], TILE)
    y_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    blocks = (width + 63) // 64
    each = (blocks + SPLITS - 1) // SPLITS
    first = split * each
    count = gl.maximum(gl.minimum(each, blocks - first), 0)
    grid_wait()
    grid_release()
    for i in gl.static_range(STAGES):
        here = i < count
        mbarrier.expect(bars.index(i), 5 * 8192, pred=here)
        for s in gl.static_range(4):
            tma.async_copy_global_to_shared(
                x_desc,
                [tile * 64, s * width + (first + i) * 64],
                bars.index(i),
                x_s.index(i * 4 + s),
                pred=here,
            )
        tma.async_copy_global_to_shared(
            y_desc, [tile * 64, (first + i) * 64], bars.index(i), y_s.index(i), pred=here
        )
    token = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, EL))
    mine = token < tokens
    comb = comb_ptr + token.to(gl.int64) * 16
    c00 = gl.load(comb, mask=mine, other=0.0)
    c01 = gl.load(comb + 1, mask=mine, other=0.0)
    c02 = gl.load(comb + 2, mask=mine, other=0.0)
    c03 = gl.load(comb + 3, mask=mine, other=0.0)
    c10 = gl.load(comb + 4, mask=mine, other=0.0)
    c11 = gl.load(comb + 5, mask=mine, other=0.0)
    c12 = gl.load(comb + 6, mask=mine, other=0.0)
    c13 = gl.load(comb + 7, mask=mine, other=0.0)
    c20 = gl.load(comb + 8, mask=mine, other=0.0)
    c21 = gl.load(comb + 9, mask=mine, other=0.0)
    c22 = gl.load(comb + 10, mask=mine, other=0.0)
    c23 = gl.load(comb + 11, mask=mine, other=0.0)
    c30 = gl.load(comb + 12, mask=mine, other=0.0)
    c31 = gl.load(comb + 13, mask=mine, other=0.0)
    c32 = gl.load(comb + 14, mask=mine, other=0.0)
    c33 = gl.load(comb + 15, mask=mine, other=0.0)
    post = post_ptr + token.to(gl.int64) * 4
    p0 = gl.load(post, mask=mine, other=0.0)
    p1 = gl.load(post + 1, mask=mine, other=0.0)
    p2 = gl.load(post + 2, mask=mine, other=0.0)
    p3 = gl.load(post + 3, mask=mine, other=0.0)
    pre = pre_ptr + token.to(gl.int64) * 4
    q0 = gl.load(pre, mask=mine, other=0.0)
    q1 = gl.load(pre + 1, mask=mine, other=0.0)
    q2 = gl.load(pre + 2, mask=mine, other=0.0)
    q3 = gl.load(pre + 3, mask=mine, other=0.0)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, EL))
    row_at = row_ptr + token.to(gl.int64)[:, None] * width + first * 64 + column[None, :]
    z = gl.full([64, 64], 0.0, gl.float32, ACC)
    squares = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, EL))
    row_squares = gl.full([64], 0.0, gl.float64, gl.SliceLayout(1, EL))
    for turn in range(count):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        x0 = x_s.index(slot * 4).load(EL).to(gl.float32)
        x1 = x_s.index(slot * 4 + 1).load(EL).to(gl.float32)
        x2 = x_s.index(slot * 4 + 2).load(EL).to(gl.float32)
        x3 = x_s.index(slot * 4 + 3).load(EL).to(gl.float32)
        y = y_s.index(slot).load(EL).to(gl.float32)
        new = _mixed(x0, x1, x2, x3, y, c00, c10, c20, c30, p0)
        x_s.index(slot * 4).store(new)
        wide = new.to(gl.float32)
        total = q0[:, None] * wide
        sq = wide * wide
        new = _mixed(x0, x1, x2, x3, y, c01, c11, c21, c31, p1)
        x_s.index(slot * 4 + 1).store(new)
        wide = new.to(gl.float32)
        total = total + q1[:, None] * wide
        sq = gl.fma(wide, wide, sq)
        new = _mixed(x0, x1, x2, x3, y, c02, c12, c22, c32, p2)
        x_s.index(slot * 4 + 2).store(new)
        wide = new.to(gl.float32)
        total = total + q2[:, None] * wide
        sq = gl.fma(wide, wide, sq)
        new = _mixed(x0, x1, x2, x3, y, c03, c13, c23, c33, p3)
        x_s.index(slot * 4 + 3).store(new)
        wide = new.to(gl.float32)
        total = total + q3[:, None] * wide
        sq = gl.fma(wide, wide, sq)
        row = half(total)
        gl.store(row_at + turn * 64, row, mask=mine[:, None])
        squares += gl.sum(sq, axis=1)
        long = row.to(gl.float64)
        row_squares += gl.sum(long * long, axis=1)
        fence_async_shared()
        barrier()
        at = (first + turn) * 64
        for s in gl.static_range(4):
            tma.async_copy_shared_to_global(out_desc, [tile * 64, s * width + at], x_s.index(slot * 4 + s))
        for s in gl.static_range(4):
            lead, rest = _fn(fn_ptr, width, s * width + at)
            z = warpgroup_mma(lead, x_s.index(slot * 4 + s).permute((1, 0)), z)
            z = warpgroup_mma(rest, x_s.index(slot * 4 + s).permute((1, 0)), z)
        barrier()
        tma.store_wait(0)
        barrier()
        more = turn + STAGES < count
        mbarrier.expect(bars.index(slot), 5 * 8192, pred=more)
        for s in gl.static_range(4):
            tma.async_copy_global_to_shared(
                x_desc,
                [tile * 64, s * width + at + STAGES * 64],
                bars.index(slot),
                x_s.index(slot * 4 + s),
                pred=more,
            )
        tma.async_copy_global_to_shared(
            y_desc, [tile * 64, at + STAGES * 64], bars.index(slot), y_s.index(slot), pred=more
        )
    # z [32, 64] of this split, sums of squares
    both = gl.sum(gl.reshape(z, [2, 32, 64]), axis=0)
    HALF: gl.constexpr = both.type.layout
    m = gl.arange(0, 32, layout=gl.SliceLayout(1, HALF))
    t = gl.arange(0, 64, layout=gl.SliceLayout(0, HALF))
    group = (tile * SPLITS + split) * 64
    gl.store(part_ptr + group.to(gl.int64) * 32 + m[:, None] * 64 + t[None, :], both, mask=(m < 24)[:, None])
    local = gl.arange(0, 64, layout=gl.SliceLayout(1, EL))
    gl.store(part_ptr + group.to(gl.int64) * 32 + 31 * 64 + local, squares)
    gl.store(rows_ptr + group + local, row_squares)
    meet(count_ptr + tile, SPLITS)
    # norm of this split's channels
    total64 = gl.full([64], 0.0, gl.float64, gl.SliceLayout(1, EL))
    for s in range(SPLITS):
        total64 += gl.load(rows_ptr + (tile * SPLITS + s) * 64 + local, cache_modifier=".cg")
    factor = 1.0 / gl.sqrt(total64 / width + eps)
    high = factor.to(gl.float32)
    low = (factor - high.to(gl.float64)).to(gl.float32)
    for turn2 in range(count):
        row = gl.load(row_at + turn2 * 64, mask=mine[:, None], other=0.0).to(gl.float32)
        weight = gl.load(norm_ptr + (first + turn2) * 64 + column).to(gl.float32)
        p = row * weight[None, :]
        gl.store(
            row_at + turn2 * 64,
            half(gl.fma(p, gl.where(mine[:, None], high[:, None], p), p * low[:, None])),
            mask=mine[:, None],
        )
    # mixes of TS tokens
    PL: gl.constexpr = parts_layout(SP2, TS)
    s2 = gl.arange(0, SP2, layout=gl.SliceLayout(1, PL))
    t2 = split * TS + gl.arange(0, TS, layout=gl.SliceLayout(0, PL))
    if split * TS < 64:
        at2 = ((tile * SPLITS + s2) * 2048)[:, None] + t2[None, :]
        ok = (s2 < SPLITS)[:, None] & (t2 < 64)[None, :]
        rms = 1.0 / gl.sqrt(_sum(part_ptr + 31 * 64, at2, ok) / (4 * width) + mix_eps)
        scale0 = gl.load(scale_ptr)
        scale1 = gl.load(scale_ptr + 1)
        scale2 = gl.load(scale_ptr + 2)
        goal = tile * 64 + t2
        keep = (goal < tokens) & (t2 < 64)
        goal = goal.to(gl.int64)
        for j in gl.static_range(4):
            g = _sig(_sum(part_ptr + j * 64, at2, ok) * rms * scale0 + gl.load(base_ptr + j)) + hc_eps
            gl.store(new_pre_ptr + goal * 4 + j, g, mask=keep)
        for j in gl.static_range(4):
            g = 2.0 * _sig(_sum(part_ptr + (4 + j) * 64, at2, ok) * rms * scale1 + gl.load(base_ptr + 4 + j))
            gl.store(new_post_ptr + goal * 4 + j, g, mask=keep)
        rms = rms * scale2
        a0 = _sum(part_ptr + 8 * 64, at2, ok) * rms + gl.load(base_ptr + 8)
        a1 = _sum(part_ptr + 9 * 64, at2, ok) * rms + gl.load(base_ptr + 9)
        a2 = _sum(part_ptr + 10 * 64, at2, ok) * rms + gl.load(base_ptr + 10)
        a3 = _sum(part_ptr + 11 * 64, at2, ok) * rms + gl.load(base_ptr + 11)
        b0 = _sum(part_ptr + 12 * 64, at2, ok) * rms + gl.load(base_ptr + 12)
        b1 = _sum(part_ptr + 13 * 64, at2, ok) * rms + gl.load(base_ptr + 13)
        b2 = _sum(part_ptr + 14 * 64, at2, ok) * rms + gl.load(base_ptr + 14)
        b3 = _sum(part_ptr + 15 * 64, at2, ok) * rms + gl.load(base_ptr + 15)
        c0 = _sum(part_ptr + 16 * 64, at2, ok) * rms + gl.load(base_ptr + 16)
        c1 = _sum(part_ptr + 17 * 64, at2, ok) * rms + gl.load(base_ptr + 17)
        c2 = _sum(part_ptr + 18 * 64, at2, ok) * rms + gl.load(base_ptr + 18)
        c3 = _sum(part_ptr + 19 * 64, at2, ok) * rms + gl.load(base_ptr + 19)
        d0 = _sum(part_ptr + 20 * 64, at2, ok) * rms + gl.load(base_ptr + 20)
        d1 = _sum(part_ptr + 21 * 64, at2, ok) * rms + gl.load(base_ptr + 21)
        d2 = _sum(part_ptr + 22 * 64, at2, ok) * rms + gl.load(base_ptr + 22)
        d3 = _sum(part_ptr + 23 * 64, at2, ok) * rms + gl.load(base_ptr + 23)
        a0, a1, a2, a3 = _soft(a0, a1, a2, a3, hc_eps)
        b0, b1, b2, b3 = _soft(b0, b1, b2, b3, hc_eps)
        c0, c1, c2, c3 = _soft(c0, c1, c2, c3, hc_eps)
        d0, d1, d2, d3 = _soft(d0, d1, d2, d3, hc_eps)
        a0, b0, c0, d0 = _even(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _even(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _even(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _even(a3, b3, c3, d3, hc_eps)
        for _ in range(rounds - 1):
            a0, a1, a2, a3 = _even(a0, a1, a2, a3, hc_eps)
            b0, b1, b2, b3 = _even(b0, b1, b2, b3, hc_eps)
            c0, c1, c2, c3 = _even(c0, c1, c2, c3, hc_eps)
            d0, d1, d2, d3 = _even(d0, d1, d2, d3, hc_eps)
            a0, b0, c0, d0 = _even(a0, b0, c0, d0, hc_eps)
            a1, b1, c1, d1 = _even(a1, b1, c1, d1, hc_eps)
            a2, b2, c2, d2 = _even(a2, b2, c2, d2, hc_eps)
            a3, b3, c3, d3 = _even(a3, b3, c3, d3, hc_eps)
        out = new_comb_ptr + goal * 16
        gl.store(out, a0, mask=keep)
        gl.store(out + 1, a1, mask=keep)
        gl.store(out + 2, a2, mask=keep)
        gl.store(out + 3, a3, mask=keep)
        gl.store(out + 4, b0, mask=keep)
        gl.store(out + 5, b1, mask=keep)
        gl.store(out + 6, b2, mask=keep)
        gl.store(out + 7, b3, mask=keep)
        gl.store(out + 8, c0, mask=keep)
        gl.store(out + 9, c1, mask=keep)
        gl.store(out + 10, c2, mask=keep)
        gl.store(out + 11, c3, mask=keep)
        gl.store(out + 12, d0, mask=keep)
        gl.store(out + 13, d1, mask=keep)
        gl.store(out + 14, d2, mask=keep)
        gl.store(out + 15, d3, mask=keep)
    for j in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(j))


def sublayer(
    given: tuple[torch.Tensor, ...],
    result: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]],
    tokens: int,
    eps: float,
    mix_eps: float,
    hc_eps: float,
    rounds: int,
) -> None:
    """Fills result = (X', row, (pre, post, comb)); given = x, y, post, comb, pre, norm weight, X', row, fn,
    scale, base.
    """
    x, y, post, comb, pre, norm, out, row, fn, scale, base = given
    width = x.shape[2]
    tiles = triton.cdiv(tokens, 64)
    splits = 4
    while splits < 32 and tiles * splits < 200:
        splits *= 2
    part = torch.empty(tiles * splits, 32, 64, dtype=torch.float32, device=x.device)
    rows = torch.empty(tiles * splits, 64, dtype=torch.float64, device=x.device)
    streams, goal = (
        TensorDescriptor.from_tensor(t.view(tokens, 4 * width), [64, 64], TILE.value) for t in (x, out)
    )
    sublayer_tiles[(splits, tiles)](
        streams, TensorDescriptor.from_tensor(y, [64, 64], TILE.value), goal, post, comb, pre, norm, row, fn,
        scale, base, part, rows, counters(x.device.index or 0), *result[2], tokens, width, eps, mix_eps,
        hc_eps, rounds, splits, splits, 64 // splits, 2, num_warps=4, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
