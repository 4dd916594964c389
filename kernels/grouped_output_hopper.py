# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The grouped output projection of 1 to 8 and of 17 to 128 tokens on Hopper, quantised for the product that
reads it next: one launch. For hundreds of them there is `grouped_bulk_hopper`.

Both operands stream through shared memory by bulk copies, weights before the launch before has ended. A
program has whole sums of 32 neighbouring outputs, one scale group, so it can quantise them. Of many tokens
the tokens are wgmma's rows and rows of a group's weights its columns; of up to eight it is the other way
round, and where the weights have too few rows for all multiprocessors, a cluster shares out the channels.
"""

from __future__ import annotations

import torch
from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.linear_hopper import MULTIPROCESSORS, granted
from cedar.kernels.linear_triton import hopper
from cedar.kernels.prepared import CODES, Prepared
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

TILE16 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FEW = 8  # tokens up to which rows of weights are wgmma's rows: as many columns as it must have
LIBRARY = 16  # tokens up to which, beyond those, the library is used: nothing was measured there
TILE = 64  # tokens of a tile; beyond, a program has two of them, so that weights are read once
MOST = 2 * TILE  # tokens; the library's product of more and a launch that quantises are faster
ROWS = 64  # of the weights a program


@gluon.constexpr_function
def sums(warps, m, r):
    """wgmma's sum [m tokens, r rows]."""
    down = min(warps, m // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, r // (warps // down), 16])


@gluon.jit
def grouped_codes(
    o_desc, w_desc, out_ptr, code_ptr, tokens, rank,
    COLUMNS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (groups · rank / R): o [tokens, groups · COLUMNS], at most M tokens, weights [groups · rank,
    COLUMNS]; E4M3 [tokens, groups · rank] and a scale byte for every 32.
    """
    W: gl.constexpr = sums(WARPS, M, R)
    BLOCKS: gl.constexpr = COLUMNS // 64
    row = gl.program_id(0) * R
    column = row // rank * COLUMNS
    outputs = gl.num_programs(0) * R
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, 64], TILE16)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, M, 64], TILE16)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), (M + R) * 128)
        tma.async_copy_global_to_shared(w_desc, [row, i * 64], bars.index(i), w_s.index(i))
    grid_release()
    grid_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(o_desc, [0, column + i * 64], bars.index(i), o_s.index(i))
    acc = gl.full([M, R], 0.0, gl.float32, W)
    for turn in range(BLOCKS):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        acc = warpgroup_mma(o_s.index(slot), w_s.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        next = turn + STAGES
        more = next < BLOCKS
        mbarrier.expect(bars.index(slot), (M + R) * 128, pred=more)
        tma.async_copy_global_to_shared(
            w_desc, [row, next * 64], bars.index(slot), w_s.index(slot), pred=more
        )
        tma.async_copy_global_to_shared(
            o_desc, [0, column + next * 64], bars.index(slot), o_s.index(slot), pred=more
        )
    groups = gl.reshape(acc.to(gl.bfloat16).to(gl.float32), [M, R // 32, 32])
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    C: gl.constexpr = code.type.layout
    t3 = gl.arange(0, M, layout=gl.SliceLayout(1, C))
    g3 = row // 32 + gl.arange(0, R // 32, layout=gl.SliceLayout(0, C))
    at = code_ptr + t3[:, None].to(gl.int64) * (outputs // 32) + g3[None, :]
    gl.store(at, code.to(gl.uint8), mask=(t3 < tokens)[:, None])
    wide = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    down = ((254 - wide) << 23).to(gl.float32, bitcast=True)
    byte = gl.convert_layout(gl.reshape((groups * down).to(gl.float8e4nv), [M, R]), W)
    t2 = gl.arange(0, M, layout=gl.SliceLayout(1, W))
    r2 = row + gl.arange(0, R, layout=gl.SliceLayout(0, W))
    gl.store(out_ptr + t2[:, None].to(gl.int64) * outputs + r2[None, :], byte, mask=(t2 < tokens)[:, None])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))


@gluon.constexpr_function
def _outputs_layout(n):
    """[n tokens, 64 outputs]: four neighbouring ones a thread, a scale group in eight lanes."""
    return gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])


@gluon.jit
def grouped_few(
    o_desc, w_desc, out_ptr, code_ptr, tokens, outputs, rank,
    COLUMNS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, outputs / 64, ceil(tokens / N)), SPLITS programs a cluster: as `grouped_codes`, UNIT
    blocks of 64 channels a turn.
    """
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    J: gl.constexpr = _outputs_layout(N)
    TURNS: gl.constexpr = COLUMNS // 64 // SPLITS // UNIT
    BYTES: gl.constexpr = UNIT * (64 + N) * 128
    STRIDE: gl.constexpr = 4 * 64 + 16  # bytes of a token's part in the cluster's area: no bank conflicts
    split = gl.program_id(0)
    if SPLITS > 1:
        area = cluster.area(SPLITS * N * STRIDE)
        cluster.arrive()
    row = gl.program_id(1) * 64
    token = gl.program_id(2) * N
    first = split * (TURNS * UNIT * 64)
    column = row // rank * COLUMNS + first
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNIT, 64, 64], TILE16)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNIT, N, 64], TILE16)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), BYTES)
        for u in gl.static_range(UNIT):
            channel = first + (i * UNIT + u) * 64
            tma.async_copy_global_to_shared(w_desc, [row, channel], bars.index(i), w_s.index(i * UNIT + u))
    grid_release()
    grid_wait()
    for i in gl.static_range(STAGES):
        for u in gl.static_range(UNIT):
            channel = column + (i * UNIT + u) * 64
            tma.async_copy_global_to_shared(o_desc, [token, channel], bars.index(i), o_s.index(i * UNIT + u))
    acc = gl.full([64, N], 0.0, gl.float32, W)
    for turn in range(TURNS):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        for u in gl.static_range(UNIT):
            o = o_s.index(slot * UNIT + u).permute((1, 0))
            acc = warpgroup_mma(w_s.index(slot * UNIT + u), o, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if TURNS > STAGES:
            barrier()
            next = (turn + STAGES) * UNIT
            more = turn + STAGES < TURNS
            mbarrier.expect(bars.index(slot), BYTES, pred=more)
            for u in gl.static_range(UNIT):
                to = slot * UNIT + u
                tma.async_copy_global_to_shared(
                    w_desc, [row, first + (next + u) * 64], bars.index(slot), w_s.index(to), pred=more
                )
            for u in gl.static_range(UNIT):
                to = slot * UNIT + u
                tma.async_copy_global_to_shared(
                    o_desc, [token, column + (next + u) * 64], bars.index(slot), o_s.index(to), pred=more
                )
    if SPLITS > 1:
        r2 = gl.arange(0, 64, layout=gl.SliceLayout(1, W))
        t2 = gl.arange(0, N, layout=gl.SliceLayout(0, W))
        offset = (r2 * 4)[:, None] + ((split * N + t2) * STRIDE)[None, :]
        cluster.wait()
        cluster.push(area, acc, offset, offset * 0, (token + t2 < tokens)[None, :] & (offset >= 0))
        cluster.arrive()
        cluster.wait()
    r5 = gl.arange(0, 64, layout=gl.SliceLayout(0, J))
    t5 = token + gl.arange(0, N, layout=gl.SliceLayout(1, J))
    if split == 0:
        if SPLITS > 1:
            at = area + ((t5 - token) * STRIDE)[:, None] + (r5 * 4)[None, :]
            whole = cluster.pull(at)
            for s in gl.static_range(1, SPLITS):
                whole += cluster.pull(at + s * (N * STRIDE))
        else:
            whole = gl.convert_layout(gl.permute(acc, (1, 0)), J)
        groups = gl.reshape(whole.to(gl.bfloat16).to(gl.float32), [N, 2, 32])
        amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
        code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
        C: gl.constexpr = code.type.layout
        t3 = token + gl.arange(0, N, layout=gl.SliceLayout(1, C))
        g3 = row // 32 + gl.arange(0, 2, layout=gl.SliceLayout(0, C))
        to = code_ptr + t3[:, None].to(gl.int64) * (outputs // 32) + g3[None, :]
        gl.store(to, code.to(gl.uint8), mask=(t3 < tokens)[:, None])
        wide = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
        down = ((254 - wide) << 23).to(gl.float32, bitcast=True)
        byte = gl.convert_layout(gl.reshape((groups * down).to(gl.float8e4nv), [N, 64]), J)
        to = out_ptr + t5[:, None].to(gl.int64) * outputs + (row + r5)[None, :]
        gl.store(to, byte, mask=(t5 < tokens)[:, None])
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))


