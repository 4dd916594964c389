"""One backbone layer: Engram, attention and experts around the mHC streams (spec §3, §6).

Letters: N rows, hc streams, d hidden. Streams X are bf16 [N, hc, d]; `pre` fp32 [N, hc] is the collapse
weight that the sublayer before computed, handed on from sublayer to sublayer and from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cedar.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix
from cedar.kernels.norm import rms_norm
from cedar.model.attention import Attention
from cedar.model.engram import EngramLayer
from cedar.model.moe import MixtureOfExperts
from cedar.model.schedule import LayerPlan
from cedar.model.sources import Selection
from cedar.model.step import Step

Observe = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StreamMix:
    """The mHC projection of one sublayer."""

    fn: torch.Tensor  # fp32 (or float64) [(2 + hc)·hc, hc·d]
    scale: torch.Tensor  # fp32 [3]
    base: torch.Tensor  # fp32 [(2 + hc)·hc]
    eps: float
    hc_eps: float
    iters: int

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """pre fp32 [N, hc], post fp32 [N, hc], comb fp32 [N, hc, hc]."""
        return mhc_mix(streams, self.fn, self.scale, self.base, self.eps, self.hc_eps, self.iters)


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
        hash_rows: torch.Tensor | None,
        *,
        produce: bool = True,
        observe: Observe | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's streams and the pre it hands on. `hash_rows` int64 [N, columns] where the layer has
        Engram.

        `produce` False: this source's entries were written by `produce_entries` before.
        """
        streams = self._engram(streams, step, hash_rows)
        pre_attn, post, comb = self.attn_mix(streams)
        x = rms_norm(mhc_collapse(streams, pre), self.attn_norm, self.eps)
        attn_out = self.attention(x, step, selection, produce=produce)
        streams = mhc_expand(streams, attn_out, post, comb)
        pre_ffn, post, comb = self.ffn_mix(streams)
        x = rms_norm(mhc_collapse(streams, pre_attn), self.ffn_norm, self.eps)
        ffn_out = self.moe(x, step.image_mask)
        streams = mhc_expand(streams, ffn_out, post, comb)
        if observe is not None:
            self._report(observe, streams, pre_ffn, attn_out, ffn_out, selection)
        return streams, pre_ffn

    def produce_entries(
        self, streams: torch.Tensor, pre: torch.Tensor, step: Step, hash_rows: torch.Tensor | None
    ) -> None:
        """Only the producing part of a key/value source: collapse, norm, compressor, index key (spec §9)."""
        if self.attention.compressor is None:
            raise RuntimeError(f"layer {self.plan.layer} produces no entries")
        streams = self._engram(streams, step, hash_rows)
        self.attention.compressor.produce(
            rms_norm(mhc_collapse(streams, pre), self.attn_norm, self.eps), step
        )

    def _engram(self, streams: torch.Tensor, step: Step, hash_rows: torch.Tensor | None) -> torch.Tensor:
        if self.engram is None:
            return streams
        if hash_rows is None:
            raise RuntimeError(f"layer {self.plan.layer} needs its Engram rows")
        return self.engram(streams, hash_rows, step.is_image)

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
