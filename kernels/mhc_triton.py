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
from cedar.kernels.packed_triton import INTERPRETED, bf16_round, to_bf16


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
