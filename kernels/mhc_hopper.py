# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A sublayer's boundary and mix for some hundred tokens on Hopper, one launch: streams read once and written
once (spec §6).

A program takes a tile of 64 tokens and a share of the channels, 64 at a time: streams come by bulk copies,
are expanded in place and leave by bulk copies, and meanwhile are wgmma's left operand; the projection, split
into three exact bf16 parts in shared memory, is the right one. The programs of a tile then meet: each norms
its own channels and turns the sums of some tokens into pre, post and comb.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from cedar.kernels.grid_hopper import barrier, counters, grid_release, grid_wait, half, meet
from cedar.kernels.mhc_mix_hopper import mixes, part_sums, parts_layout
from cedar.kernels.prepared import Prepared
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
STAGES = 2
WARPS = 8
ROWS = 64  # tokens of a tile


@cache
def plan(tokens: int, width: int) -> int:
    """The shares a tile's channels are split into: one program a multiprocessor."""
    shares: int = min(width // 64, max(4, min(40, 132 // triton.cdiv(tokens, ROWS))))
    return shares


@gluon.constexpr_function
def _sub_layout(NW):
    """[4 NW, 64]: eight neighbouring channels a thread, eight threads a row."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[4 << i, 0] for i in range(NW.bit_length() - 1)],
        [],
        [4 * NW, 64],
    )


@gluon.constexpr_function
def _held_layout(NI, NW):
    """[NI, 4 NW, 8]: what each thread sums, by turn of the inner loop."""
    return gl.DistributedLinearLayout(
        [[1 << i, 0, 0] for i in range(NI.bit_length() - 1)],
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0]],
        [[0, 4 << i, 0] for i in range(NW.bit_length() - 1)],
        [],
        [NI, 4 * NW, 8],
    )


@gluon.constexpr_function
def fn_layout(NW):
    """[32, 64] of the projection."""
    rows = [[4, 0], [8, 0], [16, 0]]
    n = NW.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *rows[n:]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        rows[:n],
        [],
        [32, 64],
    )


@gluon.constexpr_function
def acc_layout(N, T, NW):
    """[T, N] sums of a product."""
    return gl.NVMMADistributedLayout([3, 0], [T // 16, NW * 16 // T], [16, N * T // (NW * 16), 16])


@gluon.jit
def _stores_done():
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _upper(v):
    return (v.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def put_parts(v, wide_s, rest_s):
    """The three bf16 parts of fp32 v [32, 64]: wide's rows 0-31 and 32-63, and rest."""
    lead = _upper(v)
    left = v - lead
    mid = _upper(left)
    wide_s.slice(0, 32, dim=0).store(half(lead))
    wide_s.slice(32, 32, dim=0).store(half(mid))
    rest_s.store(half(left - mid))


@gluon.jit
def write_codes(x, out_ptr, scale_ptr, row, at, tokens, width, R: gl.constexpr):
    """bf16 x [R, 64] as E4M3 bytes and a scale byte for 32 channels, from row `row` and channel `at` on."""
    groups = gl.reshape(x.to(gl.float32), [R, 2, 32])
    G: gl.constexpr = groups.type.layout
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    down = ((254 - gl.convert_layout(code, gl.SliceLayout(2, G))[:, :, None]) << 23).to(
        gl.float32, bitcast=True
    )
    byte = (groups * down).to(gl.float8e4nv)  # the conversion saturates
    token = row + gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, G)))
    group = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, G)))
    channel = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, G)))
    inside = (token < tokens)[:, None]
    place = token.to(gl.int64)[:, None] * width + at + group[None, :] * 32
    gl.store(
        out_ptr + place[:, :, None] + channel[None, None, :],
        byte,
        mask=inside[:, :, None] & (channel >= 0)[None, None, :],
    )
    C: gl.constexpr = code.type.layout
    token = row + gl.arange(0, R, layout=gl.SliceLayout(1, C))
    group = at // 32 + gl.arange(0, 2, layout=gl.SliceLayout(0, C))
    gl.store(
        scale_ptr + token.to(gl.int64)[:, None] * (width // 32) + group[None, :],
        code.to(gl.uint8),
        mask=(token < tokens)[:, None] & (group >= 0)[None, :],
    )


@gluon.jit
def columns_of(pointer, first, tokens, T: gl.constexpr, K: gl.constexpr, NW: gl.constexpr):
    """K fp32 values of each of T tokens, value by value, [K·T]."""
    at = gl.arange(0, K * T, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    token = first + at % T
    return gl.load(pointer + token.to(gl.int64) * K + at // T, mask=token < tokens, other=0.0)


@gluon.jit
def coefficient(c_s, k: gl.constexpr, i, NI: gl.constexpr, SUB: gl.constexpr):
    """Coefficient k of rows, the i-th of NI parts of a tile's, as a column."""
    return c_s.index(k * NI + i).load(gl.SliceLayout(1, SUB))[:, None]


@gluon.jit
def _new(x0, x1, x2, x3, y, c_s, i, t: gl.constexpr, NI: gl.constexpr, SUB: gl.constexpr):
    new = coefficient(c_s, t, i, NI, SUB) * x0 + coefficient(c_s, 4 + t, i, NI, SUB) * x1
    new = new + coefficient(c_s, 8 + t, i, NI, SUB) * x2
    new = new + coefficient(c_s, 12 + t, i, NI, SUB) * x3
    return half(new + coefficient(c_s, 16 + t, i, NI, SUB) * y)


@gluon.jit(do_not_specialize=["tokens"])
def sublayer_tiles(
    x_desc,
    y_desc,
    out_desc,
    row_desc,
    post_ptr,
    comb_ptr,
    pre_ptr,
    norm_ptr,
    fn_ptr,
    scale_ptr,
    base_ptr,
    codes_ptr,
    code_scale_ptr,
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
    T: gl.constexpr,
    SPLITS: gl.constexpr,
    SP2: gl.constexpr,
    TS: gl.constexpr,
    STAGES: gl.constexpr,
    NW: gl.constexpr,
    CODES: gl.constexpr,
):
    """Grid (SPLITS, ceil(tokens / T))."""
    SUB: gl.constexpr = _sub_layout(NW)
    R: gl.constexpr = 4 * NW
    NI: gl.constexpr = T // R
    HELD: gl.constexpr = _held_layout(NI, NW)
    FL: gl.constexpr = fn_layout(NW)
    A32: gl.constexpr = acc_layout(32, T, NW)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    SLOTS: gl.constexpr = STAGES * 5
    split = gl.program_id(0)
    tile = gl.program_id(1)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, T, 64], TILE)
    sub_s = x_s._reinterpret(gl.bfloat16, [SLOTS * NI, R, 64], TILE)
    wide_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], TILE)
    rest_s = gl.allocate_shared_memory(gl.bfloat16, [4, 32, 64], TILE)
    c_s = gl.allocate_shared_memory(gl.float32, [32 * T], FLAT)
    line_s = c_s._reinterpret(gl.float32, [32, T], FLAT)
    row_s = c_s._reinterpret(gl.float32, [32 * NI, R], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    back = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(back.index(i), count=1)
    fence_async_shared()
    barrier()
    blocks = width // 64
    first = split * blocks // SPLITS
    count = (split + 1) * blocks // SPLITS - first
    grid_wait()
    grid_release()
    for i in range(STAGES):
        some = i < count
        mbarrier.expect(bars.index(i), 5 * 128 * T, pred=some)
        for s in range(4):
            tma.async_copy_global_to_shared(
                x_desc,
                [tile * T, s * width + (first + i) * 64],
                bars.index(i),
                x_s.index(i * 5 + s),
                pred=some,
            )
        tma.async_copy_global_to_shared(
            y_desc, [tile * T, (first + i) * 64], bars.index(i), x_s.index(i * 5 + 4), pred=some
        )
    local = gl.arange(0, T, layout=LINE)
    token = tile * T + local
    mine = token < tokens
    comb = columns_of(comb_ptr, tile * T, tokens, T, 16, NW)
    post = columns_of(post_ptr, tile * T, tokens, T, 4, NW)
    pre = columns_of(pre_ptr, tile * T, tokens, T, 4, NW)
    c_s.slice(0, 16 * T).store(comb)
    c_s.slice(16 * T, 4 * T).store(post)
    c_s.slice(20 * T, 4 * T).store(pre)
    mix = gl.arange(0, 32, layout=gl.SliceLayout(1, FL))
    fc = gl.arange(0, 64, layout=gl.SliceLayout(0, FL))
    known = (mix < 24)[:, None] & (fc >= 0)[None, :]
    fn_at = fn_ptr + mix[:, None] * (4 * width) + first * 64 + fc[None, :]
    za = gl.full([T, 32], 0.0, gl.float32, A32)
    zm = gl.full([T, 32], 0.0, gl.float32, A32)
    zb = gl.full([T, 32], 0.0, gl.float32, A32)
    inner = gl.arange(0, NI, layout=gl.SliceLayout(1, gl.SliceLayout(2, HELD)))
    squares = gl.full([NI, R, 8], 0.0, gl.float32, HELD)
    row_squares = gl.full([NI, R, 8], 0.0, gl.float64, HELD)
    for turn in range(count):
        slot = (turn % STAGES) * 5
        at = fn_at + turn * 64
        v0 = gl.load(at, mask=known, other=0.0)
        v1 = gl.load(at + width, mask=known, other=0.0)
        v2 = gl.load(at + 2 * width, mask=known, other=0.0)
        v3 = gl.load(at + 3 * width, mask=known, other=0.0)
        mbarrier.wait(bars.index(turn % STAGES), (turn // STAGES) & 1)
        for i in range(NI):
            sub = slot * NI + i
            x0 = sub_s.index(sub).load(SUB).to(gl.float32)
            x1 = sub_s.index(sub + NI).load(SUB).to(gl.float32)
            x2 = sub_s.index(sub + 2 * NI).load(SUB).to(gl.float32)
            x3 = sub_s.index(sub + 3 * NI).load(SUB).to(gl.float32)
            y = sub_s.index(sub + 4 * NI).load(SUB).to(gl.float32)
            n0 = _new(x0, x1, x2, x3, y, row_s, i, 0, NI, SUB)
            n1 = _new(x0, x1, x2, x3, y, row_s, i, 1, NI, SUB)
            n2 = _new(x0, x1, x2, x3, y, row_s, i, 2, NI, SUB)
            n3 = _new(x0, x1, x2, x3, y, row_s, i, 3, NI, SUB)
            w0 = n0.to(gl.float32)
            w1 = n1.to(gl.float32)
            w2 = n2.to(gl.float32)
            w3 = n3.to(gl.float32)
            total = coefficient(row_s, 20, i, NI, SUB) * w0 + coefficient(row_s, 21, i, NI, SUB) * w1
            total = total + coefficient(row_s, 22, i, NI, SUB) * w2
            total = total + coefficient(row_s, 23, i, NI, SUB) * w3
            row = half(total)
            sub_s.index(sub).store(n0)
            sub_s.index(sub + NI).store(n1)
            sub_s.index(sub + 2 * NI).store(n2)
            sub_s.index(sub + 3 * NI).store(n3)
            sub_s.index(sub + 4 * NI).store(row)
            sq = gl.fma(w3, w3, gl.fma(w2, w2, gl.fma(w1, w1, w0 * w0)))
            long = row.to(gl.float64)
            now = (inner == i)[:, None, None]
            add = gl.expand_dims(
                gl.convert_layout(gl.sum(gl.reshape(sq, [R, 8, 8]), axis=2), gl.SliceLayout(0, HELD)), 0
            )
            squares += gl.where(now, add, 0.0)
            add64 = gl.expand_dims(
                gl.convert_layout(
                    gl.sum(gl.reshape(long * long, [R, 8, 8]), axis=2), gl.SliceLayout(0, HELD)
                ),
                0,
            )
            row_squares += gl.where(now, add64, 0.0)
        put_parts(v0, wide_s.index(0), rest_s.index(0))
        put_parts(v1, wide_s.index(1), rest_s.index(1))
        put_parts(v2, wide_s.index(2), rest_s.index(2))
        put_parts(v3, wide_s.index(3), rest_s.index(3))
        fence_async_shared()
        barrier()
        where = (first + turn) * 64
        for s in range(4):
            tma.async_copy_shared_to_global(out_desc, [tile * T, s * width + where], x_s.index(slot + s))
        tma.async_copy_shared_to_global(row_desc, [tile * T, where], x_s.index(slot + 4))
        for s in gl.static_range(4):
            za = warpgroup_mma(
                x_s.index(slot + s), wide_s.index(s).slice(0, 32, dim=0).permute((1, 0)), za, is_async=True
            )
            zm = warpgroup_mma(
                x_s.index(slot + s), wide_s.index(s).slice(32, 32, dim=0).permute((1, 0)), zm, is_async=True
            )
            zb = warpgroup_mma(x_s.index(slot + s), rest_s.index(s).permute((1, 0)), zb, is_async=True)
        za, zm, zb = warpgroup_mma_wait(0, deps=(za, zm, zb))
        tma.store_wait(0)
        barrier()
        more = turn + STAGES < count
        ahead = where + STAGES * 64
        bar = bars.index(turn % STAGES)
        mbarrier.expect(bar, 5 * 128 * T, pred=more)
        for s in range(4):
            tma.async_copy_global_to_shared(
                x_desc, [tile * T, s * width + ahead], bar, x_s.index(slot + s), pred=more
            )
        tma.async_copy_global_to_shared(y_desc, [tile * T, ahead], bar, x_s.index(slot + 4), pred=more)
    group = tile * SPLITS + split
    both = (zb + zm) + za
    zt = gl.arange(0, T, layout=gl.SliceLayout(1, both.type.layout))
    zc = gl.arange(0, 32, layout=gl.SliceLayout(0, both.type.layout))
    part = part_ptr + group * (32 * T)
    gl.store(part + zc[None, :] + zt[:, None] * 32, both, mask=(zc < 24)[None, :] & (zt >= 0)[:, None])
    sums = gl.sum(squares, axis=2)
    sums64 = gl.sum(row_squares, axis=2)
    hr = (
        gl.arange(0, NI, layout=gl.SliceLayout(1, sums.type.layout))[:, None] * R
        + gl.arange(0, R, layout=gl.SliceLayout(0, sums.type.layout))[None, :]
    )
    gl.store(part + hr * 32 + 31, sums)
    gl.store(rows_ptr + group * T + hr, sums64)
    _stores_done()
    fence_async_shared()
    barrier()
    for i in range(SLOTS):
        some = i < count
        mbarrier.expect(back.index(i), 128 * T, pred=some)
        tma.async_copy_global_to_shared(
            row_desc, [tile * T, (first + i) * 64], back.index(i), x_s.index(i), pred=some
        )
    meet(count_ptr + tile, SPLITS)
    total64 = gl.full([T], 0.0, gl.float64, LINE)
    for s in range(SPLITS):
        total64 += gl.load(rows_ptr + (tile * SPLITS + s) * T + local, cache_modifier=".cg")
    factor = 1.0 / gl.sqrt(total64 / width + eps)
    big = factor.to(gl.float32)
    line_s.index(0).store(gl.where(mine, big, 1.0))
    line_s.index(1).store((factor - big.to(gl.float64)).to(gl.float32))
    barrier()
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, SUB))
    for turn in range(count):
        slot = turn % SLOTS
        weight = gl.load(norm_ptr + (first + turn) * 64 + column).to(gl.float32)[None, :]
        mbarrier.wait(back.index(slot), (turn // SLOTS) & 1)
        for i in range(NI):
            p = sub_s.index(slot * NI + i).load(SUB).to(gl.float32) * weight
            large = coefficient(row_s, 0, i, NI, SUB) + gl.full([R, 64], 0.0, gl.float32, SUB)
            n = half(gl.fma(p, large, p * coefficient(row_s, 1, i, NI, SUB)))
            sub_s.index(slot * NI + i).store(n)
            if CODES:
                write_codes(
                    n, codes_ptr, code_scale_ptr, tile * T + i * R, (first + turn) * 64, tokens, width, R
                )
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(row_desc, [tile * T, (first + turn) * 64], x_s.index(slot))
        more = (turn > 0) & (turn + SLOTS - 1 < count)
        if more:
            tma.store_wait(1)
            before = (turn + SLOTS - 1) % SLOTS
            mbarrier.expect(back.index(before), 128 * T)
            tma.async_copy_global_to_shared(
                row_desc, [tile * T, (first + turn + SLOTS - 1) * 64], back.index(before), x_s.index(before)
            )
    if split * TS < T:
        PL: gl.constexpr = parts_layout(SP2, TS, NW)
        t2 = split * TS + gl.arange(0, TS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PL)))
        z = part_sums(part_ptr, tile * SPLITS, t2, t2 < T, T, SPLITS, SP2, PL, 8)
        t3 = split * TS + gl.arange(0, TS, layout=gl.SliceLayout(1, z.type.layout))
        whose = gl.where(t3 < T, tile * T + t3, tokens)
        mixes(
            z,
            whose,
            tokens,
            scale_ptr,
            base_ptr,
            new_pre_ptr,
            new_post_ptr,
            new_comb_ptr,
            width,
            mix_eps,
            hc_eps,
            rounds,
            TS,
            NW,
        )
    tma.store_wait(0)
    for j in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(j))
    for j in gl.static_range(SLOTS):
        mbarrier.invalidate(back.index(j))


