"""Truth for matmuls: float64 inside, rounded once. Products of quantised operands are exact in float64."""

from __future__ import annotations

import torch
from cedar.kernels import fp8_ref


def linear_fp8(x: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """bf16 [..., O]: x bf16 [..., I] quantised to FP8, times a float64 weight [O, I]."""
    return (fp8_ref.round_trip(x) @ expanded.T).to(torch.bfloat16)


def linear_dense(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`out_dtype` [..., O]: x [..., I] times weight [O, I]."""
    return (x.to(torch.float64) @ weight.to(torch.float64).T).to(out_dtype)
