# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""RMSNorm on a GPU, one launch, float64 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.packed_triton import to_bf16


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, stride, width, eps, B: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, B)
    x = tl.load(x_ptr + row * stride + at, mask=at < width, other=0.0).to(tl.float64)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float64)
    tl.store(out_ptr + row * width + at, to_bf16((x * scale * weight).to(tl.float32)), mask=at < width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 [..., C] of x bf16 [..., C] and weight bf16 [C]."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        size = triton.next_power_of_2(width)
        _norm[(flat.shape[0],)](
            flat,
            weight.contiguous(),
            out,
            flat.stride(0),
            width,
            eps,
            size,
            num_warps=4 if size <= 2048 else 8,
        )
    return out
