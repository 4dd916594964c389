"""Truth for the router (spec §3, MoE).

Scores are computed in float64 and rounded to fp32; what follows is fp32. torch's fp32 softplus would depend,
by an ulp, on how many tokens are in the call.
"""

from __future__ import annotations

import torch
from cedar.kernels import select_ref
from cedar.kernels.mhc_ref import ordered_sum


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [N, k] ascending and weights fp32 [N, k]: top k of s + bias, weighted by s over its sum."""
    logits = x.to(torch.float64) @ weight.to(torch.float64).T
    softplus = logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs()))
    s = torch.sqrt(softplus).to(torch.float32)
    ids = select_ref.top_k(s + bias, k)
    chosen = s.gather(1, ids.to(torch.int64))
    return ids, chosen / ordered_sum(chosen, 1).add_(1e-20) * scale
