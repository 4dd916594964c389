# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The grouped output projection of 17 to 64 tokens on Hopper, quantised for the product that reads it next:
one launch. For more of them the library's product and a launch that quantises are faster.

Tokens are wgmma's rows, rows of a group's weights its columns; both stream through shared memory by bulk
copies. A program has whole sums of 32 neighbouring outputs, one scale group, so it can quantise them.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
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
FEW = 16  # tokens up to which the next product quantises them on its way
MOST = 64  # tokens up to which this beats the library's product and a launch that quantises
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
    """Grid (groups · rank / R, ceil(tokens / M)): o [tokens, groups · COLUMNS], weights [groups · rank,
    COLUMNS]; E4M3 [tokens, groups · rank] and a scale byte for every 32.
    """
    W: gl.constexpr = sums(WARPS, M, R)
    BLOCKS: gl.constexpr = COLUMNS // 64
    row = gl.program_id(0) * R
    token = gl.program_id(1) * M
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
        tma.async_copy_global_to_shared(o_desc, [token, column + i * 64], bars.index(i), o_s.index(i))
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
            o_desc, [token, column + next * 64], bars.index(slot), o_s.index(slot), pred=more
        )
    groups = gl.reshape(acc.to(gl.bfloat16).to(gl.float32), [M, R // 32, 32])
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    C: gl.constexpr = code.type.layout
    t3 = token + gl.arange(0, M, layout=gl.SliceLayout(1, C))
    g3 = row // 32 + gl.arange(0, R // 32, layout=gl.SliceLayout(0, C))
    at = code_ptr + t3[:, None].to(gl.int64) * (outputs // 32) + g3[None, :]
    gl.store(at, code.to(gl.uint8), mask=(t3 < tokens)[:, None])
    wide = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    down = ((254 - wide) << 23).to(gl.float32, bitcast=True)
    byte = gl.convert_layout(gl.reshape((groups * down).to(gl.float8e4nv), [M, R]), W)
    t2 = token + gl.arange(0, M, layout=gl.SliceLayout(1, W))
    r2 = row + gl.arange(0, R, layout=gl.SliceLayout(0, W))
    gl.store(out_ptr + t2[:, None].to(gl.int64) * outputs + r2[None, :], byte, mask=(t2 < tokens)[:, None])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))


def fits(o: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this kernel takes o [N, G, C] and weight bf16 [G, r, C]."""
    return (
        FEW < o.shape[0] <= MOST
        and hopper(o.device.index or 0)
        and o.shape[2] % 64 == 0
        and weight.shape[1] % ROWS == 0
        and o.is_contiguous()
        and weight.is_contiguous()
    )


def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> Prepared:
    """Codes [N, G·r] of o bf16 [N, G, C] times weight bf16 [G, r, C] per group."""
    tokens, groups, columns = o.shape
    rank = weight.shape[1]
    outputs = groups * rank
    values = torch.empty(tokens, outputs, dtype=torch.float8_e4m3fn, device=o.device)
    scale = torch.empty(tokens, outputs // 32, dtype=torch.uint8, device=o.device)
    grouped_codes[(outputs // ROWS, triton.cdiv(tokens, MOST))](
        TensorDescriptor(o, [tokens, groups * columns], [groups * columns, 1], [MOST, 64], TILE16.value),
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [ROWS, 64], TILE16.value),
        values, scale, tokens, rank, columns, MOST, ROWS, min(12, columns // 64), 4,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return Prepared(values, CODES, scale)
