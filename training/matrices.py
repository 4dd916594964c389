"""Weights under their published names, in fp32, quantised on the way into each product (spec §2)."""

from __future__ import annotations

import torch
from cedar.training.fused import matmul, matmul_fp32, rms_norm
from cedar.training.quantise import fp8_activation, fp8_weight
from torch import Tensor, nn


class Dense(nn.Module):
    """An FP8 matrix [O, I]; its input is quantised."""

    def __init__(self, out: int, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * (gain * width**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [..., I] to bf16 [..., O]."""
        return matmul(fp8_activation(x), fp8_weight(self.weight))


class Plain(nn.Module):
    """A bf16 matrix [O, I], perhaps with a bias."""

    def __init__(self, out: int, width: int, gain: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * (gain * width**-0.5))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [..., I] to bf16 [..., O]."""
        y = matmul(x, self.weight.to(torch.bfloat16))
        return y if self.bias is None else (y + self.bias.to(torch.bfloat16))

    def full(self, x: Tensor) -> Tensor:
        """fp32 [..., O]."""
        return matmul_fp32(x, self.weight.to(torch.bfloat16))


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [..., C] to bf16 [..., C]."""
        return rms_norm(x, self.weight, self.eps)
