# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The mixture of experts on Hopper in three launches: route; gate-up; down and sum (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels.experts_triton import SORTED_BY_ONE
from cedar.kernels.linear_triton import hopper
from cedar.kernels.router_triton import counters, route_to_tiles

FEW = 4  # choices an expert up to which a tile has 8 slots, 16 beyond
MOST = 512  # choices, or one an expert, up to which all this pays


def fits(x, k, routed, shared) -> bool:
    """Whether these kernels take the call: Hopper, sizes of whole tiles, few choices an expert."""
    experts, inner = routed.w1.shape[:2]
    choices = x.shape[0] * k
    return (
        hopper(x.device.index or 0)
        and x.shape[1] % 128 == 0
        and inner % 128 == 0
        and shared.w2.shape[1] == inner
        and 0 < choices <= min(SORTED_BY_ONE, max(MOST, experts))
    )


def feed_forward(x, gate, bias, k, scale, routed, shared, limit) -> torch.Tensor:
    """As the public function, of a call that `fits`."""
    from cedar.kernels.feed_forward_hopper import hidden_rows, output_rows

    tokens, width = x.shape
    experts, inner = routed.w1.shape[:2]
    choices = tokens * k
    rows = 8 if choices <= FEW * experts else 16
    _, weights, tiles = route_to_tiles(x, gate, bias, k, scale, rows)
    count = tiles.owners.shape[0]
    hidden = torch.empty(choices + tokens, inner, dtype=torch.bfloat16, device=x.device)
    w13, w2 = shared.w13.view(torch.uint8), shared.w2.view(torch.uint8)
    hidden_rows[(inner // 64, count)](
        tiles.for_fp4, tiles.for_fp8, tiles.slots, tiles.owners, weights, routed.w1, routed.w1_scale,
        routed.w3,
        routed.w3_scale, w13, shared.w13_scale, hidden, inner, k, choices, experts, limit, width, rows,
        num_warps=4,
    )  # fmt: skip
    y = torch.empty(choices + tokens, width, dtype=torch.bfloat16, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    output_rows[(width // 64, count)](
        hidden, tiles.slots, tiles.owners, routed.w2, routed.w2_scale, w2, shared.w2_scale, y,
        counters(x.device), out,
        width, experts, tokens, k, inner, rows, num_warps=4,
    )  # fmt: skip
    return out
