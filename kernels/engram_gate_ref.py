"""Truth for the Engram gate (spec §7): float64 inside."""

from __future__ import annotations

import torch


def engram_gate(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    is_image: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """bf16 [N, hc, d]: X[s] + gate_s·value."""
    wide, key = x.to(torch.float64), key.to(torch.float64)
    a = (wide * q_weight.to(torch.float64) * k_weight.to(torch.float64) * key).sum(-1)
    a = (
        a
        * torch.rsqrt(wide.square().mean(-1) + eps)
        * torch.rsqrt(key.square().mean(-1) + eps)
        * x.shape[-1] ** -0.5
    )
    gate = 1 / (1 + torch.exp(-torch.sign(a) * torch.sqrt(a.abs().clamp_min(1e-6))))
    gate = gate.masked_fill(is_image.unsqueeze(-1), 0.0)
    return (wide + gate.unsqueeze(-1) * value.to(torch.float64).unsqueeze(1)).to(x.dtype)
