"""mHC residual streams: the mix of a sublayer, the collapse before it, the expand after it (spec §3, §6)."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from cedar.kernels import mhc_ref, prepared_ref
from cedar.kernels.contract import Contract
from cedar.kernels.norm import rms_norm
from cedar.kernels.prepared import Prepared


def mhc_mix(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [N, hc], post [N, hc], comb [N, hc, hc]) fp32 of streams x bf16 [N, hc, d].

    fn [(2+hc)*hc, hc*d] fp32 (float64 spares the CPU a conversion), scale fp32 [3], base fp32 [(2+hc)*hc];
    eps of the RMS norm, hc_eps of the Sinkhorn rounds, `iters` of them. comb[s, t] mixes source s into target
    t.
    """
    c = Contract("mhc_mix")
    c.expect("x", x, "N hc d", torch.bfloat16)
    hc, d = c.dims["hc"], c.dims["d"]
    c.dims |= {"mixes": (2 + hc) * hc, "flat": hc * d}
    c.expect("fn", fn, "mixes flat", torch.float32, torch.float64)
    c.expect("scale", scale, "3", torch.float32)
    c.expect("base", base, "mixes", torch.float32)
    c.require("iters", iters > 0, f"must be positive, got {iters}")
    if x.is_cuda and hc == 4:
        from cedar.kernels import mhc_triton

        return mhc_triton.mix(x, fn.to(torch.float32), scale, base, eps, hc_eps, iters)
    return mhc_ref.mix(x, fn, scale, base, eps, hc_eps, iters)


def mhc_collapse(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_s pre[s]·X[s], bf16 [N, d]: x bf16 [N, hc, d], pre fp32 [N, hc] of the sublayer before."""
    c = Contract("mhc_collapse")
    c.expect("x", x, "N hc d", torch.bfloat16)
    c.expect("pre", pre, "N hc", torch.float32)
    if x.is_cuda and x.shape[1] == 4:
        from cedar.kernels import mhc_triton

        row = mhc_triton.boundary(x, None, pre)[1]
        assert row is not None
        return row
    return mhc_ref.collapse(x, pre)


def mhc_expand(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'[t] = sum_s comb[s,t]·X[s] + post[t]·y, bf16 [N, hc, d], a new tensor; fp32 inside, y added last.

    x bf16 [N, hc, d], y bf16 [N, d] (the sublayer's output), post fp32 [N, hc], comb fp32 [N, hc, hc].
    """
    c = Contract("mhc_expand")
    c.expect("x", x, "N hc d", torch.bfloat16)
    c.expect("y", y, "N d", torch.bfloat16)
    c.expect("post", post, "N hc", torch.float32)
    c.expect("comb", comb, "N hc hc", torch.float32)
    if x.is_cuda and x.shape[1] == 4:
        from cedar.kernels import mhc_triton

        return mhc_triton.boundary(x, (y, post, comb))[0]
    return mhc_ref.expand(x, y, post, comb)


Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MixArguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float, int]


class Pending(NamedTuple):
    """A mix of which only the sums are there: for `mhc_pass` or `mhc_settle`, on a GPU."""

    sums: torch.Tensor  # fp32 [programs · tokens of each, 32]
    shape: tuple[int, int]  # tokens, width
    scale: torch.Tensor
    base: torch.Tensor
    numbers: tuple[float, float, int]  # eps, hc_eps, iters


@overload
def mhc_boundary(
    x: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def mhc_boundary(
    x: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    mix: MixArguments,
) -> tuple[torch.Tensor, torch.Tensor, Mixes]: ...


@overload
def mhc_boundary(
    x: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    mix: MixArguments,
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, Mixes, tuple[Prepared, ...]]: ...


def mhc_boundary(
    x: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    mix: MixArguments | None = None,
    orders: tuple[int, ...] | None = None,
) -> (
    tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, Mixes]
    | tuple[torch.Tensor, torch.Tensor, Mixes, tuple[Prepared, ...]]
):
    """Between two sublayers, one launch on a GPU: (X' [N, hc, d], norm(collapse(X', pre)) [N, d]), bf16.

    The same as `mhc_expand`, `mhc_collapse` of the result with the pre handed in, `rms_norm` of that. With
    mix = (fn, scale, base, eps, hc_eps, iters), also what `mhc_mix` makes of X': (pre, post, comb), in the
    same launch; with orders besides, also the normed rows quantised, in each of these orders (`Prepared`).
    """
    if x.is_cuda and x.shape[1] == 4:
        from cedar.kernels import mhc_triton

        _check(Contract("mhc_boundary"), x, y, (pre, post, comb), norm_weight, mix)
        if mix is not None:
            wanted = (mix[0].to(torch.float32), *mix[1:])
            given = (x, (y, post, comb), pre, (norm_weight, eps), wanted)
            streams, row, mixes, prepared = mhc_triton.sublayer(*given, orders or ())
            return (streams, row, mixes) if orders is None else (streams, row, mixes, prepared)
        streams, normed = mhc_triton.boundary(x, (y, post, comb), pre, (norm_weight, eps))
        assert normed is not None
        return streams, normed
    streams = mhc_expand(x, y, post, comb)
    row = rms_norm(mhc_collapse(streams, pre), norm_weight, eps)
    if mix is None:
        return streams, row
    mixes = mhc_mix(streams, *mix)
    if orders is None:
        return streams, row, mixes
    return streams, row, mixes, tuple(prepared_ref.prepared(row, order) for order in orders)


