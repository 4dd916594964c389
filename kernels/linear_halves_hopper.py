# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of 17 to 64 tokens on Hopper by trades of four warps that take turns at a program's channels.

Otherwise as `linear_many_hopper`. Two trades' sums meet in shared memory, which costs less than two programs
of a cluster sending theirs.
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.codes_hopper import FLAT, FLAT2, TILE8, fetch_words, power_of_two
from cedar.kernels.grid_hopper import barrier, fetch_descriptor, grid_release, grid_wait
from cedar.kernels.linear_many_hopper import (
    add_parts,
    area_of,
    fours,
    part,
    scaled,
    share_of,
    sums,
    unfold,
    written,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

@gluon.jit
def _multiply(
    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row, token, first,
    count, split, PLACE: gl.constexpr, TRADES: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr,
    M: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Trade PLACE: every block of channels whose turn it is."""
    W: gl.constexpr = sums(4, M, R)
    if SPLITS > 1:
        cluster.arrive()
    a = gl.full([M, R], 0.0, gl.float32, W)
    d = a
    acc = gl.reshape(a, [M, R // 32, 32])
    C: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    sx3 = gl.full([M], 0, gl.int32, gl.SliceLayout(1, C))
    sw3 = gl.full([R // 32], 0, gl.int32, gl.SliceLayout(0, C))
    for turn in range(PLACE, count, TRADES):
        slot = turn % STAGES
        sx = sx_s.index(turn).load(gl.SliceLayout(1, C))
        sw = sw_s.index(turn).load(gl.SliceLayout(0, C))
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        x = x_s.index(slot)
        w = w_s.index(slot)
        p = part(x, w, 0, a)
        acc = scaled(acc, d, sx3, sw3, 3, M, R)
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
        if NB > STAGES:
            barrier()
            next = turn + STAGES
            more = next < count
            mbarrier.expect(bars.index(slot), (R + M) * 128, pred=more)
            tma.async_copy_global_to_shared(
                w_desc, [row, (first + next) * 128], bars.index(slot), w_s.index(slot), pred=more
            )
            tma.async_copy_global_to_shared(
                x_desc, [token, (first + next) * 128], bars.index(slot), x_s.index(slot), pred=more
            )
        sx3 = sx
        sw3 = sw
    acc = scaled(acc, d, sx3, sw3, 3, M, R)
    total = gl.convert_layout(gl.reshape(acc, [M, R]), W)
    held = fours(total, M, R)
    if PLACE > 0:
        sum_s.index(PLACE - 1).store(held)
        barrier()
        mbarrier.arrive(met, count=1)
    else:
        mbarrier.wait(met, 0)
        for i in gl.static_range(TRADES - 1):
            held += sum_s.index(i).load(held.type.layout)
        total = gl.convert_layout(unfold(held, M, R), W)
        if SPLITS == 1:
            J: gl.constexpr = written(4, R)
            r3 = row + gl.arange(0, R, layout=gl.SliceLayout(0, J))
            t3 = token + gl.arange(0, M, layout=gl.SliceLayout(1, J))
            goal = out_ptr + t3[:, None].to(gl.int64) * outputs + r3[None, :]
            gl.store(goal, gl.convert_layout(total.to(gl.bfloat16), J), mask=(t3 < tokens)[:, None])
        else:
            mine = gl.minimum(R // 8 - split * share_of(R, SPLITS), share_of(R, SPLITS))
            cluster.wait()
            add_parts(total, area, out_ptr, tokens, outputs, row, token, split, mine, SPLITS, M, R, 4)


@gluon.jit
def halves(
    w_desc, x_desc, word_ptr, scale_ptr, out_ptr, tokens, outputs,
    COLUMNS: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr, TRADES: gl.constexpr, EARLY: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, outputs / R, ceil(tokens / M)): NB blocks of 128 channels a program, STAGES of them, a
    multiple of TRADES, on their way.
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    split = gl.program_id(0)
    row = gl.program_id(1) * R
    token = gl.program_id(2) * M
    area = token
    if SPLITS > 1:
        SIZE: gl.constexpr = area_of(M, R, SPLITS)
        area = cluster.end(SIZE)
        mine = gl.minimum(R // 8 - split * share_of(R, SPLITS), share_of(R, SPLITS))
        sent = gl.minimum((tokens - token + 15) // 16 * 16, M) * ((SPLITS - 1) * 32) * mine
        cluster.expect(area + (SIZE - 16), sent if mine > 0 else 0)
    first = split * NB
    count = gl.minimum(NB, BLOCKS - first)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], TILE8)
    sw_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), R // 32], FLAT)
    sx_s = gl.allocate_shared_memory(gl.int32, [power_of_two(NB), M], FLAT)
    sum_s = gl.allocate_shared_memory(gl.float32, [TRADES - 1, R // 8, 8 * M], FLAT2)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.init(met, count=TRADES - 1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), (R + M) * 128, pred=i < count)
        tma.async_copy_global_to_shared(
            w_desc, [row, (first + i) * 128], bars.index(i), w_s.index(i), pred=i < count
        )
    S: gl.constexpr = gl.BlockedLayout([1, R // 32], [32, 1], [4, 1], [1, 0])
    b4 = gl.arange(0, power_of_two(NB), layout=gl.SliceLayout(1, S))
    g4 = gl.arange(0, R // 32, layout=gl.SliceLayout(0, S))
    at4 = ((row // 32 + g4) * BLOCKS)[None, :] + gl.minimum(first + b4, BLOCKS - 1)[:, None]
    words = gl.load(scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at4)
    fetch_descriptor("halves_param_5")
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
    fetch_words(sx_s, word_ptr, first, count, token, tokens, NB, M, M, 0, 1, BLOCKS, 4)
    barrier()
    if TRADES == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row,
                    token, first, count, split, 0, TRADES, NB, SPLITS, M, R, STAGES,
                )),
                (_multiply, (
                    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row,
                    token, first, count, split, 1, TRADES, NB, SPLITS, M, R, STAGES,
                )),
            ],
            [4], [REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row,
                    token, first, count, split, 0, TRADES, NB, SPLITS, M, R, STAGES,
                )),
                (_multiply, (
                    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row,
                    token, first, count, split, 1, TRADES, NB, SPLITS, M, R, STAGES,
                )),
                (_multiply, (
                    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row,
                    token, first, count, split, 2, TRADES, NB, SPLITS, M, R, STAGES,
                )),
                (_multiply, (
                    w_desc, x_desc, w_s, x_s, sw_s, sx_s, sum_s, bars, met, area, out_ptr, tokens, outputs, row,
                    token, first, count, split, 3, TRADES, NB, SPLITS, M, R, STAGES,
                )),
            ],
            [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
