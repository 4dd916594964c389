# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The router on a GPU: one launch from logits to ids and weights; the logits are a matrix product before
it (spec §3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    experts,
    bias_stride,
    k,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
):
    """Grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    inside = expert < experts
    x = tl.load(logits_ptr + token * experts + expert, mask=inside, other=0.0)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    softplus = tl.where(x < -10.0, tl.exp(x), softplus)  # log(1 + e^x) loses e^x there
    s = tl.sqrt(softplus)
    score = s + tl.load(bias_ptr + token * bias_stride + expert, mask=inside, other=0.0)
    score = tl.where(inside, score, float("-inf"))
    taken = tl.zeros([E], tl.int32)
    for _ in range(k):
        best = tl.max(tl.where(taken > 0, float("-inf"), score), axis=0)
        first = tl.min(tl.where((score == best) & (taken == 0) & inside, expert, E), axis=0)
        taken = tl.where(expert == first, 1, taken)
    total = tl.sum(tl.where(taken > 0, s, 0.0), axis=0) + 1e-20
    order = tl.cumsum(taken, axis=0) - 1
    tl.store(ids_ptr + token * k + order, expert, mask=taken > 0)
    tl.store(weights_ptr + token * k + order, s / total * scale, mask=taken > 0)


def select(
    logits: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32 [N, k] ascending, weights fp32 [N, k]) of logits fp32 [N, E] and bias fp32 [E] or [N, E]."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits.contiguous(), bias.contiguous(), ids, weights, experts,
            experts if bias.dim() == 2 else 0, k, scale,
            triton.next_power_of_2(experts), triton.next_power_of_2(k), num_warps=4,
        )  # fmt: skip
    return ids, weights
