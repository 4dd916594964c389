# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A sublayer's boundary and mix for many tokens on Hopper, one launch: every byte read once and written once
(spec §6).

A group of programs takes tile after tile of 64 tokens, each program its share of the channels. Eight warps
expand and collapse, 64 channels at a time, in the ring of blocks that bulk copies fill; four multiply the new
streams by the projection, send them off and refill the ring; four split the projection for them. The
collapsed row replaces the sublayer's output where that was copied to, and waits there for the group's sum of
squares, so that the norm reads no memory, while the next tile's blocks are already in work.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.grid_hopper import COUNTER_STEP, barrier, counters, grid_release, grid_wait
from cedar.kernels.mhc_expand_hopper import expand
from cedar.kernels.mhc_hopper import FLAT, TILE
from cedar.kernels.mhc_project_hopper import multiply, split_projection
from cedar.kernels.mhc_rounds_hopper import AHEAD, STAGES, T
from cedar.kernels.prepared import Prepared
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCKS = 10  # of 64 channels, the most whose rows a program keeps
PROGRAMS = 132
EXPAND_WARPS, MULTIPLY_WARPS, SPLIT_WARPS = gl.constexpr(8), gl.constexpr(4), gl.constexpr(4)
REGISTERS = gl.constexpr(104)  # of a thread that multiplies or splits


def plan(tokens: int, width: int) -> tuple[int, int]:
    """Programs that share a tile's channels, and groups of them: one program a multiprocessor."""
    splits = triton.cdiv(width // 64, BLOCKS)
    return splits, min(triton.cdiv(tokens, 64), max(1, PROGRAMS // splits))


@gluon.jit(do_not_specialize=["tokens"])
def sublayer_rounds(
    x_desc, y_desc, out_desc, row_desc, post_ptr, comb_ptr, pre_ptr, norm_ptr, fn_ptr, scale_ptr, base_ptr,
    codes_ptr, code_scale_ptr, part_ptr, rows_ptr, count_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr,
    tokens, width, eps, mix_eps, hc_eps, rounds,
    SPLITS: gl.constexpr, SP2: gl.constexpr, TS: gl.constexpr, SLOTS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, groups), all of a group running; BLOCKS of 64 channels a program at most, TS tokens of a
    tile mixed by each.
    """
    # Apart, for the compiler puts a barrier between accesses to one.
    x0_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T, 64], TILE)
    x1_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T, 64], TILE)
    x2_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T, 64], TILE)
    x3_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T, 64], TILE)
    x_s = (x0_s, x1_s, x2_s, x3_s)
    row_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, T, 64], TILE)
    wide0_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    wide1_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    rest0_s = gl.allocate_shared_memory(gl.bfloat16, [32, 64], TILE)
    rest1_s = gl.allocate_shared_memory(gl.bfloat16, [32, 64], TILE)
    c_s = gl.allocate_shared_memory(gl.float32, [32 * T], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    split_s = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    spent_s = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(y_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(split_s.index(i), count=1)
        mbarrier.init(spent_s.index(i), count=1)
    fence_async_shared()
    grid_wait()
    grid_release()
    cell = count_ptr + gl.program_id(1) * (2 * COUNTER_STEP)
    z_cell = cell + COUNTER_STEP
    base = gl.load(cell, volatile=True) & -64
    z_base = gl.load(z_cell, volatile=True) & -64
    barrier()
    gl.warp_specialize(
        [
            (expand, (
                y_desc, row_desc, post_ptr, comb_ptr, pre_ptr, norm_ptr, codes_ptr, code_scale_ptr, part_ptr,
                rows_ptr, cell, base, tokens, width, eps, x_s, row_s, c_s, full, y_full, ready,
                SPLITS, SLOTS, CODES,
            )),
            (multiply, (
                x_desc, out_desc, scale_ptr, base_ptr, part_ptr, new_pre_ptr, new_post_ptr,
                new_comb_ptr, cell, base, z_cell, z_base, tokens, width, mix_eps, hc_eps, rounds,
                x_s, (wide0_s, wide1_s), (rest0_s, rest1_s), full, ready, split_s, spent_s, SPLITS, SP2, TS,
            )),
            (split_projection, (
                fn_ptr, tokens, width, (wide0_s, wide1_s), (rest0_s, rest1_s), split_s, spent_s, SPLITS,
            )),
        ],
        [MULTIPLY_WARPS, SPLIT_WARPS], [REGISTERS, REGISTERS],
    )  # fmt: skip


def sublayer(
    given: tuple[torch.Tensor, ...],
    result: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]],
    codes: Prepared | None,
    tokens: int,
    eps: float,
    mix_eps: float,
    hc_eps: float,
    rounds: int,
) -> None:
    """As `mhc_hopper.sublayer`."""
    x, y, post, comb, pre, norm, fn, scale, base = given
    streams, row, mixed = result
    width, device = x.shape[2], x.device
    splits, groups = plan(tokens, width)
    tiles = triton.cdiv(tokens, 64)
    part = torch.empty(tiles * splits, 64, 32, dtype=torch.float32, device=device)
    squares = torch.empty(tiles * splits, 64, dtype=torch.float64, device=device)
    x_desc, out_desc = (
        TensorDescriptor.from_tensor(t.view(tokens, 4 * width), [64, 64], TILE.value) for t in (x, streams)
    )
    y_desc, row_desc = (TensorDescriptor.from_tensor(t, [64, 64], TILE.value) for t in (y, row))
    sublayer_rounds[(splits, groups)](
        x_desc, y_desc, out_desc, row_desc, post, comb, pre, norm, fn, scale, base,
        *((codes.values, codes.scale) if codes else (row, row)), part, squares, counters(device.index or 0),
        *mixed, tokens, width, eps, mix_eps, hc_eps, rounds, splits, triton.next_power_of_2(splits),
        triton.next_power_of_2(triton.cdiv(64, splits)), triton.cdiv(width // 64, splits) + AHEAD.value,
        codes is not None, num_warps=EXPAND_WARPS.value, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
