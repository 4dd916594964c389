# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The table of a rotary embedding on a GPU, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def _table(position_ptr, freq_ptr, cos_ptr, sin_ptr, count, width, B: tl.constexpr):
    """Grid (ceil(count / B)): of count = positions·width cells."""
    cell = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = cell < count
    position = tl.load(position_ptr + cell // width, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(freq_ptr + cell % width, mask=inside, other=0.0)
    tl.store(cos_ptr + cell, tl.cos(angle), mask=inside)
    tl.store(sin_ptr + cell, tl.sin(angle), mask=inside)


def rope_table(positions: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) fp32 [N, R/2] of positions int64 [N] and freqs fp32 [R/2]."""
    width = freqs.shape[0]
    cos, sin = (torch.empty(positions.shape[0], width, device=positions.device) for _ in range(2))
    count = cos.numel()
    if count:
        _table[(triton.cdiv(count, 256),)](
            positions.contiguous(), freqs, cos, sin, count, width, 256, enable_fp_fusion=False
        )
    return cos, sin
