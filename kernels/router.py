"""The router of the mixture of experts: sqrt-softplus scores, a bias that only chooses (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import router_ref
from cedar.kernels.contract import Contract
from cedar.kernels.linear import FLOATS


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of every token: (ids int32 [N, k] ascending, weights fp32 [N, k]).

    x bf16 [N, d]; weight [E, d] (bf16; float64 spares the CPU a conversion); bias fp32 [E], or [N, E] where
    tokens differ (`bias_vl` inside an image span). s = sqrt(softplus(x·Wᵀ)); the top k of s + bias, ties to
    the lower id; weights are the chosen s over their sum + 1e-20, times `scale`.
    """
    c = Contract("route")
    c.expect("x", x, "N d", torch.bfloat16)
    c.expect("weight", weight, "E d", *FLOATS)
    c.expect("bias", bias, "E" if bias.dim() == 1 else "N E", torch.float32)
    c.require("k", 0 < k <= c.dims["E"], f"must be 1 to {c.dims['E']}, got {k}")
    if x.is_cuda and weight.dtype == torch.bfloat16:
        from cedar.kernels import router_triton

        return router_triton.route(x, weight, bias, k, scale)
    return router_ref.route(x, weight, bias, k, scale)
