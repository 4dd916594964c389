"""Truth for E4M3 values with power-of-two group scales (spec §4, first rule)."""

from __future__ import annotations

import torch

GROUP = 32
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


def power_above(ratio: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below `ratio` (fp32, positive, normal), fp32."""
    bits = ratio.view(torch.int32) + 0x7FFFFF  # the exponent grows by one if any mantissa bit is set
    return bits.bitwise_and_(0x7F800000).view(torch.float32)


def exponent_code(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes of fp32 powers of two (normal)."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def exponent_value(code: torch.Tensor) -> torch.Tensor:
    """Fp32 values 2^(code-127) of E8M0 bytes; 0 is the subnormal 2^-127, 255 is NaN."""
    return code.view(torch.float8_e8m0fnu).to(torch.float32)


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., C] to E4M3 [..., C/32, 32] and fp32 scales [..., C/32, 1]."""
    groups = x.to(torch.float32).view(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(AMAX_FLOOR)
    scale = power_above(amax.mul_(1.0 / E4M3_MAX))  # torch multiplies by the factor rounded to fp32
    return (groups / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., C] to E4M3 [..., C] and E8M0 bytes [..., C/32]."""
    q, scale = quantize_groups(x)
    return q.flatten(-2), exponent_code(scale).squeeze(-1)


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 [..., C] and E8M0 bytes [..., C/32] to bf16 [..., C]."""
    groups = q.to(torch.float32).view(*scale.shape, GROUP)
    return (groups * exponent_value(scale).unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """What a matmul sees of its bf16 activation [..., C]: q·scale, float64 [..., C]."""
    q, scale = quantize_groups(x)
    return q.to(torch.float64).mul_(scale).flatten(-2)


def pack_rows(k: torch.Tensor) -> torch.Tensor:
    """bf16 [N, D] to uint8 [N, D + D/32]: payload, then scales."""
    q, scale = quantize(k)
    return torch.cat((q.view(torch.uint8), scale), dim=-1)


def unpack_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [..., D + D/32] to bf16 [..., D]."""
    return dequantize(rows[..., :width].view(torch.float8_e4m3fn), rows[..., width:])


def expand_blocks(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 [O, I] with one E8M0 byte per 32x32 block to `dtype` [O, I]."""
    rows, columns = weight.shape
    full = exponent_value(scale).repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    return (weight.to(torch.float32) * full).to(dtype)
