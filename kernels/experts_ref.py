"""Truth for routed experts on MXFP4 weights and for the shared expert (spec §3, §14)."""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, fp8_ref


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """bf16: silu(min(gate, limit))·clamp(up, ±limit)·weight, fp32 inside; gate, up bf16 [..., I]."""
    gate = gate.to(torch.float64).clamp_max_(limit)
    silu = (gate / (1 + torch.exp(-gate))).to(
        torch.float32
    )  # torch's fp32 silu depends on position by an ulp
    product = silu * up.to(torch.float32).clamp_(-limit, limit)
    if weight is not None:
        product = product * weight.unsqueeze(-1)
    return product.to(torch.bfloat16)


def grouped_matmul(x: torch.Tensor, weights: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """bf16 [M, O]: x float64 [M, I] in runs of rows, each times its float64 weight [O, I]."""
    runs = torch.split(x, [rows for rows, _ in weights])
    return torch.cat([run @ weight.T for run, (_, weight) in zip(runs, weights, strict=True)]).to(
        torch.bfloat16
    )


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    expanded: tuple[torch.Tensor, ...] | None,
    limit: float,
) -> torch.Tensor:
    """fp32 [N, d]: the routed experts' outputs, each rounded to bf16, added in the order of ids.

    packed holds (payload, scale) of w1, w3, w2, stacked over the experts; only experts some token chose are
    read.
    """
    count, k = ids.shape
    chosen = ids.flatten()
    order = torch.argsort(chosen, stable=True)
    rows_of = torch.bincount(chosen, minlength=packed[0][0].shape[0]).tolist()

    def touched(which: int) -> list[tuple[int, torch.Tensor]]:
        if expanded is not None:
            return [(rows, expanded[which][e]) for e, rows in enumerate(rows_of) if rows]
        payload, scale = packed[which]
        unpack = fp4_ref.unpack_e8m0
        return [(rows, unpack(payload[e], scale[e], torch.float64)) for e, rows in enumerate(rows_of) if rows]

    rows = fp8_ref.round_trip(x)[torch.div(order, k, rounding_mode="floor")]
    gate, up = grouped_matmul(rows, touched(0)), grouped_matmul(rows, touched(1))
    hidden = swiglu(gate, up, limit, weights.flatten()[order])
    y = grouped_matmul(fp8_ref.round_trip(hidden), touched(2))
    slots = torch.empty_like(y)
    slots[order] = y
    total = torch.zeros(count, y.shape[1], dtype=torch.float32, device=x.device)
    for slot in slots.view(count, k, -1).unbind(1):
        total += slot
    return total
