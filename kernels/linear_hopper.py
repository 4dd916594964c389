# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 matrix products of 1 to 1024 tokens on Hopper: weights stream through shared memory by bulk copies and
go to wgmma's registers as exact bf16, activations are wgmma's other operand.

A warp holds 16 rows of weights; four threads share a row, each with 32 neighbouring channels of every 128:
one scale group a thread. Which of a thread's channels meets which step of the product does not matter so long
as activations are ordered alike (`quantised`), so no value moves between threads. Values are E4M3 times a
power of two, here times 2^-32, which the sum gives back.

One launch where a program's share of the activations fits shared memory: it quantises them itself while the
first weights are on their way. Elsewhere `quantise` does it in a launch that the product's start overlaps
(programmatic launch: weights and scales are asked for before `grid_wait`, everything else after it).

Channels are shared out over SPLITS programs that wait for one another (`meet`) and then add a part of the
tile each; or, for very few tokens, over the rows of one tile (KQ): row r of the tile is row r % ROWS of the
weights, share r // ROWS of the channels, tokens stand once for every share, and what belongs together is
added at the end.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from cedar.kernels.grid_hopper import barrier, counters, grid_release, grid_wait, meet
from cedar.kernels.weights_hopper import _FP8_ASM
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED_X = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SHARED_X3 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
SHARED_W = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SHARED_W4 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 4))
MULTIPROCESSORS = 132


@gluon.constexpr_function
def _warp_rows(warps):
    return [[16 << i, 0] for i in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def words8(warps):
    """Words of 16 rows a warp [16 warps, 32]: a thread has rows g and g + 8 and a quarter of the words."""
    rows = [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], *rows], _warp_rows(warps), [], [16 * warps, 32]
    )


@gluon.constexpr_function
def groups8(warps):
    """Their scale groups, a word each: [16 warps, 4, 8]."""
    rows = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], *rows],
        [[*row, 0] for row in _warp_rows(warps)],
        [],
        [16 * warps, 4, 8],
    )


@gluon.constexpr_function
def wide(warps, n):
    """wgmma's sum [16 warps, n]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16])


@gluon.constexpr_function
def wide_left(warps, n):
    """wgmma's left operand [16 warps, 128]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16]), 2)


@gluon.constexpr_function
def natural(warps, n):
    """Activations [n, 128], eight neighbouring channels a thread."""
    regs = [[0, 1], [0, 2], [0, 4]]
    warp_rows = []
    row = 2
    for _ in range(warps.bit_length() - 1):
        warp_rows.append([row, 0] if row < n else [0, 0])
        row *= 2
    while row < n:
        regs.append([row, 0])
        row *= 2
    lanes = [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warp_rows, [], [n, 128])


