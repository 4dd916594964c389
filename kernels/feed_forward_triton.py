# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The mixture of experts on Hopper in three launches: route; gate-up; down and sum (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels.experts_triton import SORTED_BY_ONE
from cedar.kernels.linear_triton import hopper
from cedar.kernels.router_triton import counters, route_to_tiles

MOST = 512  # choices, or one an expert, up to which all this pays


def fits(tokens, width, k, routed, shared) -> bool:
    """Whether these kernels take the call: Hopper, sizes of whole tiles, few choices an expert."""
    experts, inner = routed.w1.shape[:2]
    choices = tokens * k
    return (
        hopper(routed.w1.device.index or 0)
        and width % 128 == 0
        and inner % 128 == 0
        and shared.w2.shape[1] == inner
        and 0 < choices <= min(SORTED_BY_ONE, max(MOST, experts))
    )


def feed_forward(x, gate, bias, k, scale, routed, shared, limit) -> torch.Tensor:
    """As the public function, of a call that `fits`."""
    from cedar.kernels.experts_fp8_hopper import with_shared

    _, weights, tiles = route_to_tiles(x, gate, bias, k, scale, 8)
    packed = (
        (routed.w1, routed.w1_scale),
        (routed.w3, routed.w3_scale),
        (routed.w2, routed.w2_scale),
    )
    beside = (shared.w13.view(torch.uint8), shared.w13_scale, shared.w2.view(torch.uint8), shared.w2_scale)
    return with_shared(tiles, weights, packed, beside, k, limit, counters(x.device))
