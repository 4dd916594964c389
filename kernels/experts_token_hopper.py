# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed and shared experts of one token on Hopper: gate and up in one launch, down and the sum in another
(spec §3).

A program streams 64 rows of weights of one expert, as in `experts_one_hopper`; the shared expert's are E4M3,
of which a block of 128 channels takes the place of 256 of the others'. Its programs come first, because they
have twice the bytes, and theirs are the weights that are known before the router has chosen.
"""

from __future__ import annotations

import torch
from cedar.kernels.bands_hopper import FLAT, SHARED_W, SUM, code_of, copy_scales, scale_of, to_bytes
from cedar.kernels.experts_fp8_hopper import Packed
from cedar.kernels.experts_one_hopper import COPY_XS, GROUPS, LINE, product, scales_of, store_columns
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

STAGES = (4, 4)  # of 11 KB, gate and up, down: four programs a multiprocessor, or five
_SUMS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# E4M3 bytes of 64 rows, 128 channels: a thread has eight of each group of two rows.
_RAW8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@gluon.jit
def _product8(total, w_s, x, s_s, t_s):
    """total [64, 8] and the product of 128 channels of E4M3 weights, a chain of four groups."""
    L: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    zero = gl.full([64, 8], 0.0, gl.float32, SUM)
    raw = gl.permute(gl.reshape(w_s.load(_RAW8), [64, 4, 16, 2]), (0, 1, 3, 2))  # even channels first
    left = gl.convert_layout(gl.reshape(raw, [64, 128]).to(gl.float8e4nv, bitcast=True), L)
    a = warpgroup_mma(left, x.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = scales_of(s_s, t_s, 0)
    a = warpgroup_mma_wait(0, deps=[a])
    return total + a * s


@gluon.jit
def _ask(
    first_desc, second_desc, first_row, second_row, scale, turn, to, there, w_s, s_s, bars, FP8: gl.constexpr
):  # fmt: skip
    """Starts the copies of a turn's weights and scales into stage `to`, if there is such a turn."""
    mbarrier.expect(bars.index(to), 9216 if FP8 else 10240, pred=there)
    tma.async_copy_global_to_shared(
        first_desc, [first_row, turn * 128], bars.index(to), w_s.index(2 * to), pred=there
    )
    tma.async_copy_global_to_shared(
        second_desc, [second_row, turn * 128], bars.index(to), w_s.index(2 * to + 1), pred=there
    )
    EACH: gl.constexpr = scale.shape[1]
    every = gl.full([64, EACH], 0, gl.int32, scale.type.layout) == 0
    goal = s_s.index(to).slice(0, EACH, dim=1)
    async_copy.async_copy_global_to_shared(goal, scale + turn * EACH, mask=there & every)
    async_copy.commit_group()


@gluon.jit
def _ask_x(desc, row, turn, to, there, x_s, bars, FP8: gl.constexpr):
    """The same for its activations."""
    if FP8:
        tma.async_copy_global_to_shared(
            desc, [row + turn * 8, 0], bars.index(to), x_s.index(to).slice(0, 8), pred=there
        )
    else:
        tma.async_copy_global_to_shared(desc, [row + turn * 16, 0], bars.index(to), x_s.index(to), pred=there)


