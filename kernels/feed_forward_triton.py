# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The mixture of experts on Hopper (spec §3): of few tokens in three launches, route; gate-up; down and sum.
Of many in seven: the router's product; selection, tiles and quantised rows; two of the shared expert;
gate-up, down and sum of the routed ones.
"""

from __future__ import annotations

import torch
from cedar.kernels.experts_triton import SORTED_BY_ONE, UNSORTED, slots_of, summed, swiglu_codes
from cedar.kernels.linear_triton import hopper, linear_fp8
from cedar.kernels.prepared import CODES
from cedar.kernels.router_triton import counters, route_to_columns, route_to_tiles

MOST = 768  # choices (128 tokens of six), or one an expert, up to which a step has few launches


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
    from cedar.kernels import experts_fp8_hopper, experts_token_hopper

    packed = (
        (routed.w1, routed.w1_scale),
        (routed.w3, routed.w3_scale),
        (routed.w2, routed.w2_scale),
    )
    beside = (shared.w13.view(torch.uint8), shared.w13_scale, shared.w2.view(torch.uint8), shared.w2_scale)
    zeros = counters(x.device)
    if x.shape[0] == 1 and experts_token_hopper.fits(x.shape[1], routed.w1.shape[1]):
        routing = route_to_columns(x, gate, bias, k, scale)
        if routing is not None:
            return experts_token_hopper.with_shared(*routing, packed, beside, limit, zeros)
    _, weights, tiles = route_to_tiles(x, gate, bias, k, scale, 8)
    return experts_fp8_hopper.with_shared(tiles, weights, packed, beside, k, limit, zeros)


def fits_many(tokens, routed, shared) -> bool:
    """Whether `feed_forward_many` takes the call: Hopper, sizes of whole tiles, tokens to sort."""
    inner, width = routed.w1.shape[1], 2 * routed.w1.shape[2]
    return (
        hopper(routed.w1.device.index or 0)
        and width % 256 == 0
        and inner % 128 == 0
        and shared.w2.shape[1] == inner
        and tokens > UNSORTED
    )


def feed_forward_many(x, gate, bias, k, scale, routed, shared, limit, prepared) -> torch.Tensor:
    """As the public function, of a call that `fits_many`."""
    from cedar.kernels import experts_fp8_hopper, experts_hopper
    from cedar.kernels.router_tiles_hopper import logits_of, sort_rows

    experts = routed.w1.shape[0]
    rows = sort_rows(x, logits_of(x, gate), bias, k, scale, slots_of(x.shape[0] * k / experts))
    beside = _shared_expert(x, shared, limit, prepared)
    packed = ((routed.w1, routed.w1_scale), (routed.w3, routed.w3_scale), (routed.w2, routed.w2_scale))
    tiles = rows.slots, rows.owners, rows.owners.shape[0]
    if rows.scales is not None:
        y = experts_fp8_hopper.quantised_experts(
            rows.seen, rows.scales, tiles, rows.weights, packed, k, limit
        )
    else:
        y = experts_hopper.experts(rows.seen, tiles, rows.weights, packed, limit)
    return summed(y, k, beside, True)


def _shared_expert(x, shared, limit, prepared) -> torch.Tensor:
    from cedar.kernels import linear_bulk_hopper, linear_hopper, linear_wide_hopper

    inner = shared.w2.shape[1]
    cut = linear_hopper.plan(x.shape[0], *shared.w13.shape)
    codes = next((copy for copy in prepared if copy.order == CODES), None)
    if isinstance(cut, linear_hopper.Bulk):
        wide = linear_bulk_hopper.gated(x, shared.w13, shared.w13_scale, limit, prepared)
        return linear_bulk_hopper.product(wide.values, shared.w2, shared.w2_scale, (wide,))
    if codes is not None and linear_hopper.is_wide(cut):
        hidden = linear_wide_hopper.gated(codes, shared.w13, shared.w13_scale, limit)
    else:
        halves = linear_fp8(x, shared.w13, shared.w13_scale, prepared)
        hidden = swiglu_codes(halves[:, :inner], halves[:, inner:], limit)
    cut = linear_hopper.plan(x.shape[0], *shared.w2.shape, bulk=False)
    assert cut is not None  # what `fits_many` asks of the widths is enough for a cut
    return linear_hopper.linear_fp8(hidden.values, shared.w2, shared.w2_scale, cut, (hidden,))
