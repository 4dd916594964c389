# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The mHC projection of the streams with its gradient: the streams are read once each way (spec §6).

Letters: N tokens, K = hc·d channels of a token's streams, J projected values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _STEP = 64, 64


@triton.jit
def _forward_kernel(
    x, fn, out, rms, count, eps, K: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDE)
    total = tl.zeros([ROWS, WIDE], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        live = (n < count)[:, None] & (k < K)[None, :]
        part = tl.load(x + n[:, None] * K + k[None, :], mask=live, other=0).to(tl.float32)
        weight = tl.load(fn + j[None, :] * K + k[:, None], mask=(k < K)[:, None] & (j < J)[None, :], other=0)
        total = tl.dot(part, weight, total, input_precision="tf32")
        squares += tl.sum(part * part, axis=1)
    scale = 1 / tl.sqrt(squares / K + eps)
    live = (n < count)[:, None] & (j < J)[None, :]
    tl.store(out + n[:, None] * J + j[None, :], total * scale[:, None], mask=live)
    tl.store(rms + n, scale, mask=n < count)


@triton.jit
def _backward_kernel(
    x, fn, out, rms, grad, scaled, gx, count, K: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDE)
    live = (n < count)[:, None] & (j < J)[None, :]
    at = n[:, None] * J + j[None, :]
    g = tl.load(grad + at, mask=live, other=0)
    scale = tl.load(rms + n, mask=n < count, other=0)
    own = -tl.sum(g * tl.load(out + at, mask=live, other=0), axis=1) * scale * scale / K
    g = g * scale[:, None]
    tl.store(scaled + at, g.to(tl.bfloat16), mask=live)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        inside = (n < count)[:, None] & (k < K)[None, :]
        where = n[:, None] * K + k[None, :]
        part = tl.load(x + where, mask=inside, other=0).to(tl.float32)
        weight = tl.load(fn + j[:, None] * K + k[None, :], mask=(j < J)[:, None] & (k < K)[None, :], other=0)
        back = tl.dot(g, weight, input_precision="tf32") + own[:, None] * part
        tl.store(gx + where, back.to(tl.bfloat16), mask=inside)


class Mix(torch.autograd.Function):
    """`fused.mix`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor, eps: float) -> Tensor:
        """fp32 [N, J] of streams bf16 [N, hc, d] and fn fp32 [J, K]."""
        x, fn = x.contiguous(), fn.contiguous()
        count, (values, channels) = x.shape[0], fn.shape
        out = torch.empty(count, values, dtype=torch.float32, device=x.device)
        rms = torch.empty(count, dtype=torch.float32, device=x.device)
        _forward_kernel[(triton.cdiv(count, _ROWS),)](
            x, fn, out, rms, count, eps,
            K=channels, J=values, WIDE=_wide(values), ROWS=_ROWS, STEP=_STEP,
        )  # fmt: skip
        ctx.save_for_backward(x, fn, out, rms)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One kernel, and one product for the matrix."""
        x, fn, out, rms = ctx.saved_tensors
        count, (values, channels) = x.shape[0], fn.shape
        gx = torch.empty_like(x)
        scaled = torch.empty(count, values, dtype=x.dtype, device=x.device)
        _backward_kernel[(triton.cdiv(count, _ROWS),)](
            x, fn, out, rms, grads[0].contiguous(), scaled, gx, count,
            K=channels, J=values, WIDE=_wide(values), ROWS=_ROWS, STEP=_STEP,
        )  # fmt: skip
        return gx, (scaled.T @ x.flatten(1)).float(), None


def _wide(values: int) -> int:
    return max(16, triton.next_power_of_2(values))
