# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts of very few tokens on Hopper: a tile is one slot, nothing is sorted (spec §3).

The products of `bands_hopper`, but with one slot a tile the product's eight columns are four groups of 32
channels, each in two bands: a chain of four steps has one sum, in which a column is a group's, and the
columns are added at the end. So a block of 128 channels of activations is a tile of eight rows, a group and
band each, with that group's bytes where its channels are and zeros elsewhere: `quantise_columns` writes such
tiles, uint8 [N, channels / 128, 8, 128], and so do gate and up.
"""

from __future__ import annotations

import torch
from cedar.kernels.bands_hopper import (
    FLAT,
    SHARED_W,
    SUM,
    bands,
    code_of,
    copy_scales,
    operands,
    raw4,
    scale_of,
    to_bytes,
)
from cedar.kernels.experts_fp8_hopper import Packed
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

STAGES = (4, 5)  # of 11 KB, gate and up, down: four programs a multiprocessor
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPY_XS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
GROUPS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # [8 groups, 32 channels]
# [groups, its tile's eight places of 32 bytes: band and column, bytes]
_PLACES = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
# The scales of 64 rows and four groups, of which a thread has those of its columns: [64, band, group].
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]],
        [[0, 0, 2], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 2, 4],
    )
)


@gluon.jit
def store_columns(out, q, group):
    """Bytes q [G, 32] (natural order) of groups `group` int32 [G] to their rows of the tiles at `out`."""
    coarse, fine = bands(gl.convert_layout(q, gl.SliceLayout(1, _PLACES)))
    group = gl.convert_layout(group, gl.SliceLayout(1, gl.SliceLayout(2, _PLACES)))[:, None]
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, _PLACES)))[None, :]
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, _PLACES)))[None, None, :]
    value = gl.where((j < 4)[:, :, None], coarse[:, None, :], fine[:, None, :])
    value = gl.where((group % 4 == j % 4)[:, :, None], value, 0).to(gl.uint8)
    at = group // 4 * 1024 + j // 4 * 512 + group % 4 * 128 + j % 4 * 32
    gl.store(out + at[:, :, None] + c % 2 * 16 + c // 2, value)


@gluon.jit
def quantise_columns(x_ptr, out_ptr, scale_ptr, columns, x_stride):
    """Grid (tokens, columns / 256): as tiles of eight rows."""
    grid_wait()
    grid_release()
    token = gl.program_id(0).to(gl.int64)
    g = gl.program_id(1) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, GROUPS))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, GROUPS))
    x = gl.load(x_ptr + token * x_stride + g[:, None] * 32 + c[None, :]).to(gl.float32)
    code = code_of(gl.max(gl.abs(x), axis=1))
    store_columns(out_ptr + token * (8 * columns), to_bytes(x, code[:, None]), g)
    gl.store(scale_ptr + token * (columns // 32) + g, scale_of(code))


@gluon.jit
def scales_of(s_s, t_s, HALF: gl.constexpr):
    """Weights' scales times activations', [64, 8], of four groups."""
    w = s_s.slice(4 * HALF, 4, dim=1).load(gl.SliceLayout(1, _SCALES)).to(gl.int32) << 23
    t = t_s.slice(4 * HALF, 4, dim=0).load(gl.SliceLayout(0, gl.SliceLayout(1, _SCALES)))
    wide = w[:, None, :] + gl.full([64, 2, 4], 0, gl.int32, _SCALES)
    return gl.convert_layout(gl.reshape(wide.to(gl.float32, bitcast=True) * t[None, None, :], [64, 8]), SUM)


@gluon.jit
def product(total, w_s, first_x, second_x, s_s, t_s):
    """total [64, 8] and the product of 256 channels, two chains of four groups."""
    L: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    zero = gl.full([64, 8], 0.0, gl.float32, SUM)
    halves = gl.permute(gl.reshape(operands(w_s.load(raw4(8)), 8), [64, 2, 128]), (0, 2, 1))
    first, second = gl.split(halves)
    first, second = gl.convert_layout(first, L), gl.convert_layout(second, L)
    a = warpgroup_mma(first, first_x.permute((1, 0)), zero, use_acc=False, is_async=True)
    b = warpgroup_mma(second, second_x.permute((1, 0)), zero, use_acc=False, is_async=True)
    s, t = scales_of(s_s, t_s, 0), scales_of(s_s, t_s, 1)
    a, b = warpgroup_mma_wait(0, deps=(a, b))
    total += a * s
    return total + b * t


@gluon.jit
def one_slot(
    first_desc, second_desc, x_desc, xs_ptr, ids_ptr, weight_ptr, first_scale_ptr, second_scale_ptr, out_ptr,
    out_scale_ptr, outputs, k, experts, limit,
    COLUMNS: gl.constexpr, XS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / 32 or 64, slots): a slot's expert with its row (slot // k) of x.

    GATED: 32 rows of each of two weights, gate and up; clamp, SwiGLU, routing weight, quantised as
    `quantise_columns` does. Else 64 rows of one weight (given twice), bf16 [slots, outputs]. The
    ids may be read, and weights asked for, before `grid_wait`: they are older than the launch before.
    """
    BLOCKS: gl.constexpr = COLUMNS // 256
    SECOND: gl.constexpr = 0 if GATED else 32
    slot = gl.program_id(1)
    row = gl.program_id(0) * (32 if GATED else 64)
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 32, 128], SHARED_W)
    w_tall = w_s._reinterpret(gl.uint8, [STAGES, 64, 128], SHARED_W)
    x_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 128], SHARED_W)
    x_tiles = x_s._reinterpret(gl.float8e4nv, [STAGES * 2, 8, 128], SHARED_W)
    s_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 8], FLAT)
    t_s = gl.allocate_shared_memory(gl.float32, [XS], LINE)
    t_rows = t_s._reinterpret(gl.float32, [XS // 8, 8], LINE)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    chosen = gl.minimum(gl.maximum(gl.load(ids_ptr + slot), 0), experts - 1)  # nothing beside the weights
    base = chosen.to(gl.int32) * outputs + row
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, copy_scales(8)))
    scale_at = (base + r % 32).to(gl.int64) * (COLUMNS // 32)
    scale = gl.where(
        r < 32, first_scale_ptr + scale_at, second_scale_ptr + SECOND * (COLUMNS // 32) + scale_at
    )
    scale = (
        gl.multiple_of(scale, 8)[:, None] + gl.arange(0, 8, layout=gl.SliceLayout(0, copy_scales(8)))[None, :]
    )
    x_row = slot // k * (BLOCKS * 16)
    for i in gl.static_range(STAGES - 1):
        if i < BLOCKS:
            mbarrier.expect(bars.index(i), 10240)
            tma.async_copy_global_to_shared(first_desc, [base, i * 128], bars.index(i), w_s.index(2 * i))
            tma.async_copy_global_to_shared(
                second_desc, [base + SECOND, i * 128], bars.index(i), w_s.index(2 * i + 1)
            )
            async_copy.async_copy_global_to_shared(s_s.index(i), scale + i * 8)
    grid_wait()
    grid_release()
    for i in gl.static_range(STAGES - 1):
        if i < BLOCKS:
            tma.async_copy_global_to_shared(x_desc, [x_row + i * 16, 0], bars.index(i), x_s.index(i))
    e = gl.arange(0, XS, layout=COPY_XS)
    xs = xs_ptr + (slot // k).to(gl.int64) * (COLUMNS // 32) + e
    async_copy.async_copy_global_to_shared(t_s, xs, mask=e < COLUMNS // 32)
    async_copy.commit_group()
    async_copy.wait_group(0)
    total = gl.full([64, 8], 0.0, gl.float32, SUM)
    for turn in range(BLOCKS):
        stage = turn % STAGES
        mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
        async_copy.wait_group(STAGES - 2)
        barrier()
        fill = turn + STAGES - 1
        to = fill % STAGES
        there = fill < BLOCKS
        mbarrier.expect(bars.index(to), 10240, pred=there)
        tma.async_copy_global_to_shared(
            first_desc, [base, fill * 128], bars.index(to), w_s.index(2 * to), pred=there
        )
        tma.async_copy_global_to_shared(
            second_desc, [base + SECOND, fill * 128], bars.index(to), w_s.index(2 * to + 1), pred=there
        )
        tma.async_copy_global_to_shared(
            x_desc, [x_row + fill * 16, 0], bars.index(to), x_s.index(to), pred=there
        )
        async_copy.async_copy_global_to_shared(
            s_s.index(to), scale + fill * 8, mask=there & (r >= 0)[:, None]
        )
        async_copy.commit_group()
        total = product(
            total, w_tall.index(stage), x_tiles.index(2 * stage), x_tiles.index(2 * stage + 1),
            s_s.index(stage), t_rows.index(turn),
        )  # fmt: skip
    async_copy.wait_group(0)
    y = gl.sum(total, axis=1)
    if GATED:
        both = gl.reshape(y, [2, 32])
        which = gl.arange(0, 2, layout=gl.SliceLayout(1, both.type.layout))[:, None]
        gate = gl.sum(gl.where(which == 0, both, 0.0), axis=0).to(gl.bfloat16).to(gl.float32)
        up = gl.sum(gl.where(which == 1, both, 0.0), axis=0).to(gl.bfloat16).to(gl.float32)
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        weight = gl.load(weight_ptr + slot)
        hidden = (gate / (1.0 + gl.exp(-gate)) * up * weight).to(gl.bfloat16).to(gl.float32)
        code = code_of(gl.max(gl.abs(hidden), axis=0))
        q = gl.convert_layout(to_bytes(hidden, code), gl.SliceLayout(0, GROUPS))[None, :]
        group = row // 32 + gl.arange(0, 1, layout=gl.SliceLayout(1, GROUPS))
        store_columns(out_ptr + slot.to(gl.int64) * (8 * outputs), q, group)
        gl.store(out_scale_ptr + slot * (outputs // 32) + row // 32, scale_of(code))
    else:
        at = slot.to(gl.int64) * outputs + row + gl.arange(0, 64, layout=gl.SliceLayout(1, SUM))
        gl.store(out_ptr + at, y.to(gl.bfloat16))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))


def _tiles(x: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x.view(-1, 128), [16, 128], SHARED_W.value)


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: Packed, limit: float
) -> torch.Tensor:
    """bf16 [N·k, d]: every slot's output, as `experts_fp8_hopper.experts`, for a handful of tokens.

    Both widths are multiples of 256.
    """
    tokens, k = ids.shape
    width = x.shape[1]
    (w1, s1), (w3, s3), (w2, s2) = packed
    inner = w1.shape[1]
    rows = torch.empty(tokens, 8 * width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, width // 32, dtype=torch.float32, device=x.device)
    quantise_columns[(tokens, width // 256)](
        x, rows, scales, width, x.stride(0), num_warps=4, launch_pdl=True
    )
    hidden = torch.empty(tokens * k, 8 * inner, dtype=torch.uint8, device=x.device)
    hidden_scales = torch.empty(tokens * k, inner // 32, dtype=torch.float32, device=x.device)
    d1, d3, d2 = (
        TensorDescriptor.from_tensor(w.view(-1, w.shape[2]), [32, 128], SHARED_W.value) for w in (w1, w3, w2)
    )
    one_slot[(inner // 32, tokens * k)](
        d1, d3, _tiles(rows), scales, ids, weights, s1, s3, hidden, hidden_scales, inner, k,
        len(w1), limit, width, next_power_of_2(width // 32), STAGES[0], True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    y = torch.empty(tokens * k, width, dtype=torch.bfloat16, device=x.device)
    one_slot[(width // 64, tokens * k)](
        d2, d2, _tiles(hidden), hidden_scales, ids, weights, s2, s2, y, hidden_scales, width, 1,
        len(w2), limit, inner, next_power_of_2(inner // 32), STAGES[1], False, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y
