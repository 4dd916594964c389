# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Packed index queries on a GPU, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.packed_triton import bf16_round, pack_fp4_e8m0


@triton.jit(do_not_specialize=["count"])
def _queries(
    q_ptr, weight_ptr, cos_ptr, sin_ptr, payload_ptr, scale_ptr, out_ptr, count, heads, factor,
    HALF: tl.constexpr, HALF_ROPE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(count / R)): R of the count = tokens·heads rows."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    pair = tl.arange(0, HALF)
    inside = (row < count)[:, None]
    words = tl.load(q_ptr + row[:, None] * HALF + pair[None, :], mask=inside, other=0)  # two bf16 a word
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    turn = pair - (HALF - HALF_ROPE)
    at = (row // heads)[:, None] * HALF_ROPE + turn[None, :]
    cos = tl.load(cos_ptr + at, mask=inside & (turn >= 0)[None, :], other=1.0)
    sin = tl.load(sin_ptr + at, mask=inside & (turn >= 0)[None, :], other=0.0)
    turned = bf16_round(even * cos - odd * sin)
    odd = bf16_round(even * sin + odd * cos)
    payload, scales = pack_fp4_e8m0(turned, odd, HALF // 16)
    tl.store(payload_ptr + row[:, None] * HALF + pair[None, :], payload, mask=inside)
    group = tl.arange(0, HALF // 16)
    tl.store(scale_ptr + row[:, None] * (HALF // 16) + group[None, :], scales, mask=inside)
    weight = tl.load(weight_ptr + row, mask=row < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, weight * factor, mask=row < count)


def pack(
    q: torch.Tensor, weights: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload, scales and fp32 weights, of heads of a power of two channels."""
    tokens, heads, width = q.shape
    payload = torch.empty(tokens, heads, width // 2, dtype=torch.uint8, device=q.device)
    scales = torch.empty(tokens, heads, width // 32, dtype=torch.uint8, device=q.device)
    out = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    count = tokens * heads
    if count:
        rows = max(1, 1024 // width)
        _queries[(triton.cdiv(count, rows),)](
            q.contiguous().view(torch.int32), weights.contiguous(), rope[0].contiguous(),
            rope[1].contiguous(),
            payload, scales, out, count, heads, scale, width // 2, rope[0].shape[1], rows,
            enable_fp_fusion=False,
        )  # fmt: skip
    return payload, scales, out
