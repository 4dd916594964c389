# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The routed experts' activation with its gradient, one kernel each way.

Letters: N tokens, E experts, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # tokens' experts a program


@triton.jit
def _forward_kernel(gate, up, weight, out, count, width, limit, WIDE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDE)[None, :]
    live = (row < count)[:, None] & (c < width)
    at = row[:, None] * width + c
    g = tl.minimum(tl.load(gate + at, mask=live, other=0).to(tl.float32), limit)
    u = tl.load(up + at, mask=live, other=0).to(tl.float32)
    u = tl.minimum(tl.maximum(u, -limit), limit)
    w = tl.load(weight + row, mask=row < count, other=0)[:, None]
    tl.store(out + at, (g / (1 + tl.exp(-g)) * u * w).to(tl.bfloat16), mask=live)


@triton.jit
def _backward_kernel(
    gate, up, weight, grad, d_gate, d_up, d_weight, count, width, limit,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDE)[None, :]
    live = (row < count)[:, None] & (c < width)
    at = row[:, None] * width + c
    g = tl.load(gate + at, mask=live, other=0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0).to(tl.float32)
    d = tl.load(grad + at, mask=live, other=0).to(tl.float32)
    w = tl.load(weight + row, mask=row < count, other=0)[:, None]
    low = tl.minimum(g, limit)
    sigmoid = 1 / (1 + tl.exp(-low))
    silu = low * sigmoid
    clamped = tl.minimum(tl.maximum(u, -limit), limit)
    slope = tl.where(g <= limit, sigmoid * (1 + low * (1 - sigmoid)), 0.0)
    tl.store(d_gate + at, (d * w * clamped * slope).to(tl.bfloat16), mask=live)
    inside = (u >= -limit) & (u <= limit)
    tl.store(d_up + at, tl.where(inside, d * w * silu, 0.0).to(tl.bfloat16), mask=live)
    tl.store(d_weight + row, tl.sum(d * silu * clamped, axis=1), mask=row < count)


class WeightedSwiglu(torch.autograd.Function):
    """`fused.swiglu_weighted`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, limit: float) -> Tensor:
        """bf16 [N, E, I] of gate, up bf16 [N, E, I], weight fp32 [N, E]."""
        gate, up, weight = (t.contiguous() for t in (gate, up, weight))
        ctx.save_for_backward(gate, up, weight)
        ctx.limit = limit
        out = torch.empty_like(gate)
        width = gate.shape[-1]
        _forward_kernel[(triton.cdiv(weight.numel(), _ROWS),)](
            gate, up, weight, out, weight.numel(), width, limit,
            WIDE=triton.next_power_of_2(width), ROWS=_ROWS,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One kernel."""
        saved = ctx.saved_tensors
        out = [torch.empty_like(t) for t in saved]
        width, count = saved[0].shape[-1], saved[2].numel()
        _backward_kernel[(triton.cdiv(count, _ROWS),)](
            *saved, grads[0].contiguous(), *out, count, width, ctx.limit,
            WIDE=triton.next_power_of_2(width), ROWS=_ROWS,
        )  # fmt: skip
        return (*out, None)