@gluon.jit
def _stream(
    first_desc, second_desc, first_row, second_row, scale, x_desc, x_row, xs_ptr, w_s, x_s, s_s, t_s, bars,
    COLUMNS: gl.constexpr, XS: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Products [64, 8] of 64 rows with one row of activations. EARLY: `grid_wait` is here, after the first
    weights are on their way.
    """
    TURNS: gl.constexpr = COLUMNS // (128 if FP8 else 256)
    w_tall = w_s._reinterpret(gl.uint8, [STAGES, 64, 128], SHARED_W)
    x_tiles = x_s._reinterpret(gl.float8e4nv, [STAGES * 2, 8, 128], SHARED_W)
    t_rows = t_s._reinterpret(gl.float32, [XS // (4 if FP8 else 8), 4 if FP8 else 8], LINE)
    for i in gl.static_range(STAGES - 1):
        there = first_row * 0 + i < TURNS
        _ask(first_desc, second_desc, first_row, second_row, scale, i, i, there, w_s, s_s, bars, FP8)
    if EARLY:
        grid_release()
        grid_wait()
    for i in gl.static_range(STAGES - 1):
        _ask_x(x_desc, x_row, i, i, first_row * 0 + i < TURNS, x_s, bars, FP8)
    e = gl.arange(0, XS, layout=COPY_XS)
    async_copy.async_copy_global_to_shared(t_s, xs_ptr + e, mask=e < COLUMNS // 32)
    async_copy.commit_group()
    async_copy.wait_group(0)
    total = gl.full([64, 8], 0.0, gl.float32, SUM)
    for turn in range(TURNS):
        stage = turn % STAGES
        mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
        async_copy.wait_group(STAGES - 2)
        barrier()
        fill = turn + STAGES - 1
        to = fill % STAGES
        there = fill < TURNS
        _ask(first_desc, second_desc, first_row, second_row, scale, fill, to, there, w_s, s_s, bars, FP8)
        _ask_x(x_desc, x_row, fill, to, there, x_s, bars, FP8)
        if FP8:
            total = _product8(
                total, w_tall.index(stage), x_tiles.index(2 * stage), s_s.index(stage), t_rows.index(turn)
            )
        else:
            total = product(
                total, w_tall.index(stage), x_tiles.index(2 * stage), x_tiles.index(2 * stage + 1),
                s_s.index(stage), t_rows.index(turn),
            )  # fmt: skip
    async_copy.wait_group(0)
    return total


@gluon.jit(do_not_specialize=["experts"])
def one_token(
    first_desc, second_desc, shared_desc, x_desc, x8_desc, xs_ptr, ids_ptr, weight_ptr, first_scale_ptr,
    second_scale_ptr, shared_scale_ptr, out_ptr, out_scale_ptr, count_ptr, total_ptr, outputs, limit,
    COLUMNS: gl.constexpr, XS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / 32 or 64, K + 1): row 0 is the shared expert's, row 1 + i choice i's; slot K is the
    shared expert's, slot i choice i's.

    GATED: 32 rows of each of two weights, gate and up (the shared expert's stand one over the other), times
    the token; clamp, SwiGLU, routing weight, quantised as `experts_one_hopper.quantise_columns` does. Else 64
    rows of one weight (given twice) times a slot's row; out bf16 [K + 1, outputs], and the last program of a
    block of outputs adds: total bf16 [outputs] is the choices' rows in fp32, first to last, and the shared
    one (count_ptr, zeros, is left as it was found). The ids are older than the launch before, then.
    """
    SECOND: gl.constexpr = 0 if GATED else 32
    row = gl.program_id(0) * (32 if GATED else 64)
    choice = gl.program_id(1) - 1
    slot = gl.where(choice < 0, K, choice)
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 32, 128], SHARED_W)
    x_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 128], SHARED_W)
    s_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 8], FLAT)
    t_s = gl.allocate_shared_memory(gl.float32, [XS], LINE)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    x_slot = 0 if GATED else slot
    xs = xs_ptr + x_slot * (COLUMNS // 32)
    x_row = x_slot * (COLUMNS // 16)
    if choice < 0:
        r4 = gl.arange(0, 64, layout=gl.SliceLayout(1, copy_scales(4)))
        g4 = gl.arange(0, 4, layout=gl.SliceLayout(0, copy_scales(4)))
        second = row + (outputs if GATED else 32)
        line4 = gl.where(r4 < 32, row, second) // 32 * (COLUMNS // 32)
        scale4 = gl.multiple_of(shared_scale_ptr + line4, 4)[:, None] + g4[None, :]
        total = _stream(
            shared_desc, shared_desc, row, second, scale4, x8_desc, x_row, xs, w_s, x_s, s_s, t_s, bars,
            COLUMNS, XS, STAGES, True, True,
        )  # fmt: skip
        total = total * 0.015625  # these weights are not 2^-6 of their value
        weight = gl.to_tensor(1.0)
    else:
        if GATED:
            grid_wait()
            grid_release()
        base = gl.load(ids_ptr + choice).to(gl.int32) * outputs + row
        weight = gl.to_tensor(1.0)
        if GATED:
            weight = gl.load(weight_ptr + choice)
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, copy_scales(8)))
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, copy_scales(8)))
        line = (base + r % 32).to(gl.int64) * (COLUMNS // 32)
        scale = gl.where(r < 32, first_scale_ptr + line, second_scale_ptr + SECOND * (COLUMNS // 32) + line)
        scale = gl.multiple_of(scale, 8)[:, None] + g[None, :]
        total = _stream(
            first_desc, second_desc, base, base + SECOND, scale, x_desc, x_row, xs, w_s, x_s, s_s, t_s, bars,
            COLUMNS, XS, STAGES, False, not GATED,
        )  # fmt: skip
    y = gl.sum(total, axis=1)
    if GATED:
        both = gl.reshape(y, [2, 32])
        which = gl.arange(0, 2, layout=gl.SliceLayout(1, both.type.layout))[:, None]
        gate = gl.sum(gl.where(which == 0, both, 0.0), axis=0).to(gl.bfloat16).to(gl.float32)
        up = gl.sum(gl.where(which == 1, both, 0.0), axis=0).to(gl.bfloat16).to(gl.float32)
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        hidden = (gate / (1.0 + gl.exp(-gate)) * up * weight).to(gl.bfloat16).to(gl.float32)
        code = code_of(gl.max(gl.abs(hidden), axis=0))
        q = gl.convert_layout(to_bytes(hidden, code), gl.SliceLayout(0, GROUPS))[None, :]
        group = row // 32 + gl.arange(0, 1, layout=gl.SliceLayout(1, GROUPS))
        store_columns(out_ptr + slot.to(gl.int64) * (8 * outputs), q, group)
        gl.store(out_scale_ptr + slot * (outputs // 32) + row // 32, scale_of(code))
    else:
        at = slot * outputs + row + gl.arange(0, 64, layout=gl.SliceLayout(1, SUM))
        gl.store(out_ptr + at, y.to(gl.bfloat16))
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))
    if not GATED:  # noqa: SIM102  (the one is known when this is compiled, the other is not)
        if gl.atomic_add(count_ptr + gl.program_id(0), 1, sem="acq_rel") == K:
            channel = row + gl.arange(0, 64, layout=_SUMS)
            parts = ()  # all on their way before the first is added
            for i in gl.static_range(K + 1):
                part = gl.load(out_ptr + i * outputs + channel, cache_modifier=".cg")
                parts += (part,)  # type: ignore[assignment]
            whole = gl.full([64], 0.0, gl.float32, _SUMS)
            for i in gl.static_range(K + 1):
                whole += parts[i].to(gl.float32)
            gl.store(total_ptr + channel, whole.to(gl.bfloat16))
            gl.atomic_xchg(count_ptr + gl.program_id(0), 0)


def fits(width: int, inner: int) -> bool:
    """Whether experts of these widths are whole blocks."""
    return width % 256 == 0 and inner % 256 == 0


def with_shared(
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    scales: torch.Tensor,
    packed: Packed,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    limit: float,
    counters: torch.Tensor,
) -> torch.Tensor:
    """bf16 [1, d]: the sum of routed experts and the shared one, in two launches.

    rows, scales: the token as `experts_one_hopper.quantise_columns` writes it; ids and weights [1, k]; shared
    and counters as `experts_fp8_hopper.with_shared`.
    """
    (w1, s1), (w3, s3), (w2, s2) = packed
    w13, s13, shared2, shared_scale2 = shared
    k, inner, width = ids.shape[1], w1.shape[1], w2.shape[1]
    hidden = torch.empty(k + 1, 8 * inner, dtype=torch.uint8, device=rows.device)
    hidden_scales = torch.empty(k + 1, inner // 32, dtype=torch.float32, device=rows.device)
    d1, d3, d2, e13, e2 = (
        TensorDescriptor.from_tensor(w.view(-1, w.shape[-1]), [32, 128], SHARED_W.value)
        for w in (w1, w3, w2, w13, shared2)
    )
    one_token[(inner // 32, k + 1)](
        d1, d3, e13, *_tiles(rows), scales, ids, weights, s1, s3, s13, hidden, hidden_scales, counters,
        hidden, inner, limit, width, next_power_of_2(width // 32), STAGES[0], True, k, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    y = torch.empty(k + 1, width, dtype=torch.bfloat16, device=rows.device)
    out = torch.empty(1, width, dtype=torch.bfloat16, device=rows.device)
    one_token[(width // 64, k + 1)](
        d2, d2, e2, *_tiles(hidden), hidden_scales, ids, weights, s2, s2, shared_scale2, y, hidden_scales,
        counters, out, width, limit, inner, next_power_of_2(inner // 32), STAGES[1], False, k, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return out


def _tiles(x: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Tiles of activations for 256 channels, and for 128."""
    wide, narrow = (TensorDescriptor.from_tensor(x.view(-1, 128), [n, 128], SHARED_W.value) for n in (16, 8))
    return wide, narrow
