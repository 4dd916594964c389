"""One backbone layer: Engram, attention and experts around the mHC streams (spec §3, §6).

Letters: N rows, hc streams, d hidden. Streams X are bf16 [N, hc, d]; `pre` fp32 [N, hc] is the collapse
weight that the sublayer before computed, handed on from sublayer to sublayer and from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cedar.model.attention import Attention
from cedar.model.engram import EngramLayer, LookedUp
from cedar.model.moe import MixtureOfExperts
from cedar.model.residual import Residual, StreamMix
from cedar.model.schedule import LayerPlan
from cedar.model.sources import Selection
from cedar.model.step import Step

Observe = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Layer:
    """Weights and plan of one backbone layer."""

    plan: LayerPlan
    eps: float
    attn_mix: StreamMix
    attn_norm: torch.Tensor  # bf16 [d]
    attention: Attention
    ffn_mix: StreamMix
    ffn_norm: torch.Tensor  # bf16 [d]
    moe: MixtureOfExperts
    engram: EngramLayer | None

    def run(
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        step: Step,
        selection: Selection,
        engram: LookedUp | None,
        *,
        produce: bool = True,
        observe: Observe | None = None,
        taps: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's streams and the pre it hands on: `advance`, settled."""
        residual = Residual(streams, pre)
        self.advance(residual, step, selection, engram, produce=produce, observe=observe, taps=taps)
        return residual.settled(), residual.pre

    def advance(
        self,
        residual: Residual,
        step: Step,
        selection: Selection,
        engram: LookedUp | None,
        *,
        produce: bool = True,
        observe: Observe | None = None,
        taps: list[torch.Tensor] | None = None,
    ) -> None:
        """Run both sublayers. `engram` is what was looked up for the rows, where the layer has Engram.

        `produce` False: this source's entries were written by `produce_entries` before. `taps` receives the
        mean stream bf16 [N, d] that enters a draft target.
        """
        self._look_up(residual, step, engram)
        if taps is not None and self.plan.draft_target:
            streams = residual.settled()
            taps.append(streams.float().mean(1).to(streams.dtype))
        orders = self.attention.latents.orders(step.rows)
        x = residual.enter(self.attn_mix, self.attn_norm, self.eps, orders)
        attn_out = self.attention(x, step, selection, produce=produce)
        residual.leave(attn_out)
        x = residual.enter(self.ffn_mix, self.ffn_norm, self.eps, self.moe.orders(step.rows))
        ffn_out = self.moe(x, step.image_mask)
        residual.leave(ffn_out)
        if observe is not None:
            self._report(observe, residual.settled(), residual.pre, attn_out, ffn_out, selection)

    def produce_entries(
        self, streams: torch.Tensor, pre: torch.Tensor, step: Step, engram: LookedUp | None
    ) -> None:
        """Only the producing part of a key/value source: collapse, norm, compressor, index key (spec §9)."""
        if self.attention.compressor is None:
            raise RuntimeError(f"layer {self.plan.layer} produces no entries")
        residual = Residual(streams, pre)
        self._look_up(residual, step, engram)
        self.attention.compressor.produce(residual.collapsed(self.attn_norm, self.eps), step)

    def _look_up(self, residual: Residual, step: Step, engram: LookedUp | None) -> None:
        layer = self.engram
        if layer is None:
            return
        if engram is None:
            raise RuntimeError(f"layer {self.plan.layer} needs its Engram rows")
        residual.replace(lambda streams: layer(streams, engram, step.is_image))

    def _report(
        self,
        observe: Observe,
        streams: torch.Tensor,
        pre: torch.Tensor,
        attn_out: torch.Tensor,
        ffn_out: torch.Tensor,
        selection: Selection,
    ) -> None:
        name = f"layer{self.plan.layer:02d}"
        observe(f"{name}.stream", streams)
        observe(f"{name}.pre", pre)
        observe(f"{name}.attn_out", attn_out)
        observe(f"{name}.ffn_out", ffn_out)
        if self.plan.selects and selection.entries is not None:
            observe(f"{name}.topk", selection.entries)