def sublayer(
    given: tuple[torch.Tensor, ...],
    result: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]],
    codes: Prepared | None,
    tokens: int,
    eps: float,
    mix_eps: float,
    hc_eps: float,
    rounds: int,
) -> None:
    """Fills result = (X', row, (pre, post, comb)), and codes with row in that order.

    given = x, y, post, comb, pre, norm weight, fn, scale, base.
    """
    x, y, post, comb, pre, norm, fn, scale, base = given
    streams, row, mixed = result
    width, device = x.shape[2], x.device
    splits = plan(tokens, width)
    tiles = triton.cdiv(tokens, ROWS)
    part = torch.empty(tiles * splits, ROWS, 32, dtype=torch.float32, device=device)
    squares = torch.empty(tiles * splits, ROWS, dtype=torch.float64, device=device)
    x_desc, out_desc = (
        TensorDescriptor.from_tensor(t.view(tokens, 4 * width), [ROWS, 64], TILE.value) for t in (x, streams)
    )
    y_desc, row_desc = (TensorDescriptor.from_tensor(t, [ROWS, 64], TILE.value) for t in (y, row))
    sublayer_tiles[(splits, tiles)](
        x_desc, y_desc, out_desc, row_desc, post, comb, pre, norm, fn, scale, base,
        *((codes.values, codes.scale) if codes else (row, row)), part, squares, counters(device.index or 0),
        *mixed, tokens, width, eps, mix_eps, hc_eps, rounds, ROWS, splits, triton.next_power_of_2(splits),
        triton.next_power_of_2(triton.cdiv(ROWS, splits)), STAGES, WARPS, codes is not None, num_warps=WARPS,
        enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
