# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 read back on a GPU, one launch (spec §4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.packed_triton import exponent_value, to_bf16


@triton.jit(do_not_specialize=["count"])
def _dequantize(q_ptr, scale_ptr, out_ptr, count, B: tl.constexpr):
    """Grid (ceil(count / B)): E4M3 bytes with one E8M0 byte for each 32, to bf16."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    value = tl.load(q_ptr + at, mask=inside, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    code = tl.load(scale_ptr + at // 32, mask=inside, other=127)
    tl.store(out_ptr + at, to_bf16(value * exponent_value(code)), mask=inside)


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 [..., C] of q float8_e4m3fn [..., C] and E8M0 bytes [..., C/32]."""
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    count = q.numel()
    if count:
        block = min(1024, triton.next_power_of_2(count))
        grid = (triton.cdiv(count, block),)
        _dequantize[grid](q.contiguous().view(torch.uint8), scale.contiguous(), out, count, block)
    return out
