# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of 65 tokens and more with many rows of weights on Hopper: two trades of four warps multiply,
64 tokens each, and one copies.

Otherwise as `linear_many_hopper`, whose eight warps would meet at four barriers a block of channels: trades
that do not wait for each other keep the matrix units and the multiply-adds busy at the same time.

Channels are shared out over SPLITS programs: those of a cluster, or programs that leave their sums in memory,
wait for one another and add a share each, where clusters of so many would not all run at once. HOLD: all
channels of a tile of tokens stay in shared memory while tiles of weights pass, so that the cache is asked for
activations once a program.
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.codes_hopper import FLAT, FLAT2, TILE8, fetch_words, power_of_two
from cedar.kernels.grid_hopper import (
    arrive,
    barrier,
    fetch_descriptor,
    goal_of,
    grid_release,
    grid_wait,
    wait_for,
)
from cedar.kernels.linear_many_hopper import add_parts, area_of, fours, part, scaled, share_of, sums, unfold
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

TRADES = gl.constexpr(2)  # that multiply
REGISTERS = 240  # of a thread that multiplies


@gluon.constexpr_function
def written(r):
    """wgmma's sum [64 tokens, r rows] with eight neighbouring rows a thread: a warp keeps its values."""
    regs = [[0, 1], [0, 2], [0, 4]]
    step = 32
    while step < r:
        regs.append([0, step])
        step *= 2
    regs.append([8, 0])
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0], [32, 0]], [], [64, r])


@gluon.constexpr_function
def area_each(r, splits, cluster):
    """Bytes in which a trade adds the parts of its share of a sum."""
    if splits == 1:
        return 0
    return (area_of(64, r, splits) + 127) // 128 * 128 if cluster else share_of(r, splits) * 2048