def fits(o: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether these kernels take o [N, G, C] and weight bf16 [G, r, C]."""
    return (
        (0 < o.shape[0] <= FEW or LIBRARY < o.shape[0] <= MOST)
        and hopper(o.device.index or 0)
        and o.shape[2] % 64 == 0
        and weight.shape[1] % ROWS == 0
        and o.is_contiguous()
        and weight.is_contiguous()
    )


def few_cut(outputs: int, columns: int) -> tuple[int, int, int]:
    """Programs of a cluster, stages and blocks a turn of `grouped_few`: as many programs as there are
    multiprocessors, if each has four blocks of 64 channels or more.
    """
    tiles, blocks, splits = outputs // ROWS, columns // 64, 1
    while splits < 8 and blocks % (8 * splits) == 0 and 2 * splits * tiles <= MULTIPROCESSORS:
        splits *= 2
    area = cluster.area_bytes(splits * FEW * 272) if splits > 1 else 0
    unit = 2 if blocks // splits % 2 == 0 else 1
    stages = min(blocks // splits, 12) // unit
    while not granted(area, stages * unit * (64 + FEW) * 128):
        stages -= 1
    return splits, stages, unit


def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> Prepared:
    """Codes [N, G·r] of o bf16 [N, G, C] times weight bf16 [G, r, C] per group."""
    tokens, groups, columns = o.shape
    rank = weight.shape[1]
    outputs = groups * rank
    values = torch.empty(tokens, outputs, dtype=torch.float8_e4m3fn, device=o.device)
    scale = torch.empty(tokens, outputs // 32, dtype=torch.uint8, device=o.device)
    n = FEW if tokens <= FEW else TILE if tokens <= TILE else MOST
    rows = TensorDescriptor(o, [tokens, groups * columns], [groups * columns, 1], [n, 64], TILE16.value)
    weights = TensorDescriptor(weight, [outputs, columns], [columns, 1], [ROWS, 64], TILE16.value)
    if tokens <= FEW:
        splits, stages, unit = few_cut(outputs, columns)
        cluster.launch(
            grouped_few, (1, outputs // ROWS, 1), splits, rows, weights, values, scale, tokens, outputs, rank,
            columns, n, splits, stages, unit, num_warps=4,
        )  # fmt: skip
    else:
        warps, stages = n // 16, min(1536 // (n + ROWS), columns // 64)
        grouped_codes[(outputs // ROWS,)](
            rows, weights, values, scale, tokens, rank, columns, n, ROWS, stages, warps,
            num_warps=warps, launch_pdl=True,
        )  # fmt: skip
    return Prepared(values, CODES, scale)
