"""Truth for the compressor: pooling a group of tokens, packing a latent's entry and index key (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, linear_ref, norm_ref, rope_ref
from cedar.kernels.mhc_ref import ordered_sum


def pool_groups(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """bf16 [G, D], fp32 inside: kv weighted by gate's softmax over the group, per channel; both [G, m, D]."""
    p = torch.exp(gate - gate.amax(1, keepdim=True))
    p = p / ordered_sum(p, 1)
    return ordered_sum(kv * p, 1).squeeze(1).to(torch.bfloat16)


def entries(
    pooled: torch.Tensor,
    norm_weight: torch.Tensor,
    key_weight: torch.Tensor,
    key_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Main payload and scales, index payload and scales, uint8, of pooled bf16 [G, D] at positions [G]."""
    latent = norm_ref.rms_norm(pooled, norm_weight, eps)
    key = norm_ref.rms_norm(linear_ref.linear_dense(latent, key_weight, torch.bfloat16), key_norm_weight, eps)
    main = fp4_ref.pack_e4m3(rope_ref.rotate(latent, positions, freqs, inverse=False))
    index = fp4_ref.pack_e8m0(rope_ref.rotate(key, positions, freqs, inverse=False))
    return *main, *index
