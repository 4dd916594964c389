"""Truth for the grouped output projection: a block-diagonal product, float64 inside."""

from __future__ import annotations

import torch


def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 [N, G·r]: o bf16 [N, G, C] times weight [G, r, C] group by group."""
    wide = o.to(torch.float64).transpose(0, 1) @ weight.to(torch.float64).transpose(1, 2)
    return wide.transpose(0, 1).flatten(1).to(torch.bfloat16)
