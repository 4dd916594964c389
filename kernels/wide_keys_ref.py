"""Truth for keys expanded to fp16 of value·2^-7, and what they stand for."""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, paging_ref
from cedar.kernels.fp8_ref import GROUP

SCALE = 2.0**-7


def expand_entries(
    pages: torch.Tensor, planes: paging_ref.Planes, page_table: torch.Tensor, count: int
) -> torch.Tensor:
    """fp16 [S, count, D] of the first `count` entries of each sequence; page numbers are clamped."""
    rows = planes[0][2]
    page = page_table[:, : -(-count // rows)].long().clamp(0, max(0, pages.shape[0] - 1))
    payload, scales = (paging_ref.rows_view(pages, plane)[page].flatten(1, 2)[:, :count] for plane in planes)
    groups = fp4_ref.decode(payload).view(*scales.shape, fp4_ref.E4M3_GROUP)
    factor = scales.view(torch.float8_e4m3fn).to(torch.float32) * SCALE
    return groups.mul_(factor.unsqueeze(-1)).flatten(-2).to(torch.float16)


def expand_window(rows: torch.Tensor, width: int) -> torch.Tensor:
    """fp16 [..., D] of stored rows uint8 [..., D + D/32], in the arithmetic of attention on a Hopper: E4M3's
    bits as fp16 (value·2^-8; NaN is 480) times 2^(code - 126), at most 2^15 and 0 below 2^-24.
    """
    byte, code = rows[..., :width].to(torch.int32), rows[..., width:].to(torch.int32)
    bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
    value = bits.to(torch.int16).view(torch.float16).to(torch.float32)
    power = ((code.clamp_max(141) + 1) << 23).view(torch.float32).masked_fill(code < 102, 0.0)
    power = power.repeat_interleave(GROUP, -1)
    return (value * power).to(torch.float16)  # exact in fp32, so rounded once


def values(wide: torch.Tensor) -> torch.Tensor:
    """float64 of what wide keys stand for."""
    return wide.to(torch.float64) / SCALE
