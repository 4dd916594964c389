"""Truth for rotary embeddings: everything in fp32 (spec §3, §14)."""

from __future__ import annotations

import math
from functools import cache

import torch


def frequencies(dim: int, theta: float) -> torch.Tensor:
    """Fp32 [dim/2]: 1/theta^(2j/dim)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def yarn_frequencies(
    dim: int, theta: float, factor: float, beta_fast: float, beta_slow: float, original: int
) -> torch.Tensor:
    """The same, interpolated by YaRN between `low` and `high`."""

    def corner(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(corner(beta_fast)), 0)
    high = min(math.ceil(corner(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp_(0, 1)
    plain = frequencies(dim, theta)
    return plain * (1 - ramp) + plain / factor * ramp


@cache
def _signs(inverse: bool, device: torch.device) -> torch.Tensor:
    return torch.tensor([1.0, -1.0] if inverse else [-1.0, 1.0], device=device)


def rotate(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, inverse: bool) -> torch.Tensor:
    """bf16 [N, ..., C]: the last 2·len(freqs) channels rotated as interleaved pairs, at positions [N]."""
    turning = freqs.shape[0]
    angles = positions.to(torch.float32).unsqueeze(-1) * freqs
    angles = angles.view(x.shape[0], *([1] * (x.dim() - 2)), turning, 1)
    out = x.clone(memory_format=torch.contiguous_format)
    turned = out[..., -2 * turning :].view(*x.shape[:-1], turning, 2)
    pairs = turned.to(torch.float32)
    crossed = pairs.flip(-1).mul_(torch.sin(angles) * _signs(inverse, x.device))
    turned.copy_((pairs * torch.cos(angles)).add_(crossed))  # (even·cos - odd·sin, odd·cos + even·sin)
    return out


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotate` with cos and sin [N, R/2] at hand: x bf16 [N, H, C]; -sin turns the other way."""
    turning = cos.shape[1]
    out = x.clone(memory_format=torch.contiguous_format)
    turned = out[..., -2 * turning :].view(*x.shape[:-1], turning, 2)
    even, odd = turned.to(torch.float32).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned.copy_(torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1))
    return out
