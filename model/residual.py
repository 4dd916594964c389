"""The residual streams between two sublayers (spec §3, §6).

What a sublayer does at its end (its output into the streams) and what the next one does first (mix, collapse,
norm) read and write the same streams, so they are one operation here: a `Residual` keeps the output of the
sublayer before until the next one enters.

Letters: N rows, hc streams, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cedar.kernels.mhc import Mixes, Pending, mhc_collapse, mhc_enter, mhc_expand, mhc_pass, mhc_settle
from cedar.kernels.norm import rms_norm
from cedar.kernels.prepared import CODES
from cedar.model.dense import Rows


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StreamMix:
    """The mHC projection of one sublayer."""

    fn: torch.Tensor  # fp32 (or float64) [(2 + hc)·hc, hc·d]
    scale: torch.Tensor  # fp32 [3]
    base: torch.Tensor  # fp32 [(2 + hc)·hc]
    eps: float
    hc_eps: float
    iters: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float, int]:
        """What `mhc_mix` takes after the streams."""
        return self.fn, self.scale, self.base, self.eps, self.hc_eps, self.iters


class Residual:
    """Streams bf16 [N, hc, d] and the mix of the last sublayer entered, or the pre fp32 [N, hc] handed in,
    from sublayer to sublayer and from layer to layer. One call's own.
    """

    def __init__(self, streams: torch.Tensor, pre: torch.Tensor) -> None:
        self._streams = streams
        self._pre = pre
        self._mixes: Mixes | Pending | None = None  # of the sublayer entered
        self._output: torch.Tensor | None = None

    @property
    def pre(self) -> torch.Tensor:
        """The pre fp32 [N, hc] that the last sublayer computed."""
        return self._pre if self._mixes is None else self._settle()[0]

    def enter(self, mix: StreamMix, norm: torch.Tensor, eps: float, orders: tuple[int, ...] = ()) -> Rows:
        """The normed rows bf16 [N, d] that a sublayer with this mix and norm starts from; quantised in
        `orders` too where that costs no launch.
        """
        if self._output is not None and self._mixes is not None:
            codes = tuple(order for order in orders if order == CODES)  # others would cost a launch
            self._streams, row, self._mixes, prepared = mhc_pass(
                self._streams, self._output, self._mixes, norm, eps, mix.arguments, codes
            )
        else:
            row, self._mixes, prepared = mhc_enter(self.settled(), self.pre, norm, eps, mix.arguments, orders)
        self._output = None
        return Rows(row, prepared)

    def leave(self, output: torch.Tensor) -> None:
        """The entered sublayer's output bf16 [N, d]."""
        self._output = output

    def collapsed(self, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """norm(collapse) bf16 [N, d] of the streams as they are, entering nothing."""
        return rms_norm(mhc_collapse(self.settled(), self.pre), norm, eps)

    def settled(self) -> torch.Tensor:
        """The streams with the last sublayer's output in them."""
        if self._output is not None and self._mixes is not None:
            _, post, comb = self._settle()
            self._streams = mhc_expand(self._streams, self._output, post, comb)
            self._output = None
        return self._streams

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `change` of the settled streams in their place."""
        self._streams = change(self.settled())

    def _settle(self) -> Mixes:
        assert self._mixes is not None
        self._mixes = mhc_settle(self._mixes)
        return self._mixes
