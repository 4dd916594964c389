# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of 17 tokens and more on Hopper: tokens are wgmma's rows, rows of weights its columns, and the
activations come quantised.

Weights and activations go from memory to wgmma as they are. A step of the FP8 product takes 32 channels, just
one scale group: it has a sum of its own, which fp32 multiplies by both scales and adds, one sum being
multiplied while the next is computed. A thread has two tokens' scales and one for every 32 rows of weights.

Channels are shared out over SPLITS programs: those of a cluster, each of which adds the parts of some tokens,
or, where their parts do not fit shared memory, programs that wait for one another (`meet`).
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.codes_hopper import FLAT, FLAT2, TILE8, power, power_of_two
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, meet
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def sums(warps, m, r):
    """wgmma's sum [m tokens, r rows]."""
    down = min(warps, m // 16)
    across = warps // down
    return gl.NVMMADistributedLayout([3, 0], [down, across], [16, r // across, 32])


@gluon.constexpr_function
def joined(warps, rows):
    """[tokens, rows] fp32, four neighbouring rows a thread."""
    return gl.BlockedLayout([1, 4], [max(1, 128 // rows), min(32, rows // 4)], [warps, 1], [1, 0])


@gluon.constexpr_function
def written(warps, rows):
    """[tokens, rows] bf16, eight neighbouring rows a thread."""
    return gl.BlockedLayout([1, 8], [256 // rows, rows // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def tokens_each(m, splits):
    """Tokens of which each of `splits` programs adds the parts."""
    return (m + splits - 1) // splits


@gluon.constexpr_function
def area_of(m, r, splits):
    """Bytes of a cluster's area: a part of each program for each token; rows apart by 8 words more, so that
    a warp's eight tokens meet different banks.
    """
    return splits * tokens_each(m, splits) * (r + 8) * 4


@gluon.jit
def part(x, w, k: gl.constexpr, spent):
    """Group k's sum, on its way."""
    return warpgroup_mma(
        x.slice(32 * k, 32, dim=1), w.slice(32 * k, 32, dim=1).permute((1, 0)), spent, use_acc=False,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def scaled(acc, sum, sx, sw, k: gl.constexpr, M: gl.constexpr, R: gl.constexpr):
    """acc [M, R / 32, 32] and group k's sum [M, R] times its scales: a word a token, one for 32 rows."""
    s = power(sx, k)[:, None] * power(sw, k)[None, :]
    return acc + gl.reshape(sum, [M, R // 32, 32]) * s[:, :, None]


@gluon.jit
def many(
    w_desc, x_desc, word_ptr, scale_ptr, out_ptr, part_ptr, count_ptr, tokens, outputs,
    COLUMNS: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr, XSTAGES: gl.constexpr, WARPS: gl.constexpr, CLUSTER: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, outputs / R, ceil(tokens / M)): NB blocks of 128 channels a program; STAGES of weights
    and XSTAGES of activations are on their way.
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    TC: gl.constexpr = tokens_each(M, SPLITS)
    STRIDE: gl.constexpr = (R + 8) * 4
    W: gl.constexpr = sums(WARPS, M, R)
    split = gl.program_id(0)
    if CLUSTER:
        area = cluster.area(area_of(M, R, SPLITS))
        cluster.arrive()
    row = gl.program_id(1) * R
    token = gl.program_id(2) * M
    first = split * NB
    count = gl.minimum(NB, BLOCKS - first)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [XSTAGES, M, 128], TILE8)
    sw_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), R // 32], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    xbars = gl.allocate_shared_memory(gl.int64, [XSTAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(XSTAGES):
        mbarrier.init(xbars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), R * 128, pred=i < count)
        tma.async_copy_global_to_shared(
            w_desc, [row, (first + i) * 128], bars.index(i), w_s.index(i), pred=i < count
        )
    S: gl.constexpr = gl.BlockedLayout([1, R // 32], [32, 1], [WARPS, 1], [1, 0])
    b4 = gl.arange(0, power_of_two(NB), layout=gl.SliceLayout(1, S))
    g4 = gl.arange(0, R // 32, layout=gl.SliceLayout(0, S))
    at4 = ((row // 32 + g4) * BLOCKS)[None, :] + gl.minimum(first + b4, BLOCKS - 1)[:, None]
    words = gl.load(scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at4)
    sw_s._reinterpret(gl.int32, [power_of_two(NB), R // 32], FLAT2).store(words)
    if EARLY:
        grid_release()
    grid_wait()
    if not EARLY:
        grid_release()
    for i in gl.static_range(XSTAGES):
        mbarrier.expect(xbars.index(i), M * 128, pred=i < count)
        tma.async_copy_global_to_shared(
            x_desc, [token, (first + i) * 128], xbars.index(i), x_s.index(i), pred=i < count
        )
    barrier()
    a = gl.full([M, R], 0.0, gl.float32, W)
    d = a
    acc = gl.reshape(a, [M, R // 32, 32])
    C: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    t = gl.minimum(token + gl.arange(0, M, layout=gl.SliceLayout(1, C)), tokens - 1)
    word_at = word_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + t * BLOCKS + first
    ahead = gl.load(word_at)
    for turn in range(count):
        slot = turn % STAGES
        xslot = turn % XSTAGES
        sx = ahead
        ahead = gl.load(word_at + gl.minimum(turn + 1, count - 1))
        sw = sw_s.index(turn).load(gl.SliceLayout(0, C))
        mbarrier.wait(xbars.index(xslot), (turn // XSTAGES) & 1)
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        x = x_s.index(xslot)
        w = w_s.index(slot)
        p = part(x, w, 0, a)
        q = part(x, w, 1, d)
        a, q = warpgroup_mma_wait(1, deps=[p, q])
        acc = scaled(acc, a, sx, sw, 0, M, R)
        p = part(x, w, 2, a)
        d, p = warpgroup_mma_wait(1, deps=[q, p])
        acc = scaled(acc, d, sx, sw, 1, M, R)
        q = part(x, w, 3, d)
        a, q = warpgroup_mma_wait(1, deps=[p, q])
        acc = scaled(acc, a, sx, sw, 2, M, R)
        d = warpgroup_mma_wait(0, deps=[q])
        barrier()
        if NB > STAGES:
            next = turn + STAGES
            mbarrier.expect(bars.index(slot), R * 128, pred=next < count)
            tma.async_copy_global_to_shared(
                w_desc, [row, (first + next) * 128], bars.index(slot), w_s.index(slot), pred=next < count
            )
        if NB > XSTAGES:
            xnext = turn + XSTAGES
            mbarrier.expect(xbars.index(xslot), M * 128, pred=xnext < count)
            tma.async_copy_global_to_shared(
                x_desc, [token, (first + xnext) * 128], xbars.index(xslot), x_s.index(xslot),
                pred=xnext < count,
            )  # fmt: skip
        acc = scaled(acc, d, sx, sw, 3, M, R)
    total = gl.convert_layout(gl.reshape(acc, [M, R]), W)
    r2 = gl.arange(0, R, layout=gl.SliceLayout(0, W))
    t2 = gl.arange(0, M, layout=gl.SliceLayout(1, W))
    if SPLITS == 1:
        J: gl.constexpr = written(WARPS, R)
        r3 = row + gl.arange(0, R, layout=gl.SliceLayout(0, J))
        t3 = token + gl.arange(0, M, layout=gl.SliceLayout(1, J))
        goal = out_ptr + t3[:, None].to(gl.int64) * outputs + r3[None, :]
        gl.store(goal, gl.convert_layout(total.to(gl.bfloat16), J), mask=(t3 < tokens)[:, None])
    else:
        K: gl.constexpr = joined(WARPS, R)
        r5 = gl.arange(0, R, layout=gl.SliceLayout(0, K))
        t5 = gl.arange(0, power_of_two(TC), layout=gl.SliceLayout(1, K))
        t6 = token + split * TC + t5
        mine = ((t6 < tokens) & (t5 < TC) & (split * TC + t5 < M))[:, None]
        if CLUSTER:
            offset = ((split * TC + t2 % TC) * STRIDE)[:, None] + (r2 * 4)[None, :]
            cluster.wait()
            cluster.push_pairs(
                area, total, offset, (t2 // TC)[:, None] + offset * 0,
                (token + t2 < tokens)[:, None] & (offset >= 0),
            )  # fmt: skip
            cluster.arrive()
            cluster.wait()
            at = area + (gl.minimum(t5, TC - 1) * STRIDE)[:, None] + (r5 * 4)[None, :]
            whole = cluster.pull(at)
            for s in gl.static_range(1, SPLITS):
                whole += cluster.pull(at + s * (TC * STRIDE))
        else:
            cell = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
            parts = part_ptr + cell.to(gl.int64) * (SPLITS * M * R)
            gl.store(
                parts + split * (M * R) + t2[:, None] * R + r2[None, :], total,
                mask=(token + t2 < tokens)[:, None],
            )  # fmt: skip
            meet(count_ptr + cell, SPLITS)
            source = parts + (split * TC + t5)[:, None] * R + r5[None, :]
            whole = gl.load(source, mask=mine, other=0.0, cache_modifier=".cg")
            for s in gl.static_range(1, SPLITS):
                whole += gl.load(source + s * (M * R), mask=mine, other=0.0, cache_modifier=".cg")
        goal = out_ptr + t6[:, None].to(gl.int64) * outputs + (row + r5)[None, :]
        gl.store(goal, whole.to(gl.bfloat16), mask=mine)
