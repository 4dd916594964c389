# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The grouped output projection of many tokens on Hopper, quantised, read back and in the order in which
`linear_bulk_hopper` meets it: one launch.

Rows of a group's weights are wgmma's rows, tokens its columns. A program has whole sums of 128 neighbouring
outputs, four scale groups.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.experts_hopper import round_trip_rows
from cedar.kernels.grid_hopper import grid_release, grid_wait
from cedar.kernels.linear_bulk_hopper import (
    CONSUMER_REGISTERS,
    LOADER_REGISTERS,
    TILE16,
    TOGETHER,
    tile_of,
)
from cedar.kernels.linear_triton import GROUPED, multiprocessors
from cedar.kernels.prepared import Prepared
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

ROWS = 128  # of weights a program
TOKENS = 256  # a program
STAGES = 4  # of 64 channels


@gluon.jit
def _load(
    w_desc, o_desc, w_s, o_s, bars, free, tokens, outputs, programs, rank,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Asks for weights and activations in turn, tile after tile."""
    STEPS: gl.constexpr = COLUMNS // 64
    first = 0
    for number in range(gl.program_id(0), programs, gl.num_programs(0)):
        row, token = tile_of(number, tokens, outputs, N, TOGETHER, False)
        column = row // rank * COLUMNS
        for step in range(STEPS):
            turn = first + step
            slot = turn % STAGES
            bar = bars.index(slot)
            mbarrier.wait(free.index(slot), (turn // STAGES - 1) & 1, pred=turn >= STAGES)
            mbarrier.expect(bar, (128 + N) * 128)
            tma.async_copy_global_to_shared(w_desc, [row, step * 64], bar, w_s.index(slot))
            tma.async_copy_global_to_shared(o_desc, [token, column + step * 64], bar, o_s.index(slot))
        first += STEPS


@gluon.jit
def _multiply(
    w_s, o_s, bars, free, out_ptr, tokens, outputs, programs,
    HALF: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """One half of the tiles' rows: four warps, one product always on its way."""
    STEPS: gl.constexpr = COLUMNS // 64
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    J: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    first = 0
    for number in range(gl.program_id(0), programs, gl.num_programs(0)):
        row, token = tile_of(number, tokens, outputs, N, TOGETHER, False)
        acc = gl.full([64, N], 0.0, gl.float32, W)
        for pair in range(STEPS // 2):
            for i in gl.static_range(2):
                turn = first + 2 * pair + i
                slot = turn % STAGES
                mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
                w = w_s.index(slot).slice(64 * HALF, 64, dim=0)
                acc = warpgroup_mma(w, o_s.index(slot).permute((1, 0)), acc, is_async=True)
                if i > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    mbarrier.arrive(free.index((turn - 1) % STAGES), count=1)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(free.index(slot), count=1)
        first += STEPS
        seen = round_trip_rows(gl.reshape(acc.to(gl.bfloat16).to(gl.float32), [2, 32, N])).to(gl.bfloat16)
        parts = gl.permute(gl.reshape(seen, [2, 4, 2, 2, 2, N]), (0, 2, 3, 1, 4, 5))
        y = gl.convert_layout(gl.reshape(parts, [64, N]), J)
        t = gl.arange(0, N, layout=gl.SliceLayout(0, J))
        place = row + 64 * HALF + gl.arange(0, 64, layout=gl.SliceLayout(1, J))
        to = out_ptr + token.to(gl.int64) * outputs + (t[None, :] * outputs + place[:, None])
        gl.store(to, y, mask=(token + t < tokens)[None, :])


@gluon.jit
def grouped_bulk(
    w_desc, o_desc, out_ptr, tokens, outputs, programs, rank,
    COLUMNS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
    CONSUMERS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Grid (at most a program a multiprocessor), 4 warps and 8 more: o [tokens, groups · COLUMNS], weights
    [groups · rank, COLUMNS], in `programs` tiles of 128 rows and N tokens; out bf16 [tokens, groups · rank].
    """
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], TILE16)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 64], TILE16)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    grid_wait()
    grid_release()
    gl.warp_specialize(
        [
            (_multiply, (
                w_s, o_s, bars, free, out_ptr, tokens, outputs, programs, 0, COLUMNS, STAGES, N, TOGETHER,
            )),
            (_multiply, (
                w_s, o_s, bars, free, out_ptr, tokens, outputs, programs, 1, COLUMNS, STAGES, N, TOGETHER,
            )),
            (_load, (
                w_desc, o_desc, w_s, o_s, bars, free, tokens, outputs, programs, rank, COLUMNS, STAGES, N,
                TOGETHER,
            )),
        ],
        [4, 4], [CONSUMERS, LOADER],
    )  # fmt: skip


def fits(o: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this kernel takes o [N, G, C] and weight bf16 [G, r, C], of Hopper's tensors."""
    columns = o.shape[2]
    return columns % 128 == 0 and weight.shape[1] % ROWS == 0 and o.is_contiguous() and weight.is_contiguous()


def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> Prepared:
    """[N, G·r] in the order GROUPED of o bf16 [N, G, C] times weight bf16 [G, r, C] per group."""
    tokens, groups, columns = o.shape
    rank = weight.shape[1]
    outputs = groups * rank
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=o.device)
    programs = outputs // ROWS * triton.cdiv(tokens, TOKENS)
    grouped_bulk[(min(programs, multiprocessors(o.device.index or 0)),)](
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [ROWS, 64], TILE16.value),
        TensorDescriptor(o, [tokens, groups * columns], [groups * columns, 1], [TOKENS, 64], TILE16.value),
        out, tokens, outputs, programs, rank, columns, TOKENS, STAGES, TOGETHER, CONSUMER_REGISTERS,
        LOADER_REGISTERS, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return Prepared(out, GROUPED)
