"""RMSNorm (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import norm_ref
from cedar.kernels.contract import Contract


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x·rsqrt(mean(x²)+eps)·weight over the last axis: x bf16 [..., C], weight bf16 [C] to bf16 [..., C]."""
    c = Contract("rms_norm")
    c.expect("x", x, "... C", torch.bfloat16)
    c.expect("weight", weight, "C", torch.bfloat16)
    if x.is_cuda:
        from cedar.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    return norm_ref.rms_norm(x, weight, eps)
