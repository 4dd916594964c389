# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of 65 tokens and more with many rows of few channels on Hopper: all channels of a tile of
tokens stay in shared memory while tiles of weights pass, so that the cache is asked for activations once a
program.

Otherwise as `linear_many_hopper`.
"""

from __future__ import annotations

from cedar.kernels.codes_hopper import TILE8
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.linear_many_hopper import part, scaled, sums
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def written(warps, m, r):
    """wgmma's sum [m tokens, r rows] with eight neighbouring rows a thread: a warp keeps its values."""
    regs = [[0, 1], [0, 2], [0, 4]]
    step = 32
    while step < r:
        regs.append([0, step])
        step *= 2
    regs.append([8, 0])
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16 << i, 0] for i in range(3)], [], [m, r])


@gluon.jit
def hold(
    w_desc, x_desc, word_ptr, scale_ptr, out_ptr, tokens, outputs,
    BLOCKS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(outputs / (R EACH)), ceil(tokens / M)), 8 warps, M 128: EACH tiles of R rows a program."""
    W: gl.constexpr = sums(8, M, R)
    J: gl.constexpr = written(8, M, R)
    row = gl.program_id(0) * (R * EACH)
    token = gl.program_id(1) * M
    tiles = gl.minimum(EACH, outputs // R - gl.program_id(0) * EACH)
    turns = tiles * BLOCKS
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [BLOCKS, M, 128], TILE8)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    xbars = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(BLOCKS):
        mbarrier.init(xbars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), R * 128)
        tma.async_copy_global_to_shared(w_desc, [row, i * 128], bars.index(i), w_s.index(i))
    a = gl.full([M, R], 0.0, gl.float32, W)
    d = a
    acc = gl.reshape(a, [M, R // 32, 32])
    C: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    group = row // 32 + gl.arange(0, R // 32, layout=gl.SliceLayout(0, C))
    scale_at = scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + group * BLOCKS
    sw0 = gl.load(scale_at)
    sw1 = gl.load(scale_at + 1)
    grid_release()
    grid_wait()
    for i in gl.static_range(BLOCKS):
        mbarrier.expect(xbars.index(i), M * 128)
        tma.async_copy_global_to_shared(x_desc, [token, i * 128], xbars.index(i), x_s.index(i))
    t = gl.minimum(token + gl.arange(0, M, layout=gl.SliceLayout(1, C)), tokens - 1)
    word_at = word_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + t * BLOCKS
    ahead = gl.load(word_at)
    r2 = row + gl.arange(0, R, layout=gl.SliceLayout(0, J))
    t2 = token + gl.arange(0, M, layout=gl.SliceLayout(1, J))
    goal = out_ptr + t2[:, None].to(gl.int64) * outputs + r2[None, :]
    turn = 0
    for tile in range(tiles):
        acc = gl.reshape(gl.full([M, R], 0.0, gl.float32, W), [M, R // 32, 32])
        for block in range(BLOCKS):
            slot = turn % STAGES
            sw = sw0
            sw0 = sw1
            two = gl.minimum(turn + 2, turns - 1)
            sw1 = gl.load(scale_at + two // BLOCKS * (R // 32 * BLOCKS) + two % BLOCKS)
            sx = ahead
            ahead = gl.load(word_at + (turn + 1) % BLOCKS)
            mbarrier.wait(xbars.index(block), 0)
            mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
            x = x_s.index(block)
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
            next = turn + STAGES
            more = next < turns
            mbarrier.expect(bars.index(slot), R * 128, pred=more)
            tma.async_copy_global_to_shared(
                w_desc, [row + next // BLOCKS * R, next % BLOCKS * 128], bars.index(slot), w_s.index(slot),
                pred=more,
            )  # fmt: skip
            acc = scaled(acc, d, sx, sw, 3, M, R)
            turn += 1
        total = gl.convert_layout(gl.reshape(acc, [M, R]), W)
        gl.store(goal + tile * R, gl.convert_layout(total.to(gl.bfloat16), J), mask=(t2 < tokens)[:, None])
