"""The whole mixture of experts: router, routed experts, the shared expert, their sum (spec §3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels.contract import Contract
from cedar.kernels.experts import grouped_experts, swiglu, swiglu_prepared
from cedar.kernels.linear import FLOATS, linear_fp8, order_for
from cedar.kernels.prepared import CODES, Prepared
from cedar.kernels.router import route


class RoutedWeights(NamedTuple):
    """MXFP4, stacked: w1, w3 uint8 [E, I, d/2], w2 uint8 [E, d, I/2]; E8M0 scales [E, I, d/32], [E, d,
    I/32].
    """

    w1: torch.Tensor
    w1_scale: torch.Tensor
    w3: torch.Tensor
    w3_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


class SharedWeights(NamedTuple):
    """FP8: w1 over w3 float8_e4m3fn [2·I, d], w2 [d, I]; E8M0 scales per 32x32 block."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


class Expanded(NamedTuple):
    """The same weights in float64, which spare the CPU the unpacking: routed (w1, w3, w2), shared w13 and
    w2.
    """

    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None


def feed_forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scale: float,
    routed: RoutedWeights,
    shared: SharedWeights,
    limit: float,
    expanded: Expanded | None = None,
    prepared: tuple[Prepared, ...] = (),
) -> torch.Tensor:
    """bf16 [N, d] of normed rows x bf16 [N, d]: `route`, `grouped_experts`, the shared expert, added in
    fp32.

    gate, bias, k and scale as in `route`; limit as in `swiglu`. Three launches on Hopper for few tokens
    (`feed_forward_triton.fits`), seven for many, where `prepared` in an order of `orders_for` spares work.
    Errors as those functions'.
    """
    if x.is_cuda and gate.dtype == torch.bfloat16:
        from cedar.kernels import feed_forward_triton

        if feed_forward_triton.fits(x.shape[0], x.shape[1], k, routed, shared):
            _check(x, gate, bias, k, routed, shared)
            return feed_forward_triton.feed_forward(x, gate, bias, k, scale, routed, shared, limit)
        if feed_forward_triton.fits_many(x.shape[0], routed, shared):
            _check(x, gate, bias, k, routed, shared)
            return feed_forward_triton.feed_forward_many(
                x, gate, bias, k, scale, routed, shared, limit, prepared
            )
    wide = expanded if expanded is not None else Expanded()
    ids, weights = route(x, gate, bias, k, scale)
    halves = linear_fp8(x, shared.w13, shared.w13_scale, expanded=wide.w13, prepared=prepared)
    first, second = halves.chunk(2, dim=1)
    order = order_for(x.shape[0], shared.w2)
    hidden: torch.Tensor | Prepared
    if order != CODES:
        hidden = swiglu(first, second, limit)
    else:
        hidden = swiglu_prepared(first, second, limit, order)
    beside = linear_fp8(hidden, shared.w2, shared.w2_scale, expanded=wide.w2)
    return grouped_experts(x, ids, weights, *routed, limit, expanded=wide.routed, shared=beside)


def orders_for(tokens: int, k: int, routed: RoutedWeights, shared: SharedWeights) -> tuple[int, ...]:
    """In which orders `feed_forward` of so many tokens has use for its rows quantised: one or none."""
    if not shared.w13.is_cuda:
        return ()
    from cedar.kernels import feed_forward_triton

    if feed_forward_triton.fits(tokens, shared.w13.shape[1], k, routed, shared):
        return ()
    order = order_for(tokens, shared.w13)
    return () if order is None else (order,)


def _check(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    routed: RoutedWeights,
    shared: SharedWeights,
) -> None:
    c = Contract("feed_forward")
    c.expect("x", x, "N d", torch.bfloat16)
    c.expect("gate", gate, "E d", *FLOATS)
    c.expect("bias", bias, "E" if bias.dim() == 1 else "N E", torch.float32)
    c.require("k", 0 < k <= c.dims["E"], f"must be 1 to {c.dims['E']}, got {k}")
    shapes = ("E I d/2", "E I d/32", "E I d/2", "E I d/32", "E d I/2", "E d I/32")
    for name, weight, shape in zip(RoutedWeights._fields, routed, shapes, strict=True):
        c.expect(f"routed.{name}", weight, shape, torch.uint8)
        c.require(f"routed.{name}", weight.is_contiguous(), "must be contiguous")
    c.dims["J"] = 2 * c.dims["I"]
    for name, weight, shape in zip(
        SharedWeights._fields,
        shared,
        ("J d", "ceil(J/32) ceil(d/32)", "d I", "ceil(d/32) ceil(I/32)"),
        strict=True,
    ):
        c.expect(f"shared.{name}", weight, shape, torch.uint8 if "scale" in name else torch.float8_e4m3fn)
        c.require(f"shared.{name}", weight.is_contiguous(), "must be contiguous")
