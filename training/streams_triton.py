# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Collapse and expand of the mHC streams with their gradients, one program a token (spec §3).

Letters: N tokens, HC streams, d hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _collapse_kernel(x, pre, out, d, HC: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < d
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(HC):
        total += tl.load(pre + n * HC + s) * tl.load(x + (n * HC + s) * d + c, mask=live, other=0).to(
            tl.float32
        )
    tl.store(out + n * d + c, total.to(tl.bfloat16), mask=live)


@triton.jit
def _collapse_back_kernel(x, pre, grad, gx, gpre, d, HC: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < d
    g = tl.load(grad + n * d + c, mask=live, other=0).to(tl.float32)
    for s in tl.static_range(HC):
        row = tl.load(x + (n * HC + s) * d + c, mask=live, other=0).to(tl.float32)
        tl.store(gpre + n * HC + s, tl.sum(g * row, axis=0))
        tl.store(gx + (n * HC + s) * d + c, (g * tl.load(pre + n * HC + s)).to(tl.bfloat16), mask=live)


@triton.jit
def _expand_kernel(x, y, post, comb, out, d, HC: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < d
    added = tl.load(y + n * d + c, mask=live, other=0).to(tl.float32)
    for t in tl.static_range(HC):
        total = tl.load(post + n * HC + t) * added
        for s in tl.static_range(HC):
            row = tl.load(x + (n * HC + s) * d + c, mask=live, other=0).to(tl.float32)
            total += tl.load(comb + (n * HC + s) * HC + t) * row
        tl.store(out + (n * HC + t) * d + c, total.to(tl.bfloat16), mask=live)


@triton.jit
def _expand_back_kernel(
    x, y, post, comb, grad, gx, gy, gpost, gcomb, d, HC: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < d
    added = tl.load(y + n * d + c, mask=live, other=0).to(tl.float32)
    total_y = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(HC):
        g = tl.load(grad + (n * HC + t) * d + c, mask=live, other=0).to(tl.float32)
        tl.store(gpost + n * HC + t, tl.sum(g * added, axis=0))
        total_y += g * tl.load(post + n * HC + t)
    tl.store(gy + n * d + c, total_y.to(tl.bfloat16), mask=live)
    for s in tl.static_range(HC):
        row = tl.load(x + (n * HC + s) * d + c, mask=live, other=0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for t in tl.static_range(HC):
            g = tl.load(grad + (n * HC + t) * d + c, mask=live, other=0).to(tl.float32)
            tl.store(gcomb + (n * HC + s) * HC + t, tl.sum(g * row, axis=0))
            total += tl.load(comb + (n * HC + s) * HC + t) * g
        tl.store(gx + (n * HC + s) * d + c, total.to(tl.bfloat16), mask=live)


class Collapse(torch.autograd.Function):
    """bf16 [N, d] of streams bf16 [N, HC, d] and pre fp32 [N, HC]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pre: Tensor) -> Tensor:
        """One kernel."""
        x, pre = x.contiguous(), pre.contiguous()
        ctx.save_for_backward(x, pre)
        n, hc, d = x.shape
        out = torch.empty(n, d, dtype=x.dtype, device=x.device)
        _collapse_kernel[(n,)](x, pre, out, d, HC=hc, BLOCK=triton.next_power_of_2(d), num_warps=2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One kernel."""
        x, pre = ctx.saved_tensors
        n, hc, d = x.shape
        gx, gpre = torch.empty_like(x), torch.empty_like(pre)
        block = triton.next_power_of_2(d)
        _collapse_back_kernel[(n,)](
            x, pre, grads[0].contiguous(), gx, gpre, d, HC=hc, BLOCK=block, num_warps=2
        )
        return gx, gpre


class Expand(torch.autograd.Function):
    """bf16 [N, HC, d]: comb-mixed streams plus post times the sublayer's output y bf16 [N, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """One kernel."""
        x, y, post, comb = (t.contiguous() for t in (x, y, post, comb))
        ctx.save_for_backward(x, y, post, comb)
        n, hc, d = x.shape
        out = torch.empty_like(x)
        block = triton.next_power_of_2(d)
        _expand_kernel[(n,)](x, y, post, comb, out, d, HC=hc, BLOCK=block, num_warps=2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One kernel."""
        saved = ctx.saved_tensors
        n, hc, d = saved[0].shape
        out = [torch.empty_like(t) for t in saved]
        block = triton.next_power_of_2(d)
        grad = grads[0].contiguous()
        _expand_back_kernel[(n,)](*saved, grad, *out, d, HC=hc, BLOCK=block, num_warps=2)
        return tuple(out)
