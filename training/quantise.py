"""Quantisation in the forward pass, straight through in the backward pass (spec §2, §4).

Values are exactly those that storing and reading back would give. A scale follows the group's maximum, so
nothing saturates and the gradient passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cedar.kernels.fp8_ref import AMAX_FLOOR, E4M3_MAX, GROUP, power_above
from torch import Tensor

_E2M1_MAX = 6.0


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.dtype = x.dtype
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None


def round_e2m1(x: Tensor) -> Tensor:
    """fp32 within ±6 to the nearest E2M1 value, ties to even."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def _fp8_groups(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR)
    scale = power_above(amax * (1.0 / E4M3_MAX))
    q = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (q.float() * scale).flatten(-2).to(torch.bfloat16)


def _fp8_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = blocks.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp_min(AMAX_FLOOR)
    scale = power_above(amax * (1.0 / E4M3_MAX))
    q = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return q.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.bfloat16)


def _fp4_e4m3(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_E2M1_MAX * 2.0**-9)
    scale = (amax / _E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    q = round_e2m1((groups / scale).clamp(-_E2M1_MAX, _E2M1_MAX))
    return (q * scale).flatten(-2).to(torch.bfloat16)


def _fp4_e8m0(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(_E2M1_MAX * 2.0**-126)
    scale = power_above(amax * (1.0 / _E2M1_MAX))
    q = round_e2m1((groups / scale).clamp(-_E2M1_MAX, _E2M1_MAX))
    return (q * scale).flatten(-2).to(torch.bfloat16)


def fp8_activation(x: Tensor) -> Tensor:
    """bf16 [..., C] after groups of 32 with power-of-two scales: matmul inputs, window keys."""
    return _through(x, _fp8_groups, 0)


def fp8_weight(weight: Tensor) -> Tensor:
    """fp32 [O, I] to the bf16 values of 32x32 blocks."""
    return _through(weight, _fp8_blocks, None)


def mxfp4_weight(weight: Tensor) -> Tensor:
    """fp32 [..., O, I] to the bf16 values of E2M1 groups of 32 along the input."""
    return _through(weight, _fp4_e8m0, 1)


def fp4_entry(x: Tensor) -> Tensor:
    """bf16 [..., D] as a global entry reads back."""
    return _through(x, _fp4_e4m3, 2)


def fp4_index(x: Tensor) -> Tensor:
    """bf16 [..., Di] as an index key or query reads back."""
    return _through(x, _fp4_e8m0, 1)


def _through(x: Tensor, function: Callable[[Tensor], Tensor], kind: int | None) -> Tensor:
    """`kind` is the accelerator's name of `function`, None for blocks."""
    if x.is_cuda:
        from cedar.training import quantise_triton

        function = quantise_triton.blocks if kind is None else partial(quantise_triton.groups, kind=kind)
    result: Tensor = _Through.apply(x, function)
    return result
