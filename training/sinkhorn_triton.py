# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sinkhorn's rounds and their gradient in registers, one kernel each.

Unrolled for a compiler to fuse, they take minutes to compile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # matrices a program


@triton.jit
def _forward_kernel(logits, out, count, eps, rounds, HC: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HC)
    at = n[:, None, None] * (HC * HC) + i[None, :, None] * HC + i[None, None, :]
    live = (n < count)[:, None, None]
    c = tl.load(logits + at, mask=live, other=0.0)
    c = tl.exp(c - tl.max(c, axis=2, keep_dims=True))
    c = c / tl.sum(c, axis=2, keep_dims=True) + eps
    c = c / (tl.sum(c, axis=1, keep_dims=True) + eps)
    for _ in range(rounds - 1):
        c = c / (tl.sum(c, axis=2, keep_dims=True) + eps)
        c = c / (tl.sum(c, axis=1, keep_dims=True) + eps)
    tl.store(out + at, c, mask=live)


@triton.jit
def _backward_kernel(p_in, grad_in, out, count, rounds, HC: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HC)
    at = n[:, None, None] * (HC * HC) + i[None, :, None] * HC + i[None, None, :]
    live = (n < count)[:, None, None]
    p = tl.load(p_in + at, mask=live, other=0.0)
    grad = tl.load(grad_in + at, mask=live, other=0.0)
    weighted = p * grad
    rows = tl.sum(weighted, axis=2, keep_dims=True)
    columns = tl.sum(weighted, axis=1, keep_dims=True)
    a = rows
    b = columns - tl.sum(p * a, axis=1, keep_dims=True)
    for _ in range(rounds - 1):
        a = rows - tl.sum(p * b, axis=2, keep_dims=True)
        b = columns - tl.sum(p * a, axis=1, keep_dims=True)
    tl.store(out + at, p * (grad - a - b), mask=live)


def forward(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """As `sinkhorn.forward`, on an accelerator."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    count, hc = logits.shape[:2]
    grid = (triton.cdiv(count, _BLOCK),)
    _forward_kernel[grid](logits, out, count, eps, rounds, HC=hc, BLOCK=_BLOCK)
    return out


def backward(p: Tensor, grad: Tensor, rounds: int) -> Tensor:
    """As `sinkhorn.backward`, on an accelerator."""
    grad = grad.contiguous()
    out = torch.empty_like(p)
    count, hc = p.shape[:2]
    grid = (triton.cdiv(count, _BLOCK),)
    _backward_kernel[grid](p, grad, out, count, rounds, HC=hc, BLOCK=_BLOCK)
    return out
