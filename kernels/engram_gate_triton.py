# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Engram gate on a GPU, one launch (spec §7)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.packed_triton import to_bf16


@triton.jit
def _gate(
    x_ptr, key_ptr, value_ptr, q_ptr, k_ptr, image_ptr, out_ptr, width, eps, HC: tl.constexpr, B: tl.constexpr
):
    """Grid (tokens, HC): one stream of one token, B channels at a time.

    A product of two bf16 values is exact in fp32; fp32 sums run over width / B terms, float64 ones over the
    rest.
    """
    token = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    base = (token * HC + stream) * width
    product = tl.zeros([B], tl.float32)
    squares = tl.zeros([B], tl.float32)
    key_squares = tl.zeros([B], tl.float32)
    for start in range(0, width, B):
        at = tl.multiple_of(start, B) + tl.arange(0, B)
        inside = at < width
        x = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + stream * width + at, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + stream * width + at, mask=inside, other=0.0).to(tl.float32)
        product += (x * key) * (q * k)
        squares += x * x
        key_squares += key * key
    a = tl.sum(product.to(tl.float64), axis=0)
    a = (
        a
        / tl.sqrt(tl.sum(squares.to(tl.float64), axis=0) / width + eps)
        / tl.sqrt(tl.sum(key_squares.to(tl.float64), axis=0) / width + eps)
    )
    a = a / tl.sqrt(width.to(tl.float64))
    root = tl.sqrt(tl.maximum(tl.abs(a), 1e-6))
    root = tl.where(a > 0, root, tl.where(a < 0, -root, 0.0))
    gate = 1.0 / (1.0 + tl.exp(-root.to(tl.float32)))
    gate = tl.where(tl.load(image_ptr + token) != 0, 0.0, gate)
    for start in range(0, width, B):
        at = tl.multiple_of(start, B) + tl.arange(0, B)
        inside = at < width
        x = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + base + at, to_bf16(x + gate * value), mask=inside)


def engram_gate(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    is_image: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """X[s] + gate_s·value, bf16 [N, hc, d]; arguments as the public function's."""
    tokens, streams, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens:
        size = min(1024, triton.next_power_of_2(width))
        _gate[(tokens, streams)](
            x.contiguous(), key.contiguous(), value.contiguous(), q_weight.contiguous(),
            k_weight.contiguous(),
            is_image.contiguous().view(torch.uint8), out, width, eps, streams, size, num_warps=4,
        )  # fmt: skip
    return out