@gluon.jit
def _add(
    total, area, out_ptr, part_ptr, cell, goal, tokens, outputs, row, token, split, SPLITS: gl.constexpr,
    R: gl.constexpr,
):  # fmt: skip
    """Leaves a trade's sum, but for its own share, for the programs that have other channels of it, and adds
    and writes that share.
    """
    SHARE: gl.constexpr = (R // 8 + SPLITS - 1) // SPLITS  # of every eight rows
    WIDE: gl.constexpr = power_of_two(SHARE)
    held = fours(total, 64, R)
    F: gl.constexpr = held.type.layout
    c8 = gl.arange(0, R // 8, layout=gl.SliceLayout(1, F))
    i8 = gl.arange(0, 512, layout=gl.SliceLayout(0, F))
    keeps = (c8 // SHARE == split)[:, None] & (i8 >= 0)[None, :]
    gl.store(part_ptr + split * (64 * R) + (c8 * 512)[:, None] + i8[None, :], held, mask=~keeps)
    cluster.keep_fours(area, held, ((c8 - split * SHARE) * 2048)[:, None] + (i8 * 4)[None, :], keeps)
    arrive(cell, 64 * (split + 1) // SPLITS - 64 * split // SPLITS)
    H: gl.constexpr = sums(4, 64, 8 * WIDE)
    E: gl.constexpr = fours(gl.full([64, 8 * WIDE], 0.0, gl.float32, H), 64, 8 * WIDE).type.layout
    c9 = split * SHARE + gl.arange(0, WIDE, layout=gl.SliceLayout(1, E))
    i9 = gl.arange(0, 512, layout=gl.SliceLayout(0, E))
    source = part_ptr + (c9 * 512)[:, None] + i9[None, :]
    own = (c9 < gl.minimum(split * SHARE + SHARE, R // 8))[:, None] & (i9 >= 0)[None, :]
    r7 = split * (8 * SHARE) + gl.arange(0, 8 * WIDE, layout=gl.SliceLayout(0, H))
    t7 = token + gl.arange(0, 64, layout=gl.SliceLayout(1, H))
    mine = (t7 < tokens)[:, None] & (r7 < gl.minimum(split * SHARE + SHARE, R // 8) * 8)[None, :]
    target = out_ptr + t7[:, None].to(gl.int64) * outputs + (row + r7)[None, :]
    c7 = gl.minimum(gl.arange(0, WIDE, layout=gl.SliceLayout(1, E)), SHARE - 1)
    whole = cluster.pull(area + (c7 * 2048)[:, None] + (i9 * 4)[None, :])
    wait_for(cell, goal)
    for s in gl.static_range(SPLITS):
        whole += gl.load(source + s * (64 * R), mask=own & (split != s), other=0.0, cache_modifier=".cg")
    gl.store(target, gl.convert_layout(unfold(whole, 64, 8 * WIDE), H).to(gl.bfloat16), mask=mine)


@gluon.jit
def _multiply(
    w_s, x_s, sw_s, sx_s, bars, xbars, word_ptr, scale_ptr, out_ptr, part_ptr, count_ptr, area, tokens,
    outputs, row, token, first, count, tiles, TRADE: gl.constexpr, BLOCKS: gl.constexpr, NB: gl.constexpr,
    SPLITS: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, HOLD: gl.constexpr,
    WORDS: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Trade TRADE: 64 tokens of the program's rows."""
    if CLUSTER:
        cluster.arrive_ready()
    W: gl.constexpr = sums(4, 64, R)
    a = gl.full([64, R], 0.0, gl.float32, W)
    d = a
    acc = gl.reshape(a, [64, R // 32, 32])
    C: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    J: gl.constexpr = written(R)
    t2 = token + 64 * TRADE + gl.arange(0, 64, layout=gl.SliceLayout(1, J))
    r2 = row + gl.arange(0, R, layout=gl.SliceLayout(0, J))
    S: gl.constexpr = gl.BlockedLayout([1, R // 32], [32, 1], [4, 1], [1, 0])
    b4 = gl.arange(0, WORDS, layout=gl.SliceLayout(1, S))
    g4 = row // 32 + gl.arange(0, R // 32, layout=gl.SliceLayout(0, S))
    b4 = gl.minimum(b4, tiles * count - 1)
    at4 = (b4 // count * (R // 32 * BLOCKS) + first + b4 % count)[:, None] + (g4 * BLOCKS)[None, :]
    scales = gl.load(scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at4)
    grid_wait()
    cell = (token // 128 * (outputs // R) + row // R) * TRADES + TRADE
    token += 64 * TRADE
    if SPLITS > 1 and not CLUSTER:
        goal = goal_of(count_ptr + cell)
    sw_s._reinterpret(gl.int32, [WORDS, R // 32], FLAT2).store(scales)
    fetch_words(sx_s, word_ptr, first, count, token, tokens, NB, 64, 64, 0, 1, BLOCKS, 4)
    barrier()
    turn = 0
    for tile in range(tiles):
        acc = gl.reshape(gl.full([64, R], 0.0, gl.float32, W), [64, R // 32, 32])
        for block in range(count):
            slot = turn % STAGES
            sx = sx_s.index(block).load(gl.SliceLayout(1, C))
            sw = sw_s.index(turn).load(gl.SliceLayout(0, C))
            if HOLD:
                mbarrier.wait(xbars.index(block), 0)
                x = x_s.index(block).slice(64 * TRADE, 64, dim=0)
            else:
                x = x_s.index(slot).slice(64 * TRADE, 64, dim=0)
            mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
            w = w_s.index(slot)
            p = part(x, w, 0, a)
            q = part(x, w, 1, d)
            a, q = warpgroup_mma_wait(1, deps=[p, q])
            acc = scaled(acc, a, sx, sw, 0, 64, R)
            p = part(x, w, 2, a)
            d, p = warpgroup_mma_wait(1, deps=[q, p])
            acc = scaled(acc, d, sx, sw, 1, 64, R)
            q = part(x, w, 3, d)
            a, q = warpgroup_mma_wait(1, deps=[p, q])
            acc = scaled(acc, a, sx, sw, 2, 64, R)
            d = warpgroup_mma_wait(0, deps=[q])
            mbarrier.arrive(bars.index(STAGES + slot), count=1)
            acc = scaled(acc, d, sx, sw, 3, 64, R)
            turn += 1
        total = gl.convert_layout(gl.reshape(acc, [64, R]), W)
        if SPLITS == 1:
            target = out_ptr + t2[:, None].to(gl.int64) * outputs + (r2 + tile * R)[None, :]
            gl.store(target, gl.convert_layout(total.to(gl.bfloat16), J), mask=(t2 < tokens)[:, None])
        elif CLUSTER:
            mine = gl.minimum(R // 8 - first // NB * share_of(R, SPLITS), share_of(R, SPLITS))
            cluster.wait()
            add_parts(total, area, out_ptr, tokens, outputs, row, token, first // NB, mine, SPLITS, 64, R, 4)
        else:
            parts = part_ptr + cell.to(gl.int64) * (SPLITS * 64 * R)
            _add(
                total, area, out_ptr, parts, count_ptr + cell, goal, tokens, outputs, row, token, first // NB,
                SPLITS, R,
            )  # fmt: skip


@gluon.jit
def _copy(
    w_desc, x_desc, w_s, x_s, bars, xbars, row, token, first, count, tiles, NB: gl.constexpr,
    SPLITS: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, HOLD: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """The trade that copies, STAGES blocks ahead. Weights are older than the launch before this one, but more
    of them than two blocks before the first activations would only keep those waiting.
    """
    M: gl.constexpr = 64 * TRADES
    AHEAD: gl.constexpr = min(2, STAGES)
    BYTES: gl.constexpr = R * 128 if HOLD else (R + M) * 128
    turns = tiles * count
    if CLUSTER:
        cluster.arrive_ready()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), BYTES, pred=i < turns)
    for i in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(
            w_desc, [row + i // count * R, (first + i % count) * 128], bars.index(i), w_s.index(i),
            pred=i < turns,
        )  # fmt: skip
    fetch_descriptor("trades_param_5")
    grid_wait()
    grid_release()
    for i in gl.static_range(STAGES):
        if HOLD:
            if i < NB:
                mbarrier.expect(xbars.index(i), M * 128)
                tma.async_copy_global_to_shared(x_desc, [token, i * 128], xbars.index(i), x_s.index(i))
        else:
            if i < count:
                tma.async_copy_global_to_shared(
                    x_desc, [token, (first + i) * 128], bars.index(i), x_s.index(i)
                )
        if i >= AHEAD:
            tma.async_copy_global_to_shared(
                w_desc, [row + i // count * R, (first + i % count) * 128], bars.index(i), w_s.index(i),
                pred=i < turns,
            )  # fmt: skip
    for turn in range(STAGES, turns):
        slot = turn % STAGES
        if HOLD:  # noqa: SIM102  (one is decided when it is compiled)
            if turn < NB:
                mbarrier.expect(xbars.index(turn), M * 128)
                tma.async_copy_global_to_shared(
                    x_desc, [token, turn * 128], xbars.index(turn), x_s.index(turn)
                )
        mbarrier.wait(bars.index(STAGES + slot), (turn // STAGES + 1) & 1)
        mbarrier.expect(bars.index(slot), BYTES)
        tma.async_copy_global_to_shared(
            w_desc, [row + turn // count * R, (first + turn % count) * 128], bars.index(slot), w_s.index(slot)
        )
        if not HOLD:
            tma.async_copy_global_to_shared(
                x_desc, [token, (first + turn) * 128], bars.index(slot), x_s.index(slot)
            )


@gluon.jit
def trades(
    w_desc, x_desc, word_ptr, scale_ptr, out_ptr, part_ptr, count_ptr, tokens, outputs,
    BLOCKS: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
    HOLD: gl.constexpr, EACH: gl.constexpr, REGISTERS: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Grid (1, SPLITS, ceil(outputs / (R EACH)) ceil(tokens / 128)), of clusters (SPLITS, 1, the same): EACH
    tiles of R rows and NB blocks of 128 channels a program, STAGES blocks on their way. HOLD: SPLITS is 1.
    More than one split: EACH is 1.
    """
    M: gl.constexpr = 64 * TRADES
    wide = (outputs // R + EACH - 1) // EACH
    place = gl.program_id(2) % wide
    row = place * (R * EACH)
    token = gl.program_id(2) // wide * M
    split = gl.program_id(0) if CLUSTER else gl.program_id(1)
    first = split * NB
    count = gl.minimum(NB, BLOCKS - first)
    tiles = gl.minimum(EACH, outputs // R - place * EACH)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [NB if HOLD else STAGES, M, 128], TILE8)
    WORDS: gl.constexpr = power_of_two(NB * EACH)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # full, free
    sw0 = gl.allocate_shared_memory(gl.int32, [WORDS, R // 32], FLAT)
    sw1 = gl.allocate_shared_memory(gl.int32, [WORDS, R // 32], FLAT)
    sx0 = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), 64], FLAT)
    sx1 = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), 64], FLAT)
    xbars = gl.allocate_shared_memory(gl.int64, [NB if HOLD else 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NB if HOLD else 1):
        mbarrier.init(xbars.index(i), count=1)
    AREA: gl.constexpr = area_each(R, SPLITS, CLUSTER)
    area = cluster.end(TRADES * AREA)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=TRADES)
    if CLUSTER:
        mine = gl.maximum(0, gl.minimum(R // 8 - split * share_of(R, SPLITS), share_of(R, SPLITS)))
        for i in gl.static_range(TRADES):
            sent = gl.maximum(0, gl.minimum((tokens - token - 64 * i + 15) // 16 * 16, 64))
            cluster.expect(area + (i * AREA + area_of(64, R, SPLITS) - 16), sent * ((SPLITS - 1) * 32) * mine)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                w_s, x_s, sw0, sx0, bars, xbars, word_ptr, scale_ptr, out_ptr, part_ptr, count_ptr,
                area, tokens, outputs, row, token, first, count, tiles, 0, BLOCKS, NB, SPLITS, R,
                STAGES, HOLD, WORDS, CLUSTER,
            )),
            (_multiply, (
                w_s, x_s, sw1, sx1, bars, xbars, word_ptr, scale_ptr, out_ptr, part_ptr, count_ptr,
                area + AREA, tokens, outputs, row, token, first, count, tiles, 1, BLOCKS, NB, SPLITS, R,
                STAGES, HOLD, WORDS, CLUSTER,
            )),
            (_copy, (
                w_desc, x_desc, w_s, x_s, bars, xbars, row, token, first, count, tiles, NB, SPLITS, R,
                STAGES, HOLD, CLUSTER,
            )),
        ],
        [4, 4], [REGISTERS, 24],
    )  # fmt: skip
