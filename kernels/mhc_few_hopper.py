# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A sublayer's boundary and mix for few tokens on Hopper, one launch (spec §6).

A program takes some channels of a token; its share of the projection is in registers before it waits for the
launch before it. The programs of a token meet: each norms its own channels, the last to come turns the sums
into pre, post and comb. One that has all channels meets nobody.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.grid_hopper import barrier, counters, grid_release, grid_wait, half
from cedar.kernels.mhc_mix_hopper import mixes, part_sums, parts_layout
from cedar.kernels.prepared import Prepared
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def both(NW):
    """[32 mixes, 32 NW channels]: a lane has neighbouring channels, a warp 32 / NW mixes."""
    n = NW.bit_length() - 1
    channels = [[0, 1 << i] for i in range(n)]
    mixes = [[1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout(
        channels + mixes[: 5 - n], [[0, NW << i] for i in range(5)], mixes[5 - n :], [], [32, 32 * NW]
    )


FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def splits_layout(SP2, NW):
    """[SP2]: over lanes, then registers; warps alike."""
    regs: list[list[int]] = []
    lanes: list[list[int]] = []
    s = 1
    while s < SP2:
        (lanes if len(lanes) < 5 else regs).append([s])
        s *= 2
    while len(lanes) < 5:
        lanes.append([0])
    return gl.DistributedLinearLayout(regs, lanes, [[0]] * (NW.bit_length() - 1), [], [SP2])


@gluon.jit
def _finish_row(
    row,
    square,
    weight,
    row_ptr,
    codes_ptr,
    scale_ptr,
    token,
    base,
    at,
    inside,
    here,
    width,
    eps,
    B: gl.constexpr,
    CODES: gl.constexpr,
):
    """Norms a token's channels `at` [B] (fp32, from `base` on) and writes them; with CODES also as E4M3 bytes
    with a scale for 32.
    """
    factor = 1.0 / gl.sqrt(square / width + eps)
    high = factor.to(gl.float32)
    low = (factor - high.to(gl.float64)).to(gl.float32)
    p = row * weight
    normed = half(gl.fma(p, gl.full([B], 0.0, gl.float32, row.type.layout) + high, p * low))
    gl.store(row_ptr + token * width + at, normed, mask=inside)
    if CODES:
        groups = gl.reshape(normed.to(gl.float32), [B // 32, 32])
        G: gl.constexpr = groups.type.layout
        amax = gl.maximum(gl.max(gl.abs(groups), axis=1), 1e-4)
        code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
        down = ((254 - gl.convert_layout(code, gl.SliceLayout(1, G))[:, None]) << 23).to(
            gl.float32, bitcast=True
        )
        group = base + gl.arange(0, B // 32, layout=gl.SliceLayout(1, G)) * 32
        channel = gl.arange(0, 32, layout=gl.SliceLayout(0, G))
        byte = (groups * down).to(gl.float8e4nv)  # the conversion saturates
        gl.store(
            codes_ptr + token * width + group[:, None] + channel[None, :],
            byte,
            mask=((group < width) & here)[:, None] & (channel >= 0)[None, :],
        )
        number = base // 32 + gl.arange(0, B // 32, layout=code.type.layout)
        gl.store(
            scale_ptr + token * (width // 32) + number, code.to(gl.uint8), mask=(number < width // 32) & here
        )


@gluon.jit(do_not_specialize=["tokens"])
def sublayer_few(
    x_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    norm_ptr,
    out_ptr,
    row_ptr,
    fn_ptr,
    scale_ptr,
    base_ptr,
    codes_ptr,
    code_scale_ptr,
    part_ptr,
    rows_ptr,
    count_ptr,
    new_pre_ptr,
    new_post_ptr,
    new_comb_ptr,
    tokens,
    width,
    eps,
    mix_eps,
    hc_eps,
    rounds,
    T: gl.constexpr,
    SPLITS: gl.constexpr,
    SP2: gl.constexpr,
    NW: gl.constexpr,
    CODES: gl.constexpr,
):
    """Grid (SPLITS, ceil(tokens / T)), NW warps: 32 NW channels of T tokens."""
    CH: gl.constexpr = both(NW)
    B: gl.constexpr = 32 * NW
    split = gl.program_id(0)
    tile = gl.program_id(1)
    C: gl.constexpr = gl.SliceLayout(0, CH)
    M: gl.constexpr = gl.SliceLayout(1, CH)
    at = split * B + gl.arange(0, B, layout=C)
    fits = at < width
    m = gl.arange(0, 32, layout=M)
    mix = (m + 8) % 32  # in the order in which `mixes` wants them
    known = (mix < 24)[:, None] & fits[None, :]
    fn = fn_ptr + mix[:, None] * (4 * width) + at[None, :]
    f0 = gl.load(fn, mask=known, other=0.0)
    f1 = gl.load(fn + width, mask=known, other=0.0)
    f2 = gl.load(fn + 2 * width, mask=known, other=0.0)
    f3 = gl.load(fn + 3 * width, mask=known, other=0.0)
    weight = gl.load(norm_ptr + at, mask=fits, other=0.0).to(gl.float32)
    grid_wait()
    grid_release()
    group = tile * SPLITS + split
    z_s = gl.allocate_shared_memory(gl.float32, [T * 32], FLAT)
    row_0 = gl.full([B], 0.0, gl.float32, C)
    row_1 = row_0
    row_2 = row_0
    row_3 = row_0
    for j in gl.static_range(T):
        token = tile * T + j
        here = token < tokens
        t64 = gl.minimum(token, tokens - 1).to(gl.int64)
        base = t64 * 4 * width + at
        comb = comb_ptr + t64 * 16
        post = post_ptr + t64 * 4
        pre = pre_ptr + t64 * 4
        x0 = gl.load(x_ptr + base, mask=fits, other=0.0).to(gl.float32)
        x1 = gl.load(x_ptr + base + width, mask=fits, other=0.0).to(gl.float32)
        x2 = gl.load(x_ptr + base + 2 * width, mask=fits, other=0.0).to(gl.float32)
        x3 = gl.load(x_ptr + base + 3 * width, mask=fits, other=0.0).to(gl.float32)
        y = gl.load(y_ptr + t64 * width + at, mask=fits, other=0.0).to(gl.float32)
        z = gl.full([32, B], 0.0, gl.float32, CH)
        total = gl.full([B], 0.0, gl.float32, C)
        squares = gl.full([B], 0.0, gl.float32, C)
        for t in gl.static_range(4):
            new = gl.load(comb + t) * x0 + gl.load(comb + 4 + t) * x1
            new = new + gl.load(comb + 8 + t) * x2
            new = new + gl.load(comb + 12 + t) * x3
            low = half(new + gl.load(post + t) * y)
            gl.store(out_ptr + base + t * width, low, mask=fits & here)
            wide = low.to(gl.float32)
            total = total + gl.load(pre + t) * wide
            squares = gl.fma(wide, wide, squares)
            f = f0 if t == 0 else (f1 if t == 1 else (f2 if t == 2 else f3))
            z = gl.fma(f, gl.expand_dims(wide, 0) + gl.full([32, B], 0.0, gl.float32, CH), z)
        row = half(total).to(gl.float32)
        long = row.to(gl.float64)
        row_square = gl.sum(long * long, axis=0)
        sums = gl.sum(z, axis=1)
        sums = gl.where(m == 23, gl.sum(squares, axis=0), sums)
        if SPLITS > 1:
            gl.store(rows_ptr + group * T + j, row_square)
            gl.store(part_ptr + (group * T + j) * 32 + m, sums)
        else:
            z_s.slice(j * 32, 32).store(sums)
            _finish_row(
                row,
                row_square,
                weight,
                row_ptr,
                codes_ptr,
                code_scale_ptr,
                t64,
                split * B,
                at,
                fits & here,
                here,
                width,
                eps,
                B,
                CODES,
            )
        if SPLITS > 1:
            if j == 0:
                row_0 = row
            elif j == 1:
                row_1 = row
            elif j == 2:
                row_2 = row
            else:
                row_3 = row
    mixes_here = SPLITS == 1
    if SPLITS > 1:
        barrier()
        old = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
        goal = (old & -64) + 64
        mixes_here = (old & 63) == SPLITS - 1
        seen = old + 1
        if SPLITS < 64:  # noqa: SIM102
            if mixes_here:
                seen = gl.atomic_add(count_ptr + tile, 64 - SPLITS, sem="acq_rel") + 64 - SPLITS
        while seen - goal < 0:
            seen = gl.atomic_add(count_ptr + tile, 0, sem="acquire")
        barrier()
        R: gl.constexpr = splits_layout(SP2, NW)
        s = gl.arange(0, SP2, layout=R)
        for j in gl.static_range(T):
            t_j = tile * T + j
            squares64 = gl.load(
                rows_ptr + (tile * SPLITS + s) * T + j, mask=s < SPLITS, other=0.0, cache_modifier=".cg"
            )
            r_j = row_0 if j == 0 else (row_1 if j == 1 else (row_2 if j == 2 else row_3))
            _finish_row(
                r_j,
                gl.sum(squares64, axis=0),
                weight,
                row_ptr,
                codes_ptr,
                code_scale_ptr,
                t_j.to(gl.int64),
                split * B,
                at,
                fits & (t_j < tokens),
                t_j < tokens,
                width,
                eps,
                B,
                CODES,
            )
    if mixes_here:
        PL: gl.constexpr = parts_layout(SP2, T, NW)
        t2 = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, PL)))
        if SPLITS > 1:
            z_all = part_sums(part_ptr, tile * SPLITS, t2, t2 < T, T, SPLITS, SP2, PL, 0)
        else:
            z_all = gl.expand_dims(z_s.slice(0, 32).load(gl.SliceLayout(0, gl.SliceLayout(0, PL))), 0)
        whose = tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, z_all.type.layout))
        mixes(
            z_all,
            whose,
            tokens,
            scale_ptr,
            base_ptr,
            new_pre_ptr,
            new_post_ptr,
            new_comb_ptr,
            width,
            mix_eps,
            hc_eps,
            rounds,
            T,
            NW,
        )


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
    warps = 8 if width <= 256 else 4
    splits = triton.cdiv(width, 32 * warps)
    together = 1 if splits == 1 or tokens <= 4 else 2 if tokens <= 8 else 4
    tiles = triton.cdiv(tokens, together)
    part = torch.empty(tiles * splits * together, 32, dtype=torch.float32, device=device)
    squares = torch.empty(tiles * splits * together, dtype=torch.float64, device=device)
    sublayer_few[(splits, tiles)](
        x, y, post, comb, pre, norm, streams, row, fn, scale, base,
        *((codes.values, codes.scale) if codes else (row, row)), part, squares, counters(device.index or 0),
        *mixed, tokens, width, eps, mix_eps, hc_eps, rounds, together, splits, triton.next_power_of_2(splits),
        warps, codes is not None, num_warps=warps, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
