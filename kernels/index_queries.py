"""Index queries as the scores read them: RoPE, FP4, and the weights of their heads (spec §3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import index_queries_ref
from cedar.kernels.contract import Contract
from cedar.kernels.fp4_ref import E8M0_GROUP


class IndexQueries(NamedTuple):
    """payload uint8 [N, Hi, Di/2], E8M0 scales uint8 [N, Hi, Di/32], weights float64 (kernels: fp32) [N,
    Hi].
    """

    payload: torch.Tensor
    scales: torch.Tensor
    weights: torch.Tensor


def pack_index_queries(
    q: torch.Tensor, weights: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], scale: float
) -> IndexQueries:
    """Rotates the last channels of q bf16 [N, Hi, Di] and packs it; weights bf16 [N, Hi] times `scale`.

    rope = (cos, sin) fp32 [N, R/2]. One launch on a GPU.
    """
    c = Contract("pack_index_queries")
    c.expect("q", q, "N Hi Di", torch.bfloat16)
    c.expect("weights", weights, "N Hi", torch.bfloat16)
    c.expect("rope cos", rope[0], "N F", torch.float32)
    c.expect("rope sin", rope[1], "N F", torch.float32)
    c.divisible("q", "Di", E8M0_GROUP)
    c.require("rope cos", 2 * c.dims["F"] <= c.dims["Di"], "turns more channels than q has")
    if q.is_cuda and c.dims["Di"].bit_count() == 1:
        from cedar.kernels import index_queries_triton

        return IndexQueries(*index_queries_triton.pack(q, weights, rope, scale))
    return IndexQueries(*index_queries_ref.pack(q, weights, rope, scale))
