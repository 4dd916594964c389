"""The Engram gate: how much of a looked-up value each residual stream takes in (spec §7)."""

from __future__ import annotations

import torch
from cedar.kernels import engram_gate_ref
from cedar.kernels.contract import Contract


def engram_gate(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    is_image: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """X[s] + gate_s·value, bf16 [N, hc, d], a new tensor: x, key bf16 [N, hc, d], value bf16 [N, d].

    q_weight, k_weight bf16 [hc, d]; is_image bool [N]: the gate is 0 at positions inside an image span.
    """
    c = Contract("engram_gate")
    c.expect("x", x, "N hc d", torch.bfloat16)
    c.expect("key", key, "N hc d", torch.bfloat16)
    c.expect("value", value, "N d", torch.bfloat16)
    c.expect("q_weight", q_weight, "hc d", torch.bfloat16)
    c.expect("k_weight", k_weight, "hc d", torch.bfloat16)
    c.expect("is_image", is_image, "N", torch.bool)
    if x.is_cuda:
        from cedar.kernels import engram_gate_triton

        return engram_gate_triton.engram_gate(x, key, value, q_weight, k_weight, is_image, eps)
    return engram_gate_ref.engram_gate(x, key, value, q_weight, k_weight, is_image, eps)
