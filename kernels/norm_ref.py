"""Truth for RMSNorm: float64 inside, rounded once."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 [..., C]: x·rsqrt(mean(x²)+eps)·weight."""
    wide = x.to(torch.float64)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
