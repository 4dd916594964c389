"""Routed experts on MXFP4 weights, and the clamped SwiGLU that the shared expert uses too (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import experts_ref, fp4_ref, paging_ref, prepared_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging import INDEX_TYPES
from cedar.kernels.prepared import CODES, Prepared


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit))·clamp(up, ±limit): gate, up bf16 [..., I] to bf16 [..., I], rounded once."""
    c = Contract("swiglu")
    c.expect("gate", gate, "... I", torch.bfloat16)
    c.expect("up", up, "... I", torch.bfloat16)
    c.require("up", up.shape == gate.shape, f"must have gate's shape {list(gate.shape)}")
    if gate.is_cuda:
        from cedar.kernels import experts_triton

        return experts_triton.swiglu(gate, up, limit)
    return experts_ref.swiglu(gate, up, limit)


def swiglu_prepared(gate: torch.Tensor, up: torch.Tensor, limit: float, order: int) -> Prepared:
    """`swiglu` of [N, I], quantised in `order` for the product that reads it, in the same launch."""
    c = Contract("swiglu_prepared")
    c.expect("gate", gate, "N I", torch.bfloat16)
    c.expect("up", up, "N I", torch.bfloat16)
    c.divisible("gate", "I", 32)
    if gate.is_cuda and order == CODES:
        from cedar.kernels import experts_triton

        return experts_triton.swiglu_codes(gate, up, limit)
    return prepared_ref.prepared(swiglu(gate, up, limit), order)


def expand_experts(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Stacked MXFP4 weights in float64 [E, O, I], for `expanded` of `grouped_experts` (small models, CPU)."""
    c = Contract("expand_experts")
    c.expect("payload", payload, "E O I/2", torch.uint8)
    c.expect("scale", scale, "E O I/32", torch.uint8)
    return fp4_ref.unpack_e8m0(payload, scale, torch.float64)


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w3: torch.Tensor,
    w3_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    limit: float,
    *,
    expanded: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the routed experts, fp32 [N, d]: w2(silu(min(w1 x, limit))·clamp(w3 x, ±limit)·weight) over ids.

    x bf16 [N, d] (after the norm; quantised here); ids int [N, k] and weights fp32 [N, k] from `route`.
    Weights MXFP4, stacked: w1, w3 uint8 [E, I, d/2], w2 uint8 [E, d, I/2]; their scales uint8 E8M0 [E, I,
    d/32], [E, d, I/32]. Every expert's output is rounded to bf16 and added in fp32 in the order of ids
    (`route`: ascending). `expanded` = (w1, w3, w2) from `expand_experts` spares the CPU the unpacking. With
    `shared` bf16 [N, d], the shared expert's output: that sum and it, rounded to bf16. Raises PageRangeError
    (CPU) for an id that is no expert.
    """
    c = Contract("grouped_experts")
    c.expect("x", x, "N d", torch.bfloat16)
    c.expect("ids", ids, "N k", *INDEX_TYPES)
    c.expect("weights", weights, "N k", torch.float32)
    c.expect("w1", w1, "E I d/2", torch.uint8)
    c.expect("w1_scale", w1_scale, "E I d/32", torch.uint8)
    c.expect("w3", w3, "E I d/2", torch.uint8)
    c.expect("w3_scale", w3_scale, "E I d/32", torch.uint8)
    c.expect("w2", w2, "E d I/2", torch.uint8)
    c.expect("w2_scale", w2_scale, "E d I/32", torch.uint8)
    if expanded is not None:
        for name, weight, shape in zip(
            ("w1", "w3", "w2"), expanded, ("E I d", "E I d", "E d I"), strict=True
        ):
            c.expect(f"expanded {name}", weight, shape, torch.float64)
    if shared is not None:
        c.expect("shared", shared, "N d", torch.bfloat16)
    paging_ref.check_range("ids", ids, 0, c.dims["E"])
    if ids.shape[0] == 0:
        kind = torch.float32 if shared is None else torch.bfloat16
        return torch.zeros(x.shape, dtype=kind, device=x.device)
    packed = ((w1, w1_scale), (w3, w3_scale), (w2, w2_scale))
    if x.is_cuda:
        from cedar.kernels import experts_triton

        stacked = tuple((payload.contiguous(), scale.contiguous()) for payload, scale in packed)
        return experts_triton.grouped_experts(x, ids, weights, stacked, limit, shared)
    total = experts_ref.grouped_experts(x, ids, weights, packed, expanded, limit)
    return total if shared is None else (total + shared).to(torch.bfloat16)
