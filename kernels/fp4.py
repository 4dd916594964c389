"""FP4: two E2M1 values a byte, even channel in the low nibble, with E4M3 or E8M0 group scales (spec §4).

Global entries use groups of 16 with E4M3 scales; index keys, index queries and expert weights (MXFP4) groups
of 32 with power-of-two scales. Scales are handed about as the bytes that are stored.
"""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref
from cedar.kernels.contract import Contract


def pack_fp4_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs x bf16 [..., C], C a multiple of 16: (payload uint8 [..., C/2], E4M3 scales uint8 [..., C/16]).

    amax = max(|x|, 6*2^-9) per group; scale = e4m3(min(amax/6, 448)); values round to nearest even, within
    ±6.
    """
    c = Contract("pack_fp4_e4m3")
    c.expect("x", x, "... C", torch.bfloat16)
    c.divisible("x", "C", fp4_ref.E4M3_GROUP)
    if _has_kernel(x):
        from cedar.kernels import compress_triton

        return compress_triton.pack_fp4(x, e4m3=True)
    return fp4_ref.pack_e4m3(x)


def unpack_fp4_e4m3(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16(q * scale) [..., C] of payload uint8 [..., C/2] and E4M3 scale bytes uint8 [..., C/16]."""
    _check_packed("unpack_fp4_e4m3", payload, scales, "... C/16")
    return fp4_ref.unpack_e4m3(payload, scales)


def pack_fp4_e8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs x bf16 [..., C], C a multiple of 32: (payload uint8 [..., C/2], E8M0 scales uint8 [..., C/32]).

    amax = max(|x|, 6*2^-126) per group; scale = the power of two at or above amax/6.
    """
    c = Contract("pack_fp4_e8m0")
    c.expect("x", x, "... C", torch.bfloat16)
    c.divisible("x", "C", fp4_ref.E8M0_GROUP)
    if _has_kernel(x):
        from cedar.kernels import compress_triton

        return compress_triton.pack_fp4(x, e4m3=False)
    return fp4_ref.pack_e8m0(x)


def unpack_fp4_e8m0(
    payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """bf16(q * scale) [..., C], as `dtype`, of payload uint8 [..., C/2] and E8M0 scales uint8 [..., C/32]."""
    _check_packed("unpack_fp4_e8m0", payload, scales, "... C/32")
    return fp4_ref.unpack_e8m0(payload, scales, dtype)


def _has_kernel(x: torch.Tensor) -> bool:
    """Whether the packers' kernel takes x: on a GPU, rows of a power of two."""
    return x.is_cuda and x.shape[-1].bit_count() == 1


def _check_packed(operation: str, payload: torch.Tensor, scales: torch.Tensor, scale_shape: str) -> None:
    c = Contract(operation)
    c.expect("payload", payload, "... C/2", torch.uint8)
    c.expect("scales", scales, scale_shape, torch.uint8)
    c.require(
        "scales",
        scales.shape[:-1] == payload.shape[:-1],
        f"must have payload's leading axes {list(payload.shape[:-1])}",
    )