@gluon.constexpr_function
def joined(warps, rows):
    """[tokens, rows] fp32, four neighbouring rows a thread."""
    return gl.BlockedLayout([1, 4], [max(1, 128 // rows), min(32, rows // 4)], [warps, 1], [1, 0])


@gluon.constexpr_function
def tokens_each(n, splits):
    """Tokens of which each of `splits` programs adds the parts: a power of two."""
    each = 1
    while each * splits < n:
        each *= 2
    return each


@gluon.jit
def expand(words, scales, WARPS: gl.constexpr, N: gl.constexpr):
    """wgmma's left operand bf16·2^-32 [16 WARPS, 128] of words and E8M0 bytes [16 WARPS, 4]."""
    ROWS: gl.constexpr = 16 * WARPS
    power = gl.minimum(scales.to(gl.int32) + 88, 254) * 0x00800080
    every = power[:, :, None] + gl.full([ROWS, 4, 8], 0, gl.int32, groups8(WARPS))
    scale = gl.convert_layout(gl.reshape(every, [ROWS, 32]), words8(WARPS))
    a0, a1, b0, b1 = gl.inline_asm_elementwise(
        _FP8_ASM, "=h,=h,=h,=h,r,r", [words, scale], is_pure=True, pack=1,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    both = gl.join(gl.join(b0, b1), gl.join(a0, a1))  # channels 0 and 2, then 1 and 3
    parts = gl.reshape(gl.permute(both, (0, 1, 3, 2)), [ROWS, 4, 8, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [ROWS, 128]), wide_left(WARPS, N))


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
def quantised(x, N: gl.constexpr):
    """[N, 128] bf16 as a matmul sees it, in the order in which expanded weights meet it."""
    out = round_trip(gl.reshape(x.to(gl.float32), [N, 4, 32])).to(gl.bfloat16)
    return gl.reshape(gl.permute(gl.reshape(out, [N, 4, 8, 2, 2]), (0, 2, 4, 1, 3)), [N, 128])


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
    y = quantised(gl.load(x_ptr + row * x_stride + c[None, :], mask=mine, other=0.0), 8)
    gl.store(out_ptr + row * columns + c[None, :], gl.convert_layout(y, L), mask=mine)


@gluon.jit
def stream(
    w_desc, x_desc, x_ptr, scale_ptr, out_ptr, part_ptr, count_ptr, tokens, outputs, x_stride,
    COLUMNS: gl.constexpr, NB: gl.constexpr, SPLITS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    FUSED: gl.constexpr, WARPS: gl.constexpr, KQ: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, outputs / ROWS, ceil(tokens / (N / KQ))): 16 WARPS rows of a tile, NB blocks of 128
    channels a program.
    """
    TALL: gl.constexpr = 16 * WARPS
    ROWS: gl.constexpr = TALL // KQ
    TT: gl.constexpr = N // KQ
    SHARE: gl.constexpr = (COLUMNS // 128 + KQ - 1) // KQ
    SHARES: gl.constexpr = COLUMNS // 128 // SHARE  # the tile's rows beyond them are zeros
    XSTAGES: gl.constexpr = NB if FUSED else STAGES
    BYTES: gl.constexpr = TALL * 128 if FUSED else TALL * 128 + N * 256
    W: gl.constexpr = wide(WARPS, N)
    split = gl.program_id(0)
    row = gl.program_id(1) * ROWS
    token = gl.program_id(2) * TT
    first = split * NB
    count = gl.minimum(NB, SHARE - first)
    raw = gl.allocate_shared_memory(gl.int32, [STAGES, 1, KQ, ROWS, 32], SHARED_W4)
    w_s = raw._reinterpret(gl.int32, [STAGES, TALL, 32], SHARED_W)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [XSTAGES, N, 128], SHARED_X)
    if not FUSED:
        x_raw = x_s._reinterpret(gl.bfloat16, [STAGES, 2, N, 64], SHARED_X3)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), BYTES, pred=i < count)
        tma.async_copy_global_to_shared(
            w_desc, [first + i, 0, row, 0], bars.index(i), raw.index(i), pred=i < count
        )
    # scales four blocks ahead: one comes from memory in the time of two or three blocks
    GROUPS: gl.constexpr = gl.SliceLayout(2, groups8(WARPS))
    r3 = gl.arange(0, TALL, layout=gl.SliceLayout(1, GROUPS))
    g3 = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    share = gl.minimum(r3 // ROWS, SHARES - 1)
    line = (row + r3 % ROWS) // 32 * (COLUMNS // 32) + (share * SHARE + first) * 4
    scale_at = scale_ptr + line[:, None] + g3[None, :]
    last = count - 1
    scales0 = gl.load(scale_at)
    scales1 = gl.load(scale_at + gl.minimum(1, last) * 4)
    scales2 = gl.load(scale_at + gl.minimum(2, last) * 4)
    scales3 = gl.load(scale_at + gl.minimum(3, last) * 4)
    grid_wait()
    grid_release()
    if FUSED:
        L: gl.constexpr = natural(WARPS, N)
        n = gl.arange(0, N, layout=gl.SliceLayout(1, L))
        t = token + n % TT
        c = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
        at = t.to(gl.int64) * x_stride + (n // TT * SHARE + first) * 128
        for b in gl.static_range(NB):
            mine = ((t < tokens) & (n // TT < SHARES))[:, None] & (b < count)
            x = gl.load(x_ptr + at[:, None] + b * 128 + c[None, :], mask=mine, other=0.0)
            x_s.index(b).store(quantised(x, N))
        fence_async_shared()
        barrier()
    else:
        for i in gl.static_range(STAGES):
            tma.async_copy_global_to_shared(
                x_desc, [2 * (first + i), token, 0], bars.index(i), x_raw.index(i), pred=i < count
            )
    acc = gl.full([TALL, N], 0.0, gl.float32, W)
    for turn in range(count):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        left = expand(w_s.index(slot).load(words8(WARPS)), scales0, WARPS, N)
        scales0 = scales1
        scales1 = scales2
        scales2 = scales3
        scales3 = gl.load(scale_at + gl.minimum(turn + 4, last) * 4)
        acc = warpgroup_mma(left, x_s.index(turn if FUSED else slot).permute((1, 0)), acc)
        if NB > STAGES:
            barrier()
            next = first + turn + STAGES
            more = turn + STAGES < count
            mbarrier.expect(bars.index(slot), BYTES, pred=more)
            tma.async_copy_global_to_shared(
                w_desc, [next, 0, row, 0], bars.index(slot), raw.index(slot), pred=more
            )
            if not FUSED:
                tma.async_copy_global_to_shared(
                    x_desc, [2 * next, token, 0], bars.index(slot), x_raw.index(slot), pred=more
                )
    acc = acc * 4294967296.0
    if KQ > 1:
        r = gl.arange(0, TALL, layout=gl.SliceLayout(1, W)) // ROWS
        n2 = gl.arange(0, N, layout=gl.SliceLayout(0, W)) // TT
        own = gl.where(r[:, None] == n2[None, :], acc, 0.0)
        whole = gl.sum(gl.sum(gl.reshape(own, [KQ, ROWS, KQ, TT]), axis=2), axis=0)
        H: gl.constexpr = whole.type.layout
        r2 = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, H))
        t2 = token + gl.arange(0, TT, layout=gl.SliceLayout(0, H))
        place = out_ptr + t2[None, :].to(gl.int64) * outputs + r2[:, None]
        gl.store(place, whole.to(gl.bfloat16), mask=(t2 < tokens)[None, :])
    elif SPLITS == 1:
        r2 = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, W))
        t2 = token + gl.arange(0, N, layout=gl.SliceLayout(0, W))
        place = out_ptr + t2[None, :].to(gl.int64) * outputs + r2[:, None]
        gl.store(place, acc.to(gl.bfloat16), mask=(t2 < tokens)[None, :])
    else:
        cell = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
        r2 = gl.arange(0, ROWS, layout=gl.SliceLayout(1, W))
        t2 = gl.arange(0, N, layout=gl.SliceLayout(0, W))
        area = part_ptr + cell.to(gl.int64) * (SPLITS * N * ROWS)
        gl.store(area + split * (N * ROWS) + t2[None, :] * ROWS + r2[:, None], acc)
        meet(count_ptr + cell, SPLITS)
        TN: gl.constexpr = tokens_each(N, SPLITS)
        J: gl.constexpr = joined(WARPS, ROWS)
        if split * TN < N:
            r5 = gl.arange(0, ROWS, layout=gl.SliceLayout(0, J))
            t5 = split * TN + gl.arange(0, TN, layout=gl.SliceLayout(1, J))
            part = area + t5[:, None] * ROWS + r5[None, :]
            total = gl.load(part, cache_modifier=".cg")
            for s in gl.static_range(1, SPLITS):
                total += gl.load(part + s * (N * ROWS), cache_modifier=".cg")
            goal = out_ptr + (token + t5)[:, None].to(gl.int64) * outputs + (row + r5)[None, :]
            gl.store(goal, total.to(gl.bfloat16), mask=(token + t5 < tokens)[:, None])
    for j in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(j))


class Plan(NamedTuple):
    """How a shape is cut: N columns of wgmma, NB blocks of 128 channels a program, stages, warps, shares of
    the channels in one tile, and whether the product quantises the activations itself.
    """

    columns: int
    blocks: int
    stages: int
    warps: int
    shares: int
    fused: bool


@cache
def plan(tokens: int, outputs: int, columns: int) -> Plan | None:
    """The cut for a shape, from what was measured at the model's; None where this kernel does not fit."""
    if columns % 128 or outputs % 64 or not 0 < tokens <= 1024:
        return None
    blocks = columns // 128
    share = triton.cdiv(blocks, 8)
    if tokens == 1 and blocks % share == 0 and outputs % 16 == 0 and 100 <= outputs // 16 <= 396:
        return Plan(8, share, min(share, 5 if outputs // 16 <= MULTIPROCESSORS else 3), 8, 8, True)
    warps = 8 if tokens > 8 and outputs % 128 == 0 else 4
    n = 8 if tokens <= 8 else 16 if tokens <= 16 else 64 if tokens <= 64 or warps == 4 else 128
    tiles = outputs // (16 * warps) * triton.cdiv(tokens, n)
    splits = 1
    if warps == 8:  # all programs at once, one a multiprocessor
        splits = min(64, max(1, MULTIPROCESSORS // tiles), triton.cdiv(blocks, 2))
        if tokens <= 16 and splits > 1 and tiles * splits < 112:  # too few: several small ones on each
            warps, tiles = 4, outputs // 64
            splits = min(64, max(1, 360 // tiles), triton.cdiv(blocks, 2))
    else:
        while tiles * splits < 200 and splits < 64 and blocks > 2 * splits:
            splits *= 2
    each = triton.cdiv(blocks, splits)
    fused = tokens <= 16 and each * n * 256 <= 50_000
    stages = 2 if n >= 64 else 4
    if splits > 1:
        stages = 4 if n == 128 else 6 if warps == 8 else 5
    return Plan(n, each, min(stages, each), warps, 1, fused)


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, cut: Plan) -> torch.Tensor:
    """bf16 [N, O]: x bf16 [N, I] quantised, times E4M3 [O, I] with 32x32 scales, cut as `plan` says."""
    tokens, columns = x.shape
    outputs = weight.shape[0]
    n, each, stages, warps, shares, fused = cut
    rows = 16 * warps // shares
    blocks = triton.cdiv(columns // 128, shares)
    splits = triton.cdiv(blocks, each)
    tiles = triton.cdiv(tokens, n // shares)
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x.device)
    size = splits * tiles * n * outputs if splits > 1 else 1
    part = torch.empty(size, dtype=torch.float32, device=x.device)
    word = columns // 4
    w_desc = TensorDescriptor(
        weight.view(torch.int32),
        [blocks, columns // 128 // blocks, outputs, 32],
        [32, 32 * blocks, word, 1],
        [1, shares, rows, 32],
        SHARED_W4.value,
    )
    if fused:
        seen, x_desc = x, w_desc
    else:
        seen = torch.empty(tokens, columns, dtype=torch.bfloat16, device=x.device)
        quantise[(triton.cdiv(tokens, 8), columns // 128)](
            x, seen, tokens, columns, x.stride(0), num_warps=4, launch_pdl=True
        )
        x_desc = TensorDescriptor(
            seen, [columns // 64, tokens, 64], [64, columns, 1], [2, n, 64], SHARED_X3.value
        )
    stream[(splits, outputs // rows, tiles)](
        w_desc, x_desc, seen, scale, out, part, counters(x.device.index or 0), tokens,
        outputs, seen.stride(0), columns, each, splits, n, stages, fused, warps, shares, num_warps=warps,
        launch_pdl=True,
    )  # fmt: skip
    return out
