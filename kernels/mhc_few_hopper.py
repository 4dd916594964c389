# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A sublayer's boundary and mix for few tokens on Hopper, one launch (spec §6).

A program takes some channels of a token; its share of the projection is in registers before it waits for the
launch before it. The programs of a token meet, and each norms its own channels. One that has all channels
meets nobody.

What turns the projection's sums into pre, post and comb is a chain of some 3,000 cycles that nobody waits for
before the next boundary. So a call may leave the sums (`Pending`): the next one ends the mix, and mixes the
streams with it, while the sublayer's last launch still runs; after `grid_wait` it has only the output to add.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from cedar.kernels.compress_hopper import inverse_root
from cedar.kernels.grid_hopper import (
    COUNTER_STEP,
    arrive,
    barrier,
    goal_of,
    grid_release,
    grid_wait,
    half,
    wait_for,
)
from cedar.kernels.mhc import Pending
from cedar.kernels.mhc_mix_hopper import coefficients, mixes, part_sums, parts_layout
from cedar.kernels.mhc_triton import in_orders
from cedar.kernels.prepared import CODES, Prepared, empty_codes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def both(NW):
    """[32 mixes, 32 NW channels]: a lane has neighbouring channels, a warp 32 / NW mixes."""
    n = NW.bit_length() - 1
    channels = [[0, 1 << i] for i in range(n)]
    mixes = [[1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout(
        channels + mixes[: 5 - n], [[0, NW << i] for i in range(5)], mixes[5 - n :], [], [32, 32 * NW]
    )


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
    smaller,
    eps,
    B: gl.constexpr,
    CODES: gl.constexpr,
):
    """Norms a token's channels `at` [B] (fp32, from `base` on) and writes them; with CODES also as E4M3 bytes
    with a scale for 32. smaller: fp64 1 / width.
    """
    factor = inverse_root(square * smaller + eps)
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


@gluon.constexpr_function
def everyone(NW):
    """[32]: every thread has them all."""
    return gl.DistributedLinearLayout(
        [[1 << i] for i in range(5)], [[0]] * 5, [[0]] * (NW.bit_length() - 1), [], [32]
    )


@gluon.jit
def _pick(v, at: gl.constexpr):
    """Value `at` of v [32], which every thread has: integers add up to it without an instruction."""
    place = gl.arange(0, 32, layout=v.type.layout)
    return gl.sum(gl.where(place == at, v.to(gl.int32, bitcast=True), 0), axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def _load_mixes(pre_ptr, post_ptr, comb_ptr, token, L: gl.constexpr):
    """A token's coefficients [32] as `coefficients` orders them, from where they are kept."""
    place = gl.arange(0, 32, layout=L)
    comb = gl.load(comb_ptr + token * 16 + place, mask=place < 16, other=0.0)
    pre = gl.load(pre_ptr + token * 4 + place - 24, mask=(place >= 24) & (place < 28), other=0.0)
    post = gl.load(post_ptr + token * 4 + place - 28, mask=place >= 28, other=0.0)
    return gl.where(place < 16, comb, gl.where(place < 28, pre, post))


@gluon.jit
def _mix_of(
    mix_s, pre_ptr, post_ptr, comb_ptr, token, j: gl.constexpr, PENDING: gl.constexpr, L: gl.constexpr
):
    """Coefficients [32] of token number j of a program, in every thread."""
    if PENDING:
        own = mix_s.index(j).load(L)
    else:
        own = _load_mixes(pre_ptr, post_ptr, comb_ptr, token, L)
    return own


@gluon.jit
def _mixed(
    x_ptr, mix_s, pre_ptr, post_ptr, comb_ptr, tile, tokens, width, at, fits,
    T: gl.constexpr, PENDING: gl.constexpr, ALL: gl.constexpr,
):  # fmt: skip
    """What the old streams give to each of the four new ones of T tokens, before an output is added."""
    mixed = ()
    for j in gl.static_range(T):
        token = gl.minimum(tile * T + j, tokens - 1).to(gl.int64)
        own = _mix_of(mix_s, pre_ptr, post_ptr, comb_ptr, token, j, PENDING, ALL)
        old = x_ptr + token * 4 * width + at
        x0 = gl.load(old, mask=fits, other=0.0).to(gl.float32)
        x1 = gl.load(old + width, mask=fits, other=0.0).to(gl.float32)
        x2 = gl.load(old + 2 * width, mask=fits, other=0.0).to(gl.float32)
        x3 = gl.load(old + 3 * width, mask=fits, other=0.0).to(gl.float32)
        for t in gl.static_range(4):
            new = _pick(own, t) * x0 + _pick(own, 4 + t) * x1
            new = new + _pick(own, 8 + t) * x2
            mixed += (new + _pick(own, 12 + t) * x3,)  # type: ignore[assignment]
    return mixed


@gluon.jit
def _outputs(y_ptr, tile, tokens, width, at, fits, T: gl.constexpr):
    """The sublayer's output for T tokens, bf16, all on their way together."""
    outputs = ()
    for j in gl.static_range(T):
        token = gl.minimum(tile * T + j, tokens - 1).to(gl.int64)
        outputs += (gl.load(y_ptr + token * width + at, mask=fits, other=0.0),)  # type: ignore[assignment]
    return outputs


@gluon.jit
def _sums(part_ptr, tile, T: gl.constexpr, SPLITS: gl.constexpr, SP2: gl.constexpr, NW: gl.constexpr):
    """A tile's sums [T, 32] of what its programs left."""
    PL: gl.constexpr = parts_layout(SP2, T, NW)
    t = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, PL)))
    return part_sums(part_ptr, tile * SPLITS, t, t < T, T, SPLITS, SP2, PL, 0)