def mhc_pass(
    x: torch.Tensor,
    y: torch.Tensor,
    mixes: Mixes | Pending,
    norm_weight: torch.Tensor,
    eps: float,
    mix: MixArguments,
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, Mixes | Pending, tuple[Prepared, ...]]:
    """`mhc_boundary` with a mix, from sublayer to sublayer; mixes = (pre, post, comb), or what the call
    before returned.

    For few tokens on Hopper the new mixes are left `Pending`. The next call makes them while the launch
    before it still runs, and reads x then; so of the launches between two calls one must let the next one
    start only when the one before it has ended. The norms of an attention's latents do, and the experts.
    """
    if x.is_cuda and x.shape[1] == 4:
        from cedar.kernels import mhc_triton

        if mhc_triton.few(x):
            old = None if isinstance(mixes, Pending) else mixes
            _check(Contract("mhc_pass"), x, y, old, norm_weight, mix)
            from cedar.kernels import mhc_few_hopper

            wanted = (mix[0].to(torch.float32), *mix[1:])
            return mhc_few_hopper.pass_on(x, y, mixes, (norm_weight, eps), wanted, orders)
    pre, post, comb = mhc_settle(mixes)
    return mhc_boundary(x, y, post, comb, pre, norm_weight, eps, mix=mix, orders=orders)


def mhc_enter(
    x: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    mix: MixArguments,
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, Mixes | Pending, tuple[Prepared, ...]]:
    """What `mhc_pass` returns besides the streams where no output is to be added to x: the row, the mixes,
    the row in `orders`; in none where that would cost a launch. One launch for few tokens on Hopper.
    """
    if x.is_cuda and x.shape[1] == 4:
        from cedar.kernels import mhc_triton

        if mhc_triton.few(x):
            _check(Contract("mhc_enter"), x, x[:, 0], None, norm_weight, mix)
            from cedar.kernels import mhc_few_hopper

            wanted = (mix[0].to(torch.float32), *mix[1:])
            return mhc_few_hopper.enter(x, pre, (norm_weight, eps), wanted, orders)
    return rms_norm(mhc_collapse(x, pre), norm_weight, eps), mhc_mix(x, *mix), ()


def mhc_settle(mixes: Mixes | Pending) -> Mixes:
    """(pre, post, comb) of what `mhc_pass` returned: a launch where they are still pending."""
    if not isinstance(mixes, Pending):
        return mixes
    from cedar.kernels import mhc_few_hopper

    return mhc_few_hopper.settle(mixes)


def _check(
    c: Contract,
    x: torch.Tensor,
    y: torch.Tensor,
    mixes: Mixes | None,
    norm_weight: torch.Tensor,
    mix: MixArguments | None,
) -> None:
    c.expect("x", x, "N hc d", torch.bfloat16)
    c.expect("y", y, "N d", torch.bfloat16)
    if mixes is not None:
        pre, post, comb = mixes
        c.expect("post", post, "N hc", torch.float32)
        c.expect("comb", comb, "N hc hc", torch.float32)
        c.expect("pre", pre, "N hc", torch.float32)
    c.expect("norm_weight", norm_weight, "d", torch.bfloat16)
    if mix is not None:
        c.dims |= {"mixes": 24, "flat": 4 * c.dims["d"]}
        c.expect("fn", mix[0], "mixes flat", torch.float32, torch.float64)
        c.expect("scale", mix[1], "3", torch.float32)
        c.expect("base", mix[2], "mixes", torch.float32)
        c.require("iters", mix[5] > 0, f"must be positive, got {mix[5]}")
