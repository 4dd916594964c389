# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The training attention's softmax and rotation with their gradients, one kernel each way.

As separate operations they read and write the [queries, entries] scores a dozen times. Letters: B rows, n
blocks, H heads, W window, M entries, N tokens, C channels, R rotated pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # scores a program, at least one row


@triton.jit
def _softmax_kernel(
    low, high, low_mask, high_mask, sink, p_low, p_high, p_sink,
    scale, blocks, heads, near, far, mask_stride,
    W: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w, head, block = row % W, row // W % heads, row // W // heads
    query = (block * W + w)[:, None]
    c = tl.arange(0, NEAR)[None, :]
    at = row[:, None] * near + c
    seen = tl.load(low_mask + query * near + c, mask=c < near, other=0) != 0
    s = tl.load(low + at, mask=c < near, other=0).to(tl.float32) * scale
    s = tl.where(seen, s, float("-inf"))
    bias = tl.load(sink + head)
    top = tl.maximum(tl.max(s, axis=1), bias)
    if FAR > 0:
        j = tl.arange(0, FAR)[None, :]
        far_at = row[:, None] * far + j
        far_query = (block // blocks * mask_stride)[:, None] + ((block % blocks) * W + w)[:, None] * far
        far_seen = tl.load(high_mask + far_query + j, mask=j < far, other=0) != 0
        t = tl.load(high + far_at, mask=j < far, other=0).to(tl.float32) * scale
        t = tl.where(far_seen, t, float("-inf"))
        top = tl.maximum(top, tl.max(t, axis=1))
        t = tl.exp(t - top[:, None])
        rest = tl.exp(bias - top)
        s = tl.exp(s - top[:, None])
        total = tl.sum(s, axis=1) + tl.sum(t, axis=1) + rest
        tl.store(p_high + far_at, (t / total[:, None]).to(tl.bfloat16), mask=j < far)
    else:
        rest = tl.exp(bias - top)
        s = tl.exp(s - top[:, None])
        total = tl.sum(s, axis=1) + rest
    tl.store(p_low + at, (s / total[:, None]).to(tl.bfloat16), mask=c < near)
    tl.store(p_sink + row, rest / total)


@triton.jit
def _softmax_back_kernel(
    p_low, p_high, p_sink, g_low, g_high, d_low, d_high, d_sink, scale, near, far,
    NEAR: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, NEAR)[None, :]
    at = row[:, None] * near + c
    p = tl.load(p_low + at, mask=c < near, other=0).to(tl.float32)
    g = tl.load(g_low + at, mask=c < near, other=0).to(tl.float32)
    dot = tl.sum(p * g, axis=1)
    if FAR > 0:
        j = tl.arange(0, FAR)[None, :]
        far_at = row[:, None] * far + j
        q = tl.load(p_high + far_at, mask=j < far, other=0).to(tl.float32)
        h = tl.load(g_high + far_at, mask=j < far, other=0).to(tl.float32)
        dot += tl.sum(q * h, axis=1)
        tl.store(d_high + far_at, (q * (h - dot[:, None]) * scale).to(tl.bfloat16), mask=j < far)
    tl.store(d_low + at, (p * (g - dot[:, None]) * scale).to(tl.bfloat16), mask=c < near)
    tl.store(d_sink + row, -tl.load(p_sink + row) * dot)


class MaskedSoftmax(torch.autograd.Function):
    """`fused.masked_softmax`: probabilities bf16 of window scores and, where there are any, global scores."""

    @staticmethod
    def forward(
        ctx: Any,
        low: Tensor,
        high: Tensor | None,
        low_mask: Tensor,
        high_mask: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Scores bf16 [B, n, H, W, 2W] and [B, n, H, W, M]; masks bool [B, n, W, .]; sink fp32 [H]."""
        low, low_mask = low.contiguous(), low_mask.contiguous()
        _, blocks, heads, width, near = low.shape
        p_low = torch.empty_like(low)
        p_sink = torch.empty(low.shape[:-1], dtype=torch.float32, device=low.device)
        p_high, far, stride = None, 0, 0
        if high is not None and high_mask is not None:
            high = high.contiguous()
            p_high, far = torch.empty_like(high), high.shape[-1]
            stride = high_mask.stride(0)
            assert high_mask[0].is_contiguous()
        sizes = _sizes(near, far, width)
        _softmax_kernel[(p_sink.numel() // sizes["ROWS"],)](
            low, low if high is None else high, low_mask, low_mask if high_mask is None else high_mask,
            sink, p_low, p_low if p_high is None else p_high, p_sink,
            scale, blocks, heads, near, far, stride, W=width, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(p_low, p_high, p_sink)
        ctx.scale = scale
        return p_low, p_high

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One kernel."""
        p_low, p_high, p_sink = ctx.saved_tensors
        near, far = p_low.shape[-1], 0 if p_high is None else p_high.shape[-1]
        g_low = grads[0].contiguous()
        g_high = None if p_high is None else grads[1].contiguous()
        d_low, d_sink = torch.empty_like(p_low), torch.empty_like(p_sink)
        d_high = None if p_high is None else torch.empty_like(p_high)
        sizes = _sizes(near, far, p_low.shape[3])
        _softmax_back_kernel[(p_sink.numel() // sizes["ROWS"],)](
            p_low, p_low if p_high is None else p_high, p_sink, g_low, g_low if g_high is None else g_high,
            d_low, d_low if d_high is None else d_high, d_sink, ctx.scale, near, far, **sizes,
        )  # fmt: skip
        return d_low, d_high, None, None, d_sink.sum((0, 1, 3)), None


def _sizes(near: int, far: int, width: int) -> dict[str, int]:
    """Block sizes: rows of one program are queries of one block and head."""
    wide_near, wide_far = triton.next_power_of_2(near), triton.next_power_of_2(far) if far else 0
    rows = 1
    while rows * 2 * (wide_near + wide_far) <= _TILE and width % (rows * 2) == 0:
        rows *= 2
    tile = rows * (wide_near + wide_far)
    return {"NEAR": wide_near, "FAR": wide_far, "ROWS": rows, "num_warps": 4 if tile <= 4096 else 8}


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, count, heads, sign,
    C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDE)[None, :]
    live = (row < count)[:, None] & (c < C)
    at = row[:, None] * C + c
    mine = tl.load(x + at, mask=live, other=0).to(tl.float32)
    turns = live & (c >= C - 2 * R)
    pair = (row // heads)[:, None] * R + (c - (C - 2 * R)) // 2
    other = tl.load(x + (at ^ 1), mask=turns, other=0).to(tl.float32)
    a = tl.load(cos + pair, mask=turns, other=1.0)
    b = tl.load(sin + pair, mask=turns, other=0.0) * sign
    turned = mine * a + tl.where(c % 2 == 1, other * b, -other * b)
    tl.store(out + at, tl.where(turns, turned, mine).to(tl.bfloat16), mask=live)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    channels = x.shape[-1]
    count, heads = x.numel() // channels, x.numel() // channels // x.shape[0]
    rows = 8
    _rotate_kernel[(triton.cdiv(count, rows),)](
        x, cos, sin, out, count, heads, sign,
        C=channels, R=cos.shape[-1], WIDE=triton.next_power_of_2(channels), ROWS=rows,
    )  # fmt: skip
    return out


class Rotate(torch.autograd.Function):
    """`fused.rotate`: the last 2·R channels (an even number of channels) turned as interleaved pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One kernel; x bf16 [N, ..., C], cos, sin fp32 [N, R]."""
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The other way round."""
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None