@gluon.jit(do_not_specialize=["tokens"])
def sublayer_few(
    x_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    sums_ptr,
    old_scale_ptr,
    old_base_ptr,
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
    PENDING: gl.constexpr,
    LEAVES: gl.constexpr,
):
    """Grid (SPLITS, ceil(tokens / T)), NW warps: 32 NW channels of T tokens.

    PENDING: pre, post and comb are still the sums that a call before left at sums_ptr (LEAVES), for the mix
    of old_scale_ptr and old_base_ptr. They, x and the counters are older than the launch before, so all that
    comes of them is made before `grid_wait`.
    """
    CH: gl.constexpr = both(NW)
    B: gl.constexpr = 32 * NW
    ALL: gl.constexpr = everyone(NW)
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
    grid_release()
    group = tile * SPLITS + split
    spot = count_ptr + COUNTER_STEP * tile
    mix_s = gl.allocate_shared_memory(gl.float32, [T, 32], FLAT)
    if PENDING:
        sums = _sums(sums_ptr, tile, T, SPLITS, SP2, NW)
        goal = goal_of(spot)
    f0 = gl.load(fn, mask=known, other=0.0)
    f1 = gl.load(fn + width, mask=known, other=0.0)
    f2 = gl.load(fn + 2 * width, mask=known, other=0.0)
    f3 = gl.load(fn + 3 * width, mask=known, other=0.0)
    weight = gl.load(norm_ptr + at, mask=fits, other=0.0).to(gl.float32)
    smaller = 1.0 / width.to(gl.float64)
    if PENDING:
        found = coefficients(sums, old_scale_ptr, old_base_ptr, width, mix_eps, hc_eps, rounds, T, NW)
        mix_s._reinterpret(gl.float32, [T, 32], FLAT2).store(found)
        barrier()
    else:
        grid_wait()
        goal = goal_of(spot)
    mixed = _mixed(x_ptr, mix_s, pre_ptr, post_ptr, comb_ptr, tile, tokens, width, at, fits, T, PENDING, ALL)
    if PENDING:
        grid_wait()
    outputs = _outputs(y_ptr, tile, tokens, width, at, fits, T)
    streams = mixed[:0]
    rows = mixed[:0]
    for j in gl.static_range(T):
        here = tile * T + j < tokens
        t64 = gl.minimum(tile * T + j, tokens - 1).to(gl.int64)
        own = _mix_of(mix_s, pre_ptr, post_ptr, comb_ptr, t64, j, PENDING, ALL)
        y = outputs[j].to(gl.float32)
        total = gl.full([B], 0.0, gl.float32, C)
        for t in gl.static_range(4):
            low = half(mixed[4 * j + t] + _pick(own, 28 + t) * y)
            gl.store(out_ptr + (t64 * 4 + t) * width + at, low, mask=fits & here)
            total = total + _pick(own, 24 + t) * low.to(gl.float32)
            streams += (low,)
        row = half(total).to(gl.float32)
        long = row.to(gl.float64)
        square = gl.sum(long * long, axis=0)
        if SPLITS > 1:
            gl.store(rows_ptr + group * T + j, square)
            rows += (row,)
        else:
            _finish_row(
                row, square, weight, row_ptr, codes_ptr, code_scale_ptr, t64, split * B, at, fits & here,
                here, width, smaller, eps, B, CODES,
            )  # fmt: skip
    if SPLITS > 1 and LEAVES:
        arrive(spot, gl.where(split == 0, 65 - SPLITS, 1))
    for j in gl.static_range(T):
        z = gl.full([32, B], 0.0, gl.float32, CH)
        squares = gl.full([B], 0.0, gl.float32, C)
        for t in gl.static_range(4):
            wide = streams[4 * j + t].to(gl.float32)
            squares = gl.fma(wide, wide, squares)
            f = f0 if t == 0 else (f1 if t == 1 else (f2 if t == 2 else f3))
            z = gl.fma(f, gl.expand_dims(wide, 0) + gl.full([32, B], 0.0, gl.float32, CH), z)
        made = gl.sum(z, axis=1)
        made = gl.where(m == 23, gl.sum(squares, axis=0), made)
        gl.store(part_ptr + (group * T + j) * 32 + m, made)
    if SPLITS > 1:
        if not LEAVES:
            arrive(spot, gl.where(split == 0, 65 - SPLITS, 1))
        wait_for(spot, goal)
        R: gl.constexpr = splits_layout(SP2, NW)
        s = gl.arange(0, SP2, layout=R)
        for j in gl.static_range(T):
            t_j = tile * T + j
            squares64 = gl.load(
                rows_ptr + (tile * SPLITS + s) * T + j, mask=s < SPLITS, other=0.0, cache_modifier=".cg"
            )
            _finish_row(
                rows[j], gl.sum(squares64, axis=0), weight, row_ptr, codes_ptr, code_scale_ptr,
                t_j.to(gl.int64), split * B, at, fits & (t_j < tokens), t_j < tokens, width, smaller, eps, B,
                CODES,
            )  # fmt: skip
    if not LEAVES:  # noqa: SIM102  (the one is known when this is compiled, the other is not)
        if split == 0:
            if SPLITS == 1:
                barrier()
            z_all = _sums(part_ptr, tile, T, SPLITS, SP2, NW)
            whose = tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, z_all.type.layout))
            mixes(
                z_all, whose, tokens, scale_ptr, base_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr, width,
                mix_eps, hc_eps, rounds, T, NW,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def settle_few(
    sums_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, tokens, width, mix_eps, hc_eps, rounds,
    T: gl.constexpr, SPLITS: gl.constexpr, SP2: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(tokens / T)): pre, post and comb of sums that `sublayer_few` left."""
    grid_wait()
    grid_release()
    tile = gl.program_id(0)
    z = _sums(sums_ptr, tile, T, SPLITS, SP2, NW)
    whose = tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, z.type.layout))
    mixes(
        z,
        whose,
        tokens,
        scale_ptr,
        base_ptr,
        pre_ptr,
        post_ptr,
        comb_ptr,
        width,
        mix_eps,
        hc_eps,
        rounds,
        T,
        NW,
    )


class Cut(NamedTuple):
    """Warps of a program, programs that share out the channels, tokens a program."""

    warps: int
    splits: int
    together: int


def cut(tokens: int, width: int) -> Cut:
    """How so many tokens are shared out."""
    warps = 8 if width <= 256 else 4
    splits = triton.cdiv(width, 32 * warps)
    return Cut(warps, splits, 1 if splits == 1 or tokens <= 4 else 2 if tokens <= 8 else 4)


@cache
def _meetings(index: int) -> torch.Tensor:
    """Counters of these launches alone on CUDA device `index`, as they are read before `grid_wait`."""
    return torch.zeros(4096, dtype=torch.int32, device=f"cuda:{index}")


def settle(pending: Pending) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [N, 4], post [N, 4], comb [N, 4, 4]) fp32."""
    tokens, width = pending.shape
    warps, splits, together = cut(tokens, width)
    pre, post = (pending.sums.new_empty(tokens, 4) for _ in range(2))
    comb = pending.sums.new_empty(tokens, 4, 4)
    settle_few[(triton.cdiv(tokens, together),)](
        pending.sums, pending.scale, pending.base, pre, post, comb, tokens, width, *pending.numbers, together,
        splits, triton.next_power_of_2(splits), warps, num_warps=warps, enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
    return pre, post, comb


def sublayer(
    given: tuple[torch.Tensor, ...],
    result: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]],
    codes: Prepared | None,
    tokens: int,
    eps: float,
    mix_eps: float,
    hc_eps: float,
    rounds: int,
    pending: Pending | None = None,
    *,
    leaves: bool = False,
) -> Pending | None:
    """As `mhc_hopper.sublayer`. `pending` stands for post, comb and pre; with `leaves` the new ones are not
    made either, but returned as another.
    """
    x, y, post, comb, pre, norm, fn, scale, base = given
    streams, row, mixed = result
    width, device = x.shape[2], x.device
    warps, splits, together = cut(tokens, width)
    tiles = triton.cdiv(tokens, together)
    sums = torch.empty(tiles * splits * together, 32, dtype=torch.float32, device=device)
    squares = torch.empty(tiles * splits * together, dtype=torch.float64, device=device)
    numbers = (mix_eps, hc_eps, rounds)
    before = (sums, scale, base) if pending is None else (pending.sums, pending.scale, pending.base)
    sublayer_few[(splits, tiles)](
        x, y, post, comb, pre, *before, norm, streams, row, fn, scale, base,
        *((codes.values, codes.scale) if codes else (row, row)), sums, squares, _meetings(device.index or 0),
        *mixed, tokens, width, eps, *numbers, together, splits, triton.next_power_of_2(splits), warps,
        codes is not None, pending is not None, leaves, num_warps=warps, enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
    return Pending(sums, (tokens, width), scale, base, numbers) if leaves else None


def pass_on(
    x: torch.Tensor,
    y: torch.Tensor,
    mixes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | Pending,
    norm: tuple[torch.Tensor, float],
    mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float, int],
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, Pending, tuple[Prepared, ...]]:
    """As `mhc_triton.sublayer`, without the end of the mix."""
    fn, scale, base, *_ = mix
    pending = None
    if isinstance(mixes, Pending):
        if mixes.shape == (x.shape[0], x.shape[2]) and mixes.numbers == mix[3:] and x.is_contiguous():
            pending = mixes
            pre = post = comb = mixes.sums  # not read
        else:
            mixes = settle(mixes)
    if not isinstance(mixes, Pending):
        pre, post, comb = (t.contiguous() for t in mixes)
    out, row = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(y)
    made = empty_codes(row) if CODES in orders else None
    left = sublayer(
        (x.contiguous(), y.contiguous(), post, comb, pre, norm[0], fn.contiguous(), scale, base),
        (out, row, (pre, post, comb)), made, x.shape[0], norm[1], *mix[3:], pending, leaves=True,
    )  # fmt: skip
    assert left is not None
    return out, row, left, in_orders(row, made, orders)


@cache
def _as_they_are(
    tokens: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, post and comb that change no stream. y is zeros, not anything times zero: an infinity of one row
    must not become another's NaN.
    """
    y = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
    return y, torch.zeros(tokens, 4, device=device), torch.eye(4, device=device).repeat(tokens, 1, 1)


def enter(
    x: torch.Tensor,
    pre: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float, int],
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, Pending, tuple[Prepared, ...]]:
    """As `pass_on` with nothing to add to the streams: (row, what is left of the mix, row in `orders`)."""
    y, post, comb = _as_they_are(x.shape[0], x.shape[2], x.device)
    _, row, left, prepared = pass_on(x.contiguous(), y, (pre, post, comb), norm, mix, orders)
    return row, left, prepared
