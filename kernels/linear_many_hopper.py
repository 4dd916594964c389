# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of 17 tokens and more on Hopper: tokens are wgmma's rows, rows of weights its columns, and the
activations come quantised.

Weights and activations go from memory to wgmma as they are. A step of the FP8 product takes 32 channels, just
one scale group: it has a sum of its own, which fp32 multiplies by both scales and adds, one sum being
multiplied while the next is computed. A thread has two tokens' scales and one for every 32 rows of weights.

Channels are shared out over the SPLITS programs of a cluster, each of which adds the parts of some rows.
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.codes_hopper import FLAT, FLAT2, TILE8, fetch_words, power, power_of_two
from cedar.kernels.grid_hopper import barrier, fetch_descriptor, grid_release, grid_wait
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
def written(warps, rows):
    """[tokens, rows] bf16, eight neighbouring rows a thread."""
    return gl.BlockedLayout([1, 8], [256 // rows, rows // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def share_of(r, splits):
    """Of a sum's r rows, eights of which each of `splits` programs adds the parts."""
    return (r // 8 + splits - 1) // splits


@gluon.constexpr_function
def area_of(m, r, splits):
    """Bytes of a cluster's area: a part of each program, and a barrier."""
    return splits * m * share_of(r, splits) * 32 + 16


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
def fours(sum, M: gl.constexpr, R: gl.constexpr):
    """wgmma's sum [M, R] as its threads hold it, [R / 8, 8 M]: four values in a row each."""
    parts = gl.reshape(sum, [M // 16, 2, 8, R // 8, 4, 2])
    return gl.reshape(gl.permute(parts, (3, 0, 2, 4, 1, 5)), [R // 8, 8 * M])


@gluon.jit
def unfold(values, M: gl.constexpr, R: gl.constexpr):
    """`fours` undone."""
    parts = gl.reshape(values, [R // 8, M // 16, 8, 4, 2, 2])
    return gl.reshape(gl.permute(parts, (1, 4, 2, 0, 3, 5)), [M, R])


@gluon.jit
def add_parts(
    total, area, out_ptr, tokens, outputs, row, token, split, mine, SPLITS: gl.constexpr, M: gl.constexpr,
    R: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Sends a sum [M, R] to the programs of the cluster, `mine` eights of rows of which this one adds and
    writes; area: as `area_of` says.
    """
    SHARE: gl.constexpr = share_of(R, SPLITS)
    PART: gl.constexpr = M * SHARE * 32
    held = fours(total, M, R)
    F: gl.constexpr = held.type.layout
    c8 = gl.arange(0, R // 8, layout=gl.SliceLayout(1, F))
    i8 = gl.arange(0, 8 * M, layout=gl.SliceLayout(0, F))
    offset = split * PART + (c8 % SHARE * (32 * M))[:, None] + (i8 * 4)[None, :]
    whose = (token + i8 // 128 * 16 < tokens)[None, :] & (offset >= 0)
    rank = (c8 // SHARE)[:, None] + offset * 0
    cluster.send_fours(area, area + SPLITS * PART, held, offset, rank, split, whose)
    barrier()
    if mine > 0:
        WIDE: gl.constexpr = power_of_two(SHARE)
        H: gl.constexpr = sums(WARPS, M, 8 * WIDE)
        E: gl.constexpr = fours(gl.full([M, 8 * WIDE], 0.0, gl.float32, H), M, 8 * WIDE).type.layout
        c9 = gl.minimum(gl.arange(0, WIDE, layout=gl.SliceLayout(1, E)), SHARE - 1)
        i9 = gl.arange(0, 8 * M, layout=gl.SliceLayout(0, E))
        at = area + (c9 * (32 * M))[:, None] + (i9 * 4)[None, :]
        cluster.received(area + SPLITS * PART)
        whole = cluster.pull(at)
        for s in gl.static_range(1, SPLITS):
            whole += cluster.pull(at + s * PART)
        r7 = gl.arange(0, 8 * WIDE, layout=gl.SliceLayout(0, H))
        t7 = token + gl.arange(0, M, layout=gl.SliceLayout(1, H))
        target = out_ptr + t7[:, None].to(gl.int64) * outputs + (row + split * (8 * SHARE) + r7)[None, :]
        half = gl.convert_layout(unfold(whole, M, 8 * WIDE), H).to(gl.bfloat16)
        if R % (8 * SHARE * SPLITS) == 0 and WIDE == SHARE:
            gl.store(target, half, mask=(t7 < tokens)[:, None])
        else:
            gl.store(target, half, mask=(t7 < tokens)[:, None] & (r7 // 8 < mine)[None, :])


@gluon.jit
def many(
    w_desc, x_desc, word_ptr, scale_ptr, out_ptr, tokens, outputs,
    COLUMNS: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, outputs / R, ceil(tokens / M)): NB blocks of 128 channels a program, STAGES of them
    on their way.
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    W: gl.constexpr = sums(WARPS, M, R)
    split = gl.program_id(0)
    row = gl.program_id(1) * R
    token = gl.program_id(2) * M
    if SPLITS > 1:
        SHARE: gl.constexpr = share_of(R, SPLITS)
        PART: gl.constexpr = M * SHARE * 32
        area = cluster.area(area_of(M, R, SPLITS))
        mine = gl.minimum(R // 8 - split * SHARE, SHARE)
        sent = gl.minimum((tokens - token + 15) // 16 * 16, M) * ((SPLITS - 1) * 32) * mine
        cluster.expect(area + SPLITS * PART, sent if mine > 0 else 0)
        if EARLY:
            cluster.arrive_ready()
        else:  # its fence keeps weights back until the launch before has asked for more of its own
            cluster.arrive()
    first = split * NB
    count = gl.minimum(NB, BLOCKS - first)
    S: gl.constexpr = gl.BlockedLayout([1, R // 32], [32, 1], [WARPS, 1], [1, 0])
    b4 = gl.arange(0, power_of_two(NB), layout=gl.SliceLayout(1, S))
    g4 = gl.arange(0, R // 32, layout=gl.SliceLayout(0, S))
    at4 = ((row // 32 + g4) * BLOCKS)[None, :] + gl.minimum(first + b4, BLOCKS - 1)[:, None]
    words = gl.load(scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at4)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], TILE8)
    sw_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), R // 32], FLAT)
    sx_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), M], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), (R + M) * 128, pred=i < count)
        tma.async_copy_global_to_shared(
            w_desc, [row, (first + i) * 128], bars.index(i), w_s.index(i), pred=i < count
        )
    fetch_descriptor("many_param_5")
    if EARLY:
        grid_release()
    grid_wait()
    if not EARLY:
        grid_release()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_desc, [token, (first + i) * 128], bars.index(i), x_s.index(i), pred=i < count
        )
    sw_s._reinterpret(gl.int32, [power_of_two(NB), R // 32], FLAT2).store(words)
    fetch_words(sx_s, word_ptr, first, count, token, tokens, NB, M, M, 0, 1, BLOCKS, WARPS)
    barrier()
    a = gl.full([M, R], 0.0, gl.float32, W)
    d = a
    acc = gl.reshape(a, [M, R // 32, 32])
    C: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    for turn in range(count):
        slot = turn % STAGES
        sx = sx_s.index(turn).load(gl.SliceLayout(1, C))
        sw = sw_s.index(turn).load(gl.SliceLayout(0, C))
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        x = x_s.index(slot)
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
            more = next < count
            mbarrier.expect(bars.index(slot), (R + M) * 128, pred=more)
            tma.async_copy_global_to_shared(
                w_desc, [row, (first + next) * 128], bars.index(slot), w_s.index(slot), pred=more
            )
            tma.async_copy_global_to_shared(
                x_desc, [token, (first + next) * 128], bars.index(slot), x_s.index(slot), pred=more
            )
        acc = scaled(acc, d, sx, sw, 3, M, R)
    total = gl.convert_layout(gl.reshape(acc, [M, R]), W)
    if SPLITS == 1:
        J: gl.constexpr = written(WARPS, R)
        r3 = row + gl.arange(0, R, layout=gl.SliceLayout(0, J))
        t3 = token + gl.arange(0, M, layout=gl.SliceLayout(1, J))
        goal = out_ptr + t3[:, None].to(gl.int64) * outputs + r3[None, :]
        gl.store(goal, gl.convert_layout(total.to(gl.bfloat16), J), mask=(t3 < tokens)[:, None])
    else:
        cluster.wait()
        add_parts(total, area, out_ptr, tokens, outputs, row, token, split, mine, SPLITS, M, R, WARPS)
