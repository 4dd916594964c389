# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts of very few tokens on Hopper: a tile is one slot, nothing is sorted (spec §3).

As in `experts_hopper`, but with few programs' worth of work: gate and up take 32 rows a program, the channels
in two shares of one wgmma (rows 32 to 63 of the tile are the second half of the channels), and down adds a
token's experts itself, one after another, in the order of ids.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.experts_hopper import SHARED_W, Packed, expand, place_of, quantise
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.linear_hopper import SHARED_X, wide
from cedar.kernels.weights_hopper import _COPY, _GROUPS4, _WORDS4
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED_W3 = gl.constexpr(gl.NVMMASharedLayout(64, 32, 3))


@gluon.jit
def _round(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def shared_scales(scale, block, columns: gl.constexpr, ROWS: gl.constexpr):
    """E8M0 of 64 tile rows: row r % ROWS, share r // ROWS of the channels."""
    r3 = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS4)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _GROUPS4)))
    share: gl.constexpr = columns // 32 * ROWS // 64
    return gl.load(
        scale
        + (r3 % ROWS)[:, None] * (columns // 32)
        + (r3 // ROWS)[:, None] * share
        + block * 4
        + group[None, :]
    )


@gluon.jit
def diagonal(acc, KQ: gl.constexpr):
    """[64 / KQ] of an accumulator [64, 8] whose rows and columns hold KQ shares: column 0 of each share,
    added.
    """
    L: gl.constexpr = wide(4, 8)
    ROWS: gl.constexpr = 64 // KQ
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    own = (r // ROWS * (8 // KQ))[:, None] == n[None, :]
    return gl.sum(gl.reshape(gl.sum(gl.where(own, acc, 0.0), axis=1), [KQ, ROWS]), axis=0)


@gluon.jit
def hidden_one(
    w1_desc,
    w3_desc,
    x_ptr,
    ids_ptr,
    weight_ptr,
    s1_ptr,
    s3_ptr,
    out_ptr,
    inner,
    k,
    limit,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (inner / 32, slots): a slot's expert, 32 rows a program, the channels in two shares."""
    KQ: gl.constexpr = 2
    ROWS: gl.constexpr = 32
    BLOCKS: gl.constexpr = COLUMNS // 256
    slot_ = gl.program_id(1)
    row = gl.program_id(0) * ROWS
    g_s = gl.allocate_shared_memory(gl.int32, [STAGES, KQ, ROWS, 16], SHARED_W3)
    u_s = gl.allocate_shared_memory(gl.int32, [STAGES, KQ, ROWS, 16], SHARED_W3)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 8, 128], SHARED_X)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_flat = g_s._reinterpret(gl.int32, [STAGES, 64, 16], SHARED_W)
    u_flat = u_s._reinterpret(gl.int32, [STAGES, 64, 16], SHARED_W)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    grid_wait()
    grid_release()
    expert = gl.load(ids_ptr + slot_).to(gl.int32)
    base = expert * inner + row
    scale1 = s1_ptr + base.to(gl.int64) * (COLUMNS // 32)
    scale3 = s3_ptr + base.to(gl.int64) * (COLUMNS // 32)
    n = gl.arange(0, 8, layout=gl.SliceLayout(1, _COPY))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))
    from_ = x_ptr + (slot_ // k).to(gl.int64) * COLUMNS + (n // 4)[:, None] * (BLOCKS * 128) + c[None, :]
    for i in gl.static_range(STAGES - 1):
        if i < BLOCKS:
            mbarrier.expect(bars.index(i), 8192)
            tma.async_copy_global_to_shared(w1_desc, [0, base, i * 16], bars.index(i), g_s.index(i))
            tma.async_copy_global_to_shared(w3_desc, [0, base, i * 16], bars.index(i), u_s.index(i))
            async_copy.async_copy_global_to_shared(x_s.index(i), from_ + i * 128)
        async_copy.commit_group()
    gate = gl.full([64, 8], 0.0, gl.float32, wide(4, 8))
    up = gl.full([64, 8], 0.0, gl.float32, wide(4, 8))
    g_scales = shared_scales(scale1, 0, COLUMNS, ROWS)
    u_scales = shared_scales(scale3, 0, COLUMNS, ROWS)
    g_next = shared_scales(scale1, 1 if BLOCKS > 1 else 0, COLUMNS, ROWS)
    u_next = shared_scales(scale3, 1 if BLOCKS > 1 else 0, COLUMNS, ROWS)
    for turn in range(BLOCKS):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        fill = turn + STAGES - 1
        to = fill % STAGES
        there = fill < BLOCKS
        mbarrier.expect(bars.index(to), 8192, pred=there)
        tma.async_copy_global_to_shared(
            w1_desc, [0, base, fill * 16], bars.index(to), g_s.index(to), pred=there
        )
        tma.async_copy_global_to_shared(
            w3_desc, [0, base, fill * 16], bars.index(to), u_s.index(to), pred=there
        )
        async_copy.async_copy_global_to_shared(
            x_s.index(to), from_ + fill * 128, mask=there & (n >= 0)[:, None]
        )
        async_copy.commit_group()
        right = x_s.index(slot).permute((1, 0))
        ahead = gl.minimum(turn + 2, BLOCKS - 1)
        left = expand(g_flat.index(slot).load(_WORDS4), g_scales, 8)
        g_scales = g_next
        g_next = shared_scales(scale1, ahead, COLUMNS, ROWS)
        gate = warpgroup_mma(left, right, gate)
        left = expand(u_flat.index(slot).load(_WORDS4), u_scales, 8)
        u_scales = u_next
        u_next = shared_scales(scale3, ahead, COLUMNS, ROWS)
        up = warpgroup_mma(left, right, up)
    async_copy.wait_group(0)
    a = gl.minimum(_round(diagonal(gate, KQ) * 4294967296.0), limit)
    b = gl.minimum(gl.maximum(_round(diagonal(up, KQ) * 4294967296.0), -limit), limit)
    weight = gl.load(weight_ptr + slot_)
    hidden = _round(a / (1.0 + gl.exp(-a)) * b * weight)
    amax = gl.maximum(gl.max(gl.abs(hidden), axis=0), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    down = ((254 - code) << 23).to(gl.float32, bitcast=True)
    back = gl.minimum(gl.maximum(hidden * down, -448.0), 448.0).to(gl.float8e4nv).to(gl.float32) * (
        code << 23
    ).to(gl.float32, bitcast=True)
    H: gl.constexpr = hidden.type.layout
    place = place_of(row + gl.arange(0, ROWS, layout=H))
    gl.store(out_ptr + slot_.to(gl.int64) * inner + place, back.to(gl.bfloat16))
    for j in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(j))


@gluon.jit
def output_one(
    w2_desc, x_ptr, ids_ptr, s2_ptr, out_ptr, outputs, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """Grid (outputs / 64, slots): w2 of a slot's hidden row, bf16."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    L: gl.constexpr = wide(4, 8)
    slot_ = gl.program_id(1)
    row = gl.program_id(0) * 64
    w_s = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 16], SHARED_W)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 8, 128], SHARED_X)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    grid_wait()
    grid_release()
    n = gl.arange(0, 8, layout=gl.SliceLayout(1, _COPY))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))
    from_ = x_ptr + slot_.to(gl.int64) * COLUMNS + (n * 0)[:, None] + c[None, :]
    base = gl.load(ids_ptr + slot_).to(gl.int32) * outputs + row
    for i in gl.static_range(STAGES - 1):
        if i < BLOCKS:
            mbarrier.expect(bars.index(i), 4096)
            tma.async_copy_global_to_shared(w2_desc, [base, i * 16], bars.index(i), w_s.index(i))
            async_copy.async_copy_global_to_shared(x_s.index(i), from_ + i * 128)
        async_copy.commit_group()
    acc = gl.full([64, 8], 0.0, gl.float32, L)
    scale = s2_ptr + base.to(gl.int64) * (COLUMNS // 32)
    scales = shared_scales(scale, 0, COLUMNS, 64)
    scales1 = shared_scales(scale, 1 if BLOCKS > 1 else 0, COLUMNS, 64)
    for turn in range(BLOCKS):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        fill = turn + STAGES - 1
        to = fill % STAGES
        there = fill < BLOCKS
        mbarrier.expect(bars.index(to), 4096, pred=there)
        tma.async_copy_global_to_shared(w2_desc, [base, fill * 16], bars.index(to), w_s.index(to), pred=there)
        async_copy.async_copy_global_to_shared(
            x_s.index(to), from_ + fill * 128, mask=there & (n >= 0)[:, None]
        )
        async_copy.commit_group()
        left = expand(w_s.index(slot).load(_WORDS4), scales, 8)
        scales = scales1
        scales1 = shared_scales(scale, gl.minimum(turn + 2, BLOCKS - 1), COLUMNS, 64)
        acc = warpgroup_mma(left, x_s.index(slot).permute((1, 0)), acc)
    async_copy.wait_group(0)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    first = gl.arange(0, 8, layout=gl.SliceLayout(0, L))[None, :] == 0
    at = slot_.to(gl.int64) * outputs + r[:, None] + gl.full([64, 8], 0, gl.int32, L)
    gl.store(out_ptr + at, (acc * 4294967296.0).to(gl.bfloat16), mask=first)
    for j in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(j))


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: Packed,
    limit: float,
) -> torch.Tensor:
    """bf16 [N·k, d]: every slot's output, as `experts_hopper.experts`, for a handful of tokens; all
    contiguous.
    """
    tokens, k = ids.shape
    width = x.shape[1]
    (w1, s1), (w3, s3), (w2, s2) = packed
    count, inner = w1.shape[:2]
    seen = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    quantise[(triton.cdiv(tokens, 8), width // 128)](
        x, seen, tokens, width, x.stride(0), num_warps=4, launch_pdl=True
    )
    filled = torch.empty(tokens * k, inner, dtype=torch.bfloat16, device=x.device)
    words = width // 8
    d1, d3 = (
        TensorDescriptor(
            w.view(torch.int32),
            [2, count * inner, words // 2],
            [words // 2, words, 1],
            [2, 32, 16],
            SHARED_W3.value,
        )
        for w in (w1, w3)
    )
    hidden_one[(inner // 32, tokens * k)](
        d1, d3, seen, ids, weights, s1, s3, filled, inner, k, limit, width, 5, num_warps=4, launch_pdl=True
    )
    y = torch.empty(tokens * k, width, dtype=torch.bfloat16, device=x.device)
    d2 = TensorDescriptor.from_tensor(
        w2.view(torch.int32).view(count * width, inner // 8), [64, 16], SHARED_W.value
    )
    output_one[(width // 64, tokens * k)](
        d2, filled, ids, s2, y, width, inner, 8, num_warps=4, launch_pdl=True
    )
    return y
