"""Sinkhorn's iteration on hc x hc matrices, with the gradient of its fixed point (spec §6).

Forward runs the published rounds. Backward solves for the gradient at the fixed point, where rows and columns
sum to one, by the same number of rounds: no iterate is stored. Matrices are fp32 [N, hc, hc].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """Softmax over the last axis, + eps, columns; then rows and columns `rounds` - 1 times."""
    if logits.is_cuda:
        from cedar.training import sinkhorn_triton

        return sinkhorn_triton.forward(logits, eps, rounds)
    c = torch.exp(logits - logits.amax(-1, keepdim=True))
    c = c / c.sum(-1, keepdim=True) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def backward(p: Tensor, grad: Tensor, rounds: int) -> Tensor:
    """d/dlogits of sum(P·grad): P ∘ (grad - a 1ᵀ - 1 bᵀ) with a + P b = row sums, Pᵀ a + b = column sums."""
    if p.is_cuda:
        from cedar.training import sinkhorn_triton

        return sinkhorn_triton.backward(p, grad, rounds)
    weighted = p * grad
    rows, columns = weighted.sum(-1, keepdim=True), weighted.sum(-2, keepdim=True)
    b = torch.zeros_like(columns)
    for _ in range(rounds):
        a = rows - (p * b).sum(-1, keepdim=True)
        b = columns - (p * a).sum(-2, keepdim=True)
    return p * (grad - a - b)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, eps: float, rounds: int) -> Tensor:
        p = forward(logits, eps, rounds)
        ctx.save_for_backward(p)
        ctx.rounds = rounds
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return backward(ctx.saved_tensors[0], grads[0], ctx.rounds), None, None


def sinkhorn(logits: Tensor, eps: float, rounds: int) -> Tensor:
    """fp32 [N, hc, hc], rows and columns of sum one."""
    result: Tensor = _Sinkhorn.apply(logits, eps, rounds)
    return result
