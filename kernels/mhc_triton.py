# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""mHC on a GPU: one pass over the streams at a sublayer's boundary, and the mix with its Sinkhorn rounds
in registers (spec §3, §6).

`boundary`: expand with the sublayer's output, collapse with the pre handed in, norm: streams read once and
written once.
`mix`: the projection, its columns shared out over programs; the last to finish adds the parts in order and
turns them into
pre, post and comb.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import hopper
from cedar.kernels.packed_triton import INTERPRETED, bf16_round, to_bf16
from cedar.kernels.prepared import CODES, Prepared, empty_codes
from cedar.kernels.prepared_ref import prepared

FEW = 32  # tokens up to which `mhc_few_hopper` is the faster one on Hopper; more where rows are narrow
NARROW, FEW_NARROW = 256, 256  # channels, tokens
MANY = 512  # tokens beyond which `mhc_many_hopper` is


@triton.jit
def _boundary(
    x_ptr, y_ptr, post_ptr, comb_ptr, pre_ptr, norm_ptr, out_ptr, row_ptr, width, eps,
    HC: tl.constexpr, B: tl.constexpr, EXPAND: tl.constexpr, COLLAPSE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (tokens): a token's channels, B at a time; the norm reads the collapsed row again, out of the
    cache.
    """
    token = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([B], tl.float64)
    for start in range(0, width, B):
        at = tl.multiple_of(start, B) + tl.arange(0, B)
        inside = at < width
        base = token * HC * width + at
        x0 = tl.load(x_ptr + base, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + base + width, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + base + 2 * width, mask=inside, other=0.0).to(tl.float32)
        x3 = tl.load(x_ptr + base + 3 * width, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([B], tl.float32)
        if EXPAND:
            y = tl.load(y_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
        for t in tl.static_range(HC):
            if EXPAND:
                comb = comb_ptr + token * HC * HC + t
                new = tl.load(comb) * x0 + tl.load(comb + HC) * x1
                new = new + tl.load(comb + 2 * HC) * x2
                new = new + tl.load(comb + 3 * HC) * x3
                new = bf16_round(new + tl.load(post_ptr + token * HC + t) * y)
                tl.store(out_ptr + base + t * width, to_bf16(new), mask=inside)
            else:
                new = x0 if t == 0 else (x1 if t == 1 else (x2 if t == 2 else x3))
            if COLLAPSE:
                total = total + tl.load(pre_ptr + token * HC + t) * new
        if COLLAPSE:
            total = bf16_round(total)
            tl.store(row_ptr + token * width + at, to_bf16(total), mask=inside)
            wide = total.to(tl.float64)
            squares += wide * wide
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
        tl.debug_barrier()
        for start in range(0, width, B):
            at = tl.multiple_of(start, B) + tl.arange(0, B)
            inside = at < width
            total = tl.load(row_ptr + token * width + at, mask=inside, other=0.0).to(tl.float64)
            normed = total * scale * tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float64)
            tl.store(row_ptr + token * width + at, to_bf16(normed.to(tl.float32)), mask=inside)


def boundary(
    x: torch.Tensor,
    expand: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    pre: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(X' bf16 [N, 4, d], x bf16 [N, d] or None) of streams x bf16 [N, 4, d], in one launch.

    expand = (y, post, comb) replaces the streams by X'; pre collapses them (the new ones); norm = (weight,
    eps) norms the result.
    """
    tokens, streams, width = x.shape
    x = x.contiguous()
    out = torch.empty_like(x) if expand is not None else x
    row = torch.empty(tokens, width, dtype=x.dtype, device=x.device) if pre is not None else None
    if tokens:
        y, post, comb = (t.contiguous() for t in expand) if expand is not None else (x, x, x)
        target = row if row is not None else x
        size = min(1024, triton.next_power_of_2(width))
        _boundary[(tokens,)](
            x, y, post, comb, pre.contiguous() if pre is not None else x,
            norm[0] if norm is not None else x, out, target,
            width, norm[1] if norm is not None else 0.0,
            streams, size, expand is not None, pre is not None, norm is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, row


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _mix(
    x_ptr, fn_ptr, scale_ptr, base_ptr, part_ptr, count_ptr, pre_ptr, post_ptr, comb_ptr, tokens, flat,
    eps, hc_eps, rounds,
    HC: tl.constexpr, T: tl.constexpr, BK: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(tokens / T), SPLITS). part fp32 [SPLITS, tokens, 32]: z's sums, the sum of squares in the
    last column.
    """
    token = tl.program_id(0) * T + tl.arange(0, T)
    mix = tl.arange(0, 32)
    split = tl.program_id(1)
    z = tl.zeros([T, 32], tl.float32)
    squares = tl.zeros([T], tl.float32)
    each = tl.cdiv(tl.cdiv(flat, BK), SPLITS)
    for i in range(each):
        at = (split * each + i) * BK + tl.arange(0, BK)
        x = tl.load(
            x_ptr + token[:, None].to(tl.int64) * flat + at[None, :],
            mask=(token < tokens)[:, None] & (at < flat)[None, :],
            other=0.0,
        ).to(tl.float32)
        fn = tl.load(
            fn_ptr + mix[None, :] * flat + at[:, None],
            mask=(mix < MIXES)[None, :] & (at < flat)[:, None],
            other=0.0,
        )
        squares += tl.sum(x * x, axis=1)
        if INTERPRETED:
            z += tl.dot(x, fn, input_precision="ieee")
        else:
            z += tl.dot(x, fn, input_precision="tf32x3")
    z = tl.where((mix == 31)[None, :], squares[:, None], z)
    cell = token[:, None].to(tl.int64) * 32 + mix[None, :]
    mine = (token < tokens)[:, None]
    tl.store(part_ptr + split * tokens * 32 + cell, z, mask=mine)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1:
        z = tl.zeros([T, 32], tl.float32)
        for i in range(SPLITS):
            z += tl.load(part_ptr + i * tokens * 32 + cell, mask=mine, other=0.0, cache_modifier=".cg")
        squares = tl.sum(tl.where((mix == 31)[None, :], z, 0.0), axis=1)
        z = z / tl.sqrt(squares / flat + eps)[:, None]
        which = tl.where(mix < HC, 0, tl.where(mix < 2 * HC, 1, 2))
        known = mix < MIXES
        z = z * tl.load(scale_ptr + which)[None, :] + tl.load(base_ptr + mix, mask=known, other=0.0)[None, :]
        row = token[:, None].to(tl.int64)
        tl.store(pre_ptr + row * HC + mix[None, :], _sigmoid(z) + hc_eps, mask=mine & (mix < HC)[None, :])
        tl.store(
            post_ptr + row * HC + mix[None, :] - HC,
            2 * _sigmoid(z),
            mask=mine & ((mix >= HC) & (mix < 2 * HC))[None, :],
        )
        # the logits of comb to their own tensor, through memory
        tl.store(part_ptr + cell, z, mask=mine)
        tl.debug_barrier()
        s = tl.arange(0, HC * HC)
        logits = tl.load(
            part_ptr + row * 32 + 2 * HC + s[None, :], mask=mine, other=0.0, cache_modifier=".cg"
        )
        c = tl.reshape(logits, [T, HC, HC])
        c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
        c = c / tl.sum(c, axis=2)[:, :, None] + hc_eps
        c = c / (tl.sum(c, axis=1)[:, None, :] + hc_eps)
        for _ in range(rounds - 1):
            c = c / (tl.sum(c, axis=2)[:, :, None] + hc_eps)
            c = c / (tl.sum(c, axis=1)[:, None, :] + hc_eps)
        tl.store(comb_ptr + row * (HC * HC) + s[None, :], tl.reshape(c, [T, HC * HC]), mask=mine)
        tl.atomic_xchg(count_ptr + tl.program_id(0), 0)


@cache
def _zeros(device: torch.device) -> torch.Tensor:
    """Counters that every call leaves at zero."""
    return torch.zeros(65_536, dtype=torch.int32, device=device)


def mix(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    hc_eps: float,
    rounds: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [N, 4], post [N, 4], comb [N, 4, 4] fp32 of streams x bf16 [N, 4, d]; fn fp32 [24, 4d]."""
    tokens, streams = x.shape[:2]
    flat = x.shape[1] * x.shape[2]
    pre, post = (torch.empty(tokens, streams, dtype=torch.float32, device=x.device) for _ in range(2))
    comb = torch.empty(tokens, streams, streams, dtype=torch.float32, device=x.device)
    if tokens:
        together = 64 if tokens >= 1024 else 16
        programs = triton.cdiv(tokens, together)
        splits = max(1, min(40, triton.cdiv(flat, 256), 264 // programs))
        part = torch.empty(splits, tokens, 32, dtype=torch.float32, device=x.device)
        _mix[(programs, splits)](
            x.contiguous(), fn.contiguous(), scale, base, part, _zeros(x.device), pre, post, comb, tokens,
            flat, eps, hc_eps, rounds,
            streams, together, 128, fn.shape[0], splits, num_warps=4,
        )  # fmt: skip
    return pre, post, comb


@triton.jit
def _inverse(x):
    """1 / x within an ulp."""
    if INTERPRETED:
        out = 1.0 / x
    else:
        out = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return out


@triton.jit
def _column(z, mix, j):
    """[T]: column j of z [T, 32]."""
    return tl.sum(tl.where((mix == j)[None, :], z, 0.0), axis=1)


@triton.jit
def _even(a, b, c, d, eps):
    """Four values over their sum + eps."""
    r = _inverse((((a + b) + c) + d) + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _soft(a, b, c, d, eps):
    """Their softmax + eps."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    r = _inverse(((a + b) + c) + d)
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _sublayer(
    x_ptr, y_ptr, post_ptr, comb_ptr, pre_ptr, norm_ptr, out_ptr, row_ptr, fn_ptr, scale_ptr, base_ptr,
    part_ptr, rows_ptr, count_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr, tokens, width, eps, mix_eps,
    hc_eps, rounds,
    T: tl.constexpr, B: tl.constexpr, SPLITS: tl.constexpr, SP2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, ceil(tokens / T)): B channels of T tokens a program; the last of a group of SPLITS
    finishes.

    part fp32 [programs, T, 32]: z's sums, the sum of squares in the last column; rows float64 [programs, T]:
    squares of the collapsed rows.
    """
    split = tl.program_id(0)
    tile = tl.program_id(1)
    token = tile * T + tl.arange(0, T)
    mine = token < tokens
    mix = tl.arange(0, 32)
    row = token.to(tl.int64)
    at = split * B + tl.arange(0, B)
    fits = at < width
    inside = mine[:, None] & fits[None, :]
    base = row[:, None] * 4 * width + at[None, :]
    x0 = tl.load(x_ptr + base, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr + base + width, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + base + 2 * width, mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(x_ptr + base + 3 * width, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row[:, None] * width + at[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([T, B], tl.float32)
    squares = tl.zeros([T, B], tl.float32)
    z = tl.zeros([T, 32, B], tl.float32)
    for t in tl.static_range(4):
        comb = comb_ptr + row * 16 + t
        fn = tl.load(
            fn_ptr + mix[:, None] * (4 * width) + t * width + at[None, :],
            mask=(mix < 24)[:, None] & fits[None, :],
            other=0.0,
        )
        new = tl.load(comb, mask=mine, other=0.0)[:, None] * x0
        new = new + tl.load(comb + 4, mask=mine, other=0.0)[:, None] * x1
        new = new + tl.load(comb + 8, mask=mine, other=0.0)[:, None] * x2
        new = new + tl.load(comb + 12, mask=mine, other=0.0)[:, None] * x3
        new = bf16_round(new + tl.load(post_ptr + row * 4 + t, mask=mine, other=0.0)[:, None] * y)
        tl.store(out_ptr + base + t * width, to_bf16(new), mask=inside)
        total = total + tl.load(pre_ptr + row * 4 + t, mask=mine, other=0.0)[:, None] * new
        squares += new * new
        z = tl.fma(
            tl.broadcast_to(fn[None, :, :], [T, 32, B]), tl.broadcast_to(new[:, None, :], [T, 32, B]), z
        )
    total = bf16_round(total)
    tl.store(row_ptr + row[:, None] * width + at[None, :], to_bf16(total), mask=inside)
    wide = total.to(tl.float64)
    group = tile * SPLITS
    here = (group + split) * T + tl.arange(0, T)
    tl.store(rows_ptr + here, tl.sum(wide * wide, axis=1))
    z = tl.sum(z, axis=2)
    z = tl.where((mix == 31)[None, :], tl.sum(squares, axis=1)[:, None], z)
    tl.store(part_ptr + here[:, None] * 32 + mix[None, :], z)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
        s = tl.arange(0, SP2)
        cells = tl.arange(0, T * 32)
        z = tl.load(
            part_ptr + (group + s)[:, None] * (T * 32) + cells[None, :],
            mask=(s < SPLITS)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        each = tl.arange(0, T)
        row_squares = tl.load(
            rows_ptr + (group + s)[:, None] * T + each[None, :],
            mask=(s < SPLITS)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        factor = 1.0 / tl.sqrt(tl.sum(row_squares, axis=0) / width + eps)
        z = tl.reshape(tl.sum(z, axis=0), [T, 32])
        high = factor.to(tl.float32)
        low = (factor - high.to(tl.float64)).to(tl.float32)
        for start in range(0, width, BN):
            n = start + tl.arange(0, BN)
            there = mine[:, None] & (n < width)[None, :]
            place = row_ptr + row[:, None] * width + n[None, :]
            p = tl.load(place, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
            p = p * tl.load(norm_ptr + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
            if INTERPRETED:
                normed = (p.to(tl.float64) * factor[:, None]).to(tl.float32)
            else:
                normed = tl.fma(p, tl.broadcast_to(high[:, None], [T, BN]), p * low[:, None])
            tl.store(place, to_bf16(normed), mask=there)
        z = z / tl.sqrt(_column(z, mix, 31) / (4 * width) + mix_eps)[:, None]
        which = tl.where(mix < 4, 0, tl.where(mix < 8, 1, 2))
        z = (
            z * tl.load(scale_ptr + which)[None, :]
            + tl.load(base_ptr + mix, mask=mix < 24, other=0.0)[None, :]
        )
        cell = row[:, None] * 4 + mix[None, :]
        gate = _sigmoid(z)
        tl.store(new_pre_ptr + cell, gate + hc_eps, mask=mine[:, None] & (mix < 4)[None, :])
        tl.store(new_post_ptr + cell - 4, 2 * gate, mask=mine[:, None] & ((mix >= 4) & (mix < 8))[None, :])
        a0, a1, a2, a3 = _soft(
            _column(z, mix, 8), _column(z, mix, 9), _column(z, mix, 10), _column(z, mix, 11), hc_eps
        )
        b0, b1, b2, b3 = _soft(
            _column(z, mix, 12), _column(z, mix, 13), _column(z, mix, 14), _column(z, mix, 15), hc_eps
        )
        c0, c1, c2, c3 = _soft(
            _column(z, mix, 16), _column(z, mix, 17), _column(z, mix, 18), _column(z, mix, 19), hc_eps
        )
        d0, d1, d2, d3 = _soft(
            _column(z, mix, 20), _column(z, mix, 21), _column(z, mix, 22), _column(z, mix, 23), hc_eps
        )
        a0, b0, c0, d0 = _even(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _even(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _even(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _even(a3, b3, c3, d3, hc_eps)
        for _ in range(rounds - 1):
            a0, a1, a2, a3 = _even(a0, a1, a2, a3, hc_eps)
            b0, b1, b2, b3 = _even(b0, b1, b2, b3, hc_eps)
            c0, c1, c2, c3 = _even(c0, c1, c2, c3, hc_eps)
            d0, d1, d2, d3 = _even(d0, d1, d2, d3, hc_eps)
            a0, b0, c0, d0 = _even(a0, b0, c0, d0, hc_eps)
            a1, b1, c1, d1 = _even(a1, b1, c1, d1, hc_eps)
            a2, b2, c2, d2 = _even(a2, b2, c2, d2, hc_eps)
            a3, b3, c3, d3 = _even(a3, b3, c3, d3, hc_eps)
        out = tl.join(tl.join(tl.join(a0, a1), tl.join(a2, a3)), tl.join(tl.join(b0, b1), tl.join(b2, b3)))
        rest = tl.join(tl.join(tl.join(c0, c1), tl.join(c2, c3)), tl.join(tl.join(d0, d1), tl.join(d2, d3)))
        out = tl.join(out, rest)  # [T, low of t, high of t, low of s, high of s]
        out = tl.reshape(tl.permute(out, (0, 4, 3, 2, 1)), [T, 16])
        tl.store(new_comb_ptr + row[:, None] * 16 + tl.arange(0, 16)[None, :], out, mask=mine[:, None])
        tl.atomic_xchg(count_ptr + tile, 0)


def sublayer(
    x: torch.Tensor,
    expand: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pre: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float, int],
    orders: tuple[int, ...] = (),
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[Prepared, ...],
]:
    """`boundary` and the mix of the new streams in one launch: (X', row, (pre, post, comb), row in `orders`).

    mix = (fn fp32, scale, base, eps, hc_eps, rounds); the rest as `boundary`. On Hopper the launch writes
    order CODES too.
    """
    tokens, streams, width = x.shape
    device = x.device
    x = x.contiguous()
    y, post, comb = (t.contiguous() for t in expand)
    fn, scale, base, mix_eps, hc_eps, rounds = mix
    row = torch.empty(tokens, width, dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    new_pre, new_post = (torch.empty(tokens, streams, dtype=torch.float32, device=device) for _ in range(2))
    new_comb = torch.empty(tokens, streams, streams, dtype=torch.float32, device=device)
    mixed = (new_pre, new_post, new_comb)
    made: Prepared | None = None
    given = (x, y, post, comb, pre.contiguous(), norm[0])
    matrix = (fn.contiguous(), scale, base)
    if _on_hopper(x):
        from cedar.kernels import mhc_few_hopper, mhc_hopper, mhc_many_hopper

        made = empty_codes(row) if CODES in orders else None
        kernel = mhc_few_hopper if few(x) else mhc_many_hopper if tokens > MANY else mhc_hopper
        kernel.sublayer((*given, *matrix), (out, row, mixed), made, tokens, norm[1], mix_eps, hc_eps, rounds)
    elif tokens:
        together = 1 if tokens <= 8 else 2
        size = min(128, triton.next_power_of_2(width))
        splits = triton.cdiv(width, size)
        tiles = triton.cdiv(tokens, together)
        part = torch.empty(tiles * splits * together, 32, dtype=torch.float32, device=device)
        rows = torch.empty(tiles * splits * together, dtype=torch.float64, device=device)
        _sublayer[(splits, tiles)](
            *given, out, row, *matrix, part, rows, _zeros(device), *mixed, tokens, width, norm[1], mix_eps,
            hc_eps, rounds, together, size, splits, triton.next_power_of_2(splits),
            min(triton.next_power_of_2(width), 8192 // together), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, row, mixed, in_orders(row, made, orders)


def _on_hopper(x: torch.Tensor) -> bool:
    """Whether Hopper's own kernels take streams x [N, 4, d]."""
    tokens, _, width = x.shape
    return x.is_cuda and hopper(x.device.index or 0) and width % 64 == 0 and tokens > 0 and width <= 64 * 128


def few(x: torch.Tensor) -> bool:
    """Whether `mhc_few_hopper` takes streams x [N, 4, d]."""
    return _on_hopper(x) and x.shape[0] <= (FEW_NARROW if x.shape[2] <= NARROW else FEW)


def in_orders(row: torch.Tensor, made: Prepared | None, orders: tuple[int, ...]) -> tuple[Prepared, ...]:
    """`row` in each of `orders`; `made` is it as codes, where a launch has written them."""
    return tuple(made if made is not None and order == CODES else prepared(row, order) for order in orders)
