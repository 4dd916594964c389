"""Truth for packed E2M1: groups of 16 with E4M3 scales, groups of 32 with power-of-two scales (spec §4)."""

from __future__ import annotations

import math
from functools import cache

import torch
from cedar.kernels.fp8_ref import exponent_code, exponent_value, power_above

E2M1_MAX = 6.0
E4M3_GROUP = 16
E8M0_GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _boundaries(device: torch.device) -> torch.Tensor:
    """Fp32 [7]: a magnitude's code is the number of these strictly below it (ties go to the even code)."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    rounds_up = torch.tensor([False, True, False, True, False, True, False], device=device)
    return torch.where(rounds_up, torch.nextafter(ties, torch.zeros_like(ties)), ties)


@cache
def _byte_values(device: torch.device) -> torch.Tensor:
    """Fp32 [256, 2]: the two values of a byte, low nibble first."""
    codes = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((codes[byte & 15], codes[byte >> 4]), dim=-1)


def encode(scaled: torch.Tensor) -> torch.Tensor:
    """Fp32 [..., C] within ±6 to packed E2M1 uint8 [..., C/2], nearest even; even channels low."""
    code = torch.bucketize(scaled.abs(), _boundaries(scaled.device), out_int32=True)
    code |= (scaled.view(torch.int32) >> 28).bitwise_and_(8)  # the sign
    return (code[..., 1::2] << 4).bitwise_or_(code[..., 0::2]).to(torch.uint8)


def decode(payload: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 uint8 [..., C/2] to fp32 [..., C]."""
    values = _byte_values(payload.device).index_select(0, payload.reshape(-1).to(torch.int32))
    return values.view(*payload.shape[:-1], payload.shape[-1] * 2)


def pack_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., C] to payload uint8 [..., C/2] and E4M3 scale bytes [..., C/16]."""
    groups = x.to(torch.float32).view(*x.shape[:-1], x.shape[-1] // E4M3_GROUP, E4M3_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * math.ldexp(1.0, -9))
    scale = (amax / E2M1_MAX).clamp_max_(448.0).to(torch.float8_e4m3fn)
    scaled = (groups / scale.to(torch.float32)).clamp_(-E2M1_MAX, E2M1_MAX)
    return encode(scaled.flatten(-2)), scale.squeeze(-1).view(torch.uint8)


def unpack_e4m3(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bf16 [..., C] that `pack_e4m3` stored."""
    groups = decode(payload).view(*scales.shape, E4M3_GROUP)
    return (
        groups.mul_(scales.view(torch.float8_e4m3fn).to(torch.float32).unsqueeze(-1))
        .flatten(-2)
        .to(torch.bfloat16)
    )


def pack_e8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., C] to payload uint8 [..., C/2] and E8M0 scale bytes [..., C/32]."""
    groups = x.to(torch.float32).view(*x.shape[:-1], x.shape[-1] // E8M0_GROUP, E8M0_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * math.ldexp(1.0, -126))
    scale = power_above(amax.mul_(1.0 / E2M1_MAX))  # torch multiplies by the factor rounded to fp32
    scaled = (groups / scale).clamp_(-E2M1_MAX, E2M1_MAX)
    return encode(scaled.flatten(-2)), exponent_code(scale).squeeze(-1)


def unpack_e8m0(
    payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The [..., C] that `pack_e8m0` stored, or an MXFP4 weight; any `dtype` after rounding to bf16."""
    groups = decode(payload).view(*scales.shape, E8M0_GROUP)
    return groups.mul_(exponent_value(scales).unsqueeze(-1)).flatten(-2).to(torch.bfloat16).to(dtype)
