# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of 1 to 16 tokens on Hopper, one launch: rows of weights are wgmma's rows, tokens its columns.
Activations come quantised or are quantised on the way in.

Weights go from memory to wgmma as they are. A step of the FP8 product takes 32 channels, just one scale
group: it has a sum of its own, which fp32 multiplies by both scales and adds. Weights and their scales are
asked for before `grid_wait`, for they are older than the launch before this one.

Channels are shared out over the SPLITS programs of a cluster, each of which then adds the parts of some rows;
or, for one token, over the rows of one tile (KQ): row r of the tile is row r % ROWS of the weights, share
r // ROWS of the channels, the token stands once for every share, and what belongs together is added at the
end.
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.codes_hopper import (
    FLAT,
    FLAT2,
    TILE8,
    fetch_words,
    power,
    power_of_two,
    quantise_into,
)
from cedar.kernels.grid_hopper import barrier, fence_barriers, fetch_descriptor, grid_release, grid_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE83 = gl.constexpr(gl.NVMMASharedLayout(128, 8, 3))
TILE84 = gl.constexpr(gl.NVMMASharedLayout(128, 8, 4))


@gluon.constexpr_function
def sums(warps, n):
    """wgmma's sum [16 warps rows, n tokens]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 32])


@gluon.constexpr_function
def joined(warps, rows):
    """[tokens, rows] fp32, four neighbouring rows a thread."""
    return gl.BlockedLayout([1, 4], [max(1, 128 // rows), min(32, rows // 4)], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_each(rows, splits):
    """Rows of which each of `splits` programs adds the parts: a power of two."""
    return max(4, power_of_two((rows + splits - 1) // splits))


@gluon.constexpr_function
def together(blocks):
    """Blocks of activations that one bulk copy brings, for between two copies stands a barrier. All copies
    bring at most one block too many.
    """
    return min(4 if blocks % 4 in (0, 3) else 2, power_of_two(blocks))


@gluon.constexpr_function
def brought(blocks):
    """Blocks of activations that all copies bring."""
    return (blocks + together(blocks) - 1) // together(blocks) * together(blocks)


@gluon.jit
def _part(w, x, k: gl.constexpr, zero):
    """Group k's sum, on its way."""
    return warpgroup_mma(
        w.slice(32 * k, 32, dim=1), x.slice(32 * k, 32, dim=1).permute((1, 0)), zero, use_acc=False,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def _scaled(acc, part, sw, sx, k: gl.constexpr, WARPS: gl.constexpr, N: gl.constexpr):
    s = power(sw, k)[:, None] * power(sx, k)[None, :]
    return acc + gl.reshape(part, [WARPS, 16, N]) * s[:, None, :]


@gluon.jit
def _none():
    """An empty tuple."""
    return ()


@gluon.jit
def _ask(w_desc, bars, raw, first, row, FROM: gl.constexpr, TO: gl.constexpr):
    """Asks for blocks FROM to TO of the weights, each to the stage of that number."""
    for i in gl.static_range(FROM, TO):
        tma.async_copy_global_to_shared(w_desc, [first + i, 0, row, 0], bars[i], raw[i])


@gluon.jit
def few(
    w_desc, x_desc, x_ptr, word_ptr, scale_ptr, out_ptr, tokens, outputs, x_stride,
    COLUMNS: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    ASKED: gl.constexpr, WARPS: gl.constexpr, KQ: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, outputs / ROWS, ceil(tokens / (N / KQ))): 16 WARPS rows of a tile, NB blocks of 128
    channels a program; those beyond the last are zeros. CODES: activations come quantised.

    Of STAGES blocks of weights ASKED are asked for before `grid_wait`, the others behind activations that
    come quantised. The next launch is let go before that, too, or (not EARLY) when those are there: else its
    weights would stand before them in the memory's queues. AHEAD blocks are multiplied while one is scaled.
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    TALL: gl.constexpr = 16 * WARPS
    ROWS: gl.constexpr = TALL // KQ
    TT: gl.constexpr = N // KQ
    SHARE: gl.constexpr = (BLOCKS + KQ - 1) // KQ
    SHARES: gl.constexpr = BLOCKS // SHARE  # the tile's rows beyond them are zeros
    EACH: gl.constexpr = rows_each(ROWS, SPLITS)
    STRIDE: gl.constexpr = 4 * EACH + 16  # bytes of a token's part in the cluster's area: no bank conflicts
    W: gl.constexpr = sums(WARPS, N)
    split = gl.program_id(0)
    row = gl.program_id(1) * ROWS
    token = gl.program_id(2) * TT
    if SPLITS > 1:
        area = cluster.area(SPLITS * N * STRIDE + 16)
        sent = gl.minimum(tokens - token, N) * (SPLITS * EACH * 4)
        cluster.expect(area + SPLITS * N * STRIDE, sent if split * EACH < ROWS else 0)
        cluster.arrive_ready()
    first = split * NB
    count = gl.minimum(NB, SHARE - first)
    # a word of scales for every 16 rows and block
    S: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WARPS, WARPS], [WARPS, 1], [1, 0])
    block = gl.minimum(gl.arange(0, power_of_two(NB), layout=gl.SliceLayout(1, S)), count - 1)
    r = gl.arange(0, WARPS, layout=gl.SliceLayout(0, S)) * 16
    share = gl.minimum(r // ROWS, SHARES - 1)
    line = (row + r % ROWS) // 32 * BLOCKS + share * SHARE + first
    words = gl.load(scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + line[None, :] + block[:, None])
    raw = _none()  # each an allocation of its own, or a barrier of the program would stand between two copies
    bars = _none()
    for _ in gl.static_range(STAGES):
        raw += (gl.allocate_shared_memory(gl.float8e4nv, [1, KQ, ROWS, 128], TILE84),)
        bars += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    XB: gl.constexpr = together(NB)
    COPIES: gl.constexpr = brought(NB) // XB
    x_s = _none()
    if CODES:
        for _ in gl.static_range(COPIES):
            x_s += (gl.allocate_shared_memory(gl.float8e4nv, [XB, N, 128], TILE83),)
    else:
        x_s = (gl.allocate_shared_memory(gl.float8e4nv, [NB, N, 128], TILE8),)
    sw_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), WARPS], FLAT)
    sx_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), N], FLAT)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars[i], count=1)
    if CODES:
        ready = _none()
        for i in gl.static_range(COPIES):
            ready += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
            mbarrier.init(ready[i], count=1)
    fence_barriers()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars[i], TALL * 128)
    if CODES:
        for i in gl.static_range(COPIES):
            mbarrier.expect(ready[i], XB * N * 128)
    _ask(w_desc, bars, raw, first, row, 0, ASKED if CODES else STAGES)
    if CODES:
        fetch_descriptor("few_param_9")
    if EARLY:
        grid_release()
    grid_wait()
    if CODES:
        for i in gl.static_range(COPIES):
            tma.async_copy_global_to_shared(x_desc, [first + i * XB, token, 0], ready[i], x_s[i])
        _ask(w_desc, bars, raw, first, row, ASKED, STAGES)
        sw_s._reinterpret(gl.int32, [power_of_two(NB), WARPS], FLAT2).store(words)
        fetch_words(sx_s, word_ptr, first, count, token, tokens, NB, N, TT, SHARE, SHARES, BLOCKS, WARPS)
        barrier()
        for i in gl.static_range(COPIES):
            mbarrier.wait(ready[i], 0)
        if not EARLY:
            grid_release()
    else:
        if not EARLY:
            grid_release()
        sw_s._reinterpret(gl.int32, [power_of_two(NB), WARPS], FLAT2).store(words)
        quantise_into(
            x_s[0], sx_s, x_ptr, first, count, token, tokens, x_stride, NB, N, TT, SHARE, SHARES, WARPS
        )
        fence_async_shared()
        barrier()
    zero = gl.full([TALL, N], 0.0, gl.float32, W)
    acc = gl.reshape(zero, [WARPS, 16, N])
    C: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    parts = _none()
    scales = _none()
    if KQ > 1:  # they fit beside few sums
        for i in gl.static_range(NB):
            scales += (
                sx_s.index(i).load(gl.SliceLayout(0, C)),
                sw_s.index(i).load(gl.SliceLayout(1, C)),
            )
    for i in gl.static_range(NB + AHEAD):
        if i < NB:
            mbarrier.wait(bars[i % STAGES], i // STAGES & 1)
            w = raw[i % STAGES]._reinterpret(gl.float8e4nv, [TALL, 128], TILE8)
            if CODES:
                x = x_s[i // XB]._reinterpret(gl.float8e4nv, [XB, N, 128], TILE8).index(i % XB)
            else:
                x = x_s[0].index(i)
            parts += (
                _part(w, x, 0, zero), _part(w, x, 1, zero), _part(w, x, 2, zero), _part(w, x, 3, zero)
            )  # fmt: skip
        if i >= AHEAD:
            parts = warpgroup_mma_wait(len(parts) - 4, deps=parts)
            if i - AHEAD + STAGES < NB:
                barrier()
                mbarrier.expect(bars[(i - AHEAD) % STAGES], TALL * 128)
                tma.async_copy_global_to_shared(
                    w_desc, [first + i - AHEAD + STAGES, 0, row, 0], bars[(i - AHEAD) % STAGES],
                    raw[(i - AHEAD) % STAGES],
                )  # fmt: skip
            if KQ > 1:
                sx = scales[2 * (i - AHEAD)]
                sw = scales[2 * (i - AHEAD) + 1]
            else:
                sx = sx_s.index(i - AHEAD).load(gl.SliceLayout(0, C))
                sw = sw_s.index(i - AHEAD).load(gl.SliceLayout(1, C))
            for k in gl.static_range(4):
                acc = _scaled(acc, parts[k], sw, sx, k, WARPS, N)
            parts = parts[4:]
    total = gl.convert_layout(gl.reshape(acc, [TALL, N]), W)
    r2 = gl.arange(0, TALL, layout=gl.SliceLayout(1, W))
    t2 = gl.arange(0, N, layout=gl.SliceLayout(0, W))
    if SPLITS > 1:
        offset = (r2 % EACH * 4)[:, None] + ((split * N + t2) * STRIDE)[None, :]
        mine = (token + t2 < tokens)[None, :] & (offset >= 0)
        cluster.wait()
        cluster.send(
            area, area + SPLITS * N * STRIDE, total, offset, (r2 // EACH)[:, None] + offset * 0, mine
        )
        cluster.received(area + SPLITS * N * STRIDE)
        J: gl.constexpr = joined(WARPS, EACH)
        if split * EACH < ROWS:
            r5 = gl.arange(0, EACH, layout=gl.SliceLayout(0, J))
            t5 = gl.arange(0, N, layout=gl.SliceLayout(1, J))
            at = area + (t5 * STRIDE)[:, None] + (r5 * 4)[None, :]
            whole = cluster.pull(at)
            for s in gl.static_range(1, SPLITS):
                whole += cluster.pull(at + s * (N * STRIDE))
            place = (token + t5)[:, None].to(gl.int64) * outputs + (row + split * EACH + r5)[None, :]
            gl.store(out_ptr + place, whole.to(gl.bfloat16), mask=(token + t5 < tokens)[:, None])
    elif KQ > 1:
        own = gl.where((r2 // ROWS)[:, None] == (t2 // TT)[None, :], total, 0.0)
        sum = gl.sum(gl.sum(gl.reshape(own, [KQ, ROWS, KQ, TT]), axis=2), axis=0)
        H: gl.constexpr = sum.type.layout
        r3 = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, H))
        t3 = token + gl.arange(0, TT, layout=gl.SliceLayout(0, H))
        goal = out_ptr + t3[None, :].to(gl.int64) * outputs + r3[:, None]
        gl.store(goal, sum.to(gl.bfloat16), mask=(t3 < tokens)[None, :])
    else:
        goal = out_ptr + (token + t2)[None, :].to(gl.int64) * outputs + (row + r2)[:, None]
        gl.store(goal, total.to(gl.bfloat16), mask=(token + t2 < tokens)[None, :])
