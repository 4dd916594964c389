"""FP8: E4M3, a power-of-two (E8M0) scale per 32 channels; matmul activations and window KV (spec §4)."""

from __future__ import annotations

import torch
from cedar.kernels import fp8_ref
from cedar.kernels.contract import Contract


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises x bf16 [..., C], C a multiple of 32: (float8_e4m3fn [..., C], E8M0 scales uint8 [..., C/32]).

    amax = max(|x|, 1e-4) per group; scale = the power of two at or above amax/448; round to nearest even.
    """
    c = Contract("quantize_fp8")
    c.expect("x", x, "... C", torch.bfloat16)
    c.divisible("x", "C", fp8_ref.GROUP)
    return fp8_ref.quantize(x)


def dequantize_fp8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16(q * scale): q float8_e4m3fn [..., C], scale uint8 E8M0 [..., C/32] to bf16 [..., C]."""
    c = Contract("dequantize_fp8")
    c.expect("q", q, "... C", torch.float8_e4m3fn)
    c.expect("scale", scale, "... C/32", torch.uint8)
    c.require("scale", scale.shape[:-1] == q.shape[:-1], f"must have q's leading axes {list(q.shape[:-1])}")
    if q.is_cuda:
        from cedar.kernels import fp8_triton

        return fp8_triton.dequantize(q, scale)
    return fp8_ref.dequantize(q, scale)


def window_row_bytes(head_dim: int) -> int:
    """Bytes of one stored window key of `head_dim` channels: its payload and its scales."""
    return head_dim + head_dim // fp8_ref.GROUP


def pack_window_rows(k: torch.Tensor) -> torch.Tensor:
    """Window keys bf16 [N, D] (after RoPE) to stored rows uint8 [N, D + D/32]: payload, then scales."""
    c = Contract("pack_window_rows")
    c.expect("k", k, "N D", torch.bfloat16)
    c.divisible("k", "D", fp8_ref.GROUP)
    if k.is_cuda and k.shape[1].bit_count() == 1:
        from cedar.kernels import compress_triton

        return compress_triton.pack_window_rows(k)
    return fp8_ref.pack_rows(k)


def unpack_window_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Stored rows uint8 [..., D + D/32] to bf16 [..., D], D = `head_dim`."""
    c = Contract("unpack_window_rows", B=window_row_bytes(head_dim))
    c.expect("rows", rows, "... B", torch.uint8)
    return fp8_ref.unpack_rows(rows, head_dim)


def expand_fp8_blocks(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A stored dense weight in full: float8_e4m3fn [O, I] with one scale per 32x32 block to `dtype` [O, I].

    scale uint8 E8M0 [ceil(O/32), ceil(I/32)].
    bf16 for wo_a (spec §2); float64 for the cache that `linear_fp8` may be handed.
    """
    c = Contract("expand_fp8_blocks")
    c.expect("weight", weight, "O I", torch.float8_e4m3fn)
    c.expect("scale", scale, "ceil(O/32) ceil(I/32)", torch.uint8)
    return fp8_ref.expand_blocks(weight, scale, dtype)
