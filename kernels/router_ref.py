"""Truth for the router (spec §3, MoE)."""

from __future__ import annotations

import torch
from cedar.kernels import select_ref


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [N, k] ascending and weights fp32 [N, k]: top k of s + bias, weighted by s over its sum."""
    logits = x.to(torch.float64) @ weight.to(torch.float64).T
    s = torch.sqrt(logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs())))
    ids = select_ref.top_k(s + bias, k)
    chosen = s.gather(1, ids.to(torch.int64))
    total = chosen.sum(1, keepdim=True) + 1e-20
    return ids, (chosen / total * scale).to(torch.float32)
