"""Truth for packed index queries."""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, rope_ref


def pack(
    q: torch.Tensor, weights: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload, scales and float64 weights."""
    return *fp4_ref.pack_e8m0(rope_ref.turn(q, *rope)), weights.to(torch.float64) * scale
