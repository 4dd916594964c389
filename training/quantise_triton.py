# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The quantisers' round trips, one kernel each: nothing but the result is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUPS = 32  # groups a program


@triton.jit
def _power_above(ratio):
    bits = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _even(x):
    """Nearest integer below 2^22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _e4m3(x):
    """The nearest E4M3 value of fp32 within ±448, ties to even."""
    size = tl.abs(x)
    bits = (tl.maximum(size, 0.015625).to(tl.int32, bitcast=True)) & 0x7F800000
    step = bits.to(tl.float32, bitcast=True) * 0.125
    return _even(x / step) * step


@triton.jit
def _e2m1(x):
    size = tl.abs(x)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    return _even(x / step) * step


@triton.jit
def _groups_kernel(x, out, count, KIND: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = (group < count)[:, None]
    values = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), axis=1, keep_dims=True)
    if KIND == 0:
        scale = _power_above(tl.maximum(amax, 1e-4) * (1.0 / 448.0))
        result = _e4m3(tl.minimum(tl.maximum(values / scale, -448.0), 448.0)) * scale
    elif KIND == 1:
        scale = _power_above(tl.maximum(amax, 7.052966104933725e-38) * (1.0 / 6.0))
        result = _e2m1(tl.minimum(tl.maximum(values / scale, -6.0), 6.0)) * scale
    else:
        scale = _e4m3(tl.minimum(tl.maximum(amax, 0.01171875) / 6.0, 448.0))
        result = _e2m1(tl.minimum(tl.maximum(values / scale, -6.0), 6.0)) * scale
    tl.store(out + at, result.to(tl.bfloat16), mask=live)


@triton.jit
def _blocks_kernel(w, out, columns, SIDE: tl.constexpr):
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    at = row[:, None] * columns + column[None, :]
    values = tl.load(w + at).to(tl.float32)
    amax = tl.max(tl.max(tl.abs(values), axis=1), axis=0)
    scale = _power_above(tl.maximum(amax, 1e-4) * (1.0 / 448.0))
    result = _e4m3(tl.minimum(tl.maximum(values / scale, -448.0), 448.0)) * scale
    tl.store(out + at, result.to(tl.bfloat16))


FP8, FP4_E8M0, FP4_E4M3 = 0, 1, 2


def groups(x: Tensor, kind: int) -> Tensor:
    """bf16 [..., C] as stored and read back in groups along the last axis."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    width = 16 if kind == FP4_E4M3 else 32
    count = x.numel() // width
    _groups_kernel[(triton.cdiv(count, _GROUPS),)](x, out, count, KIND=kind, WIDTH=width, GROUPS=_GROUPS)
    return out


def blocks(weight: Tensor) -> Tensor:
    """bf16 [O, I] of fp32 [O, I] in 32 x 32 blocks; both sides multiples of 32."""
    weight = weight.contiguous()
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    rows, columns = weight.shape
    _blocks_kernel[(rows // 32, columns // 32)](weight, out, columns, SIDE=32)
    return out
