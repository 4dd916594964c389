"""From a checkpoint's tensors to layers: experts stacked, Engram tables left on the host (spec §2)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import torch
from cedar.kernels.fp8 import expand_fp8_blocks
from cedar.kernels.rope import YarnParams, rope_frequencies
from cedar.kvstore.layout import PageLayout
from cedar.model.attention import Attention
from cedar.model.block import Layer
from cedar.model.checkpoint import Checkpoint
from cedar.model.config import ModelConfig
from cedar.model.dense import Dense, ExpansionBudget, Experts, Plain
from cedar.model.engram import EngramLayer
from cedar.model.moe import MixtureOfExperts
from cedar.model.residual import StreamMix
from cedar.model.schedule import LayerMode, LayerPlan, layer_plan
from cedar.model.sources import Compressor, Indexer, SourcePages
from cedar.model.tensors import TensorSpec

_EXPERT: Final = re.compile(r"^(?P<stem>.*\.experts)\.(?P<expert>\d+)\.(?P<part>w[123]\.(?:weight|scale))$")
_ENGRAM_TABLE: Final = re.compile(r"^layers\.\d+\.engram\.embed\.(weight|scale)$")


def load_tensors(
    checkpoint: Checkpoint, specs: Iterable[TensorSpec], device: torch.device
) -> dict[str, torch.Tensor]:
    """The named tensors on `device`. `X.experts.E.w1.weight` of all E become one stacked
    `X.experts.w1.weight`.

    Engram tables stay on the host, mapped from disk where the checkpoint is local. All headers are checked
    before any weight is read. Raises CheckpointError naming a tensor that is missing, misshapen or of another
    dtype.
    """
    specs = list(specs)
    checkpoint.check(specs)
    stack_sizes: dict[str, int] = {}
    for spec in specs:
        if match := _EXPERT.match(spec.name):
            name = f"{match['stem']}.{match['part']}"
            stack_sizes[name] = max(stack_sizes.get(name, 0), int(match["expert"]) + 1)
    loaded = {spec.name: checkpoint.map(spec) for spec in specs if _ENGRAM_TABLE.match(spec.name)}
    for spec, tensor in checkpoint.read(spec for spec in specs if spec.name not in loaded):
        match = _EXPERT.match(spec.name)
        if match is None:
            loaded[spec.name] = tensor.to(device)
            continue
        name = f"{match['stem']}.{match['part']}"
        if name not in loaded:
            loaded[name] = torch.empty((stack_sizes[name], *tensor.shape), dtype=tensor.dtype, device=device)
        loaded[name][int(match["expert"])] = tensor
    return loaded


class LayerBuilder:
    """Builds the layers of one network from loaded tensors, each taken out of `tensors` as it is used."""

    def __init__(
        self,
        config: ModelConfig,
        layout: PageLayout,
        tensors: dict[str, torch.Tensor],
        device: torch.device,
        budget: ExpansionBudget,
    ) -> None:
        self._config = config
        self._layout = layout
        self._tensors = tensors
        self._budget = budget
        yarn = config.yarn
        params = (
            None
            if yarn is None
            else YarnParams(
                yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original_max_position_embeddings
            )
        )
        self._plain_freqs = rope_frequencies(config.rope_dim, config.rope_theta).to(device)
        self._source_freqs = rope_frequencies(config.rope_dim, config.compress_rope_theta, params).to(device)
        self._tails = 0

    def take(self, name: str) -> torch.Tensor:
        """One tensor, once."""
        return self._tensors.pop(name)

    def look(self, name: str) -> torch.Tensor:
        """One tensor that is taken again later."""
        return self._tensors[name]

    @property
    def plain_freqs(self) -> torch.Tensor:
        """RoPE frequencies fp32 [R/2] of layers without global entries."""
        return self._plain_freqs

    @property
    def budget(self) -> ExpansionBudget:
        """What may still be kept expanded."""
        return self._budget

    def plain(self, name: str) -> Plain:
        """A bf16 matrix."""
        return Plain.of(self.take(name), self._budget)

    def dense(self, *stems: str) -> Dense:
        """An FP8 matrix with its scales; several of whole blocks that share an input become one."""
        weight = torch.cat([self.take(f"{stem}.weight").view(torch.uint8) for stem in stems])
        scale = torch.cat([self.take(f"{stem}.scale") for stem in stems])
        return Dense.of(weight.view(torch.float8_e4m3fn), scale, self._budget)

    def layer(self, plan: LayerPlan, prefix: str = "", per_token: int = 0) -> Layer:
        """Layer `plan.layer`. Layers must be built in order: tails are numbered as sources come.

        `prefix` and `per_token` (experts a token) are a draft stage's own.
        """
        prefix = prefix or f"layers.{plan.layer}."
        return Layer(
            plan=plan,
            eps=self._config.rms_norm_eps,
            attn_mix=self._mix(f"{prefix}hc_attn"),
            attn_norm=self.take(f"{prefix}attn_norm.weight"),
            attention=self._attention(f"{prefix}attn.", plan),
            ffn_mix=self._mix(f"{prefix}hc_ffn"),
            ffn_norm=self.take(f"{prefix}ffn_norm.weight"),
            moe=self._moe(f"{prefix}ffn.", per_token or self._config.experts_per_token),
            engram=self._engram(f"{prefix}engram.") if plan.has_engram else None,
        )

    def _mix(self, stem: str) -> StreamMix:
        config = self._config
        return StreamMix(
            fn=Plain.of(self.take(f"{stem}_fn"), self._budget).weight,
            scale=self.take(f"{stem}_scale"),
            base=self.take(f"{stem}_base"),
            eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            iters=config.hc_sinkhorn_iters,
        )

    def _attention(self, prefix: str, plan: LayerPlan) -> Attention:
        config = self._config
        pages = None
        if plan.kv_source is not None:
            source = self._layout.source(plan.kv_source)
            pages = SourcePages.of(source, sum(p.kv_source == plan.kv_source for p in layer_plan(config)))
        freqs = self._plain_freqs if pages is None else self._source_freqs
        wo_a = expand_fp8_blocks(
            self.take(f"{prefix}wo_a.weight"), self.take(f"{prefix}wo_a.scale"), torch.bfloat16
        )
        wo_a = Plain.of(wo_a.view(config.o_groups, config.o_lora_rank, -1), self._budget).weight
        return Attention(
            layer=plan.layer,
            in_decoder=plan.layer >= config.decoder_start_layer,
            heads=config.heads,
            groups=config.o_groups,
            eps=config.rms_norm_eps,
            latents=self.dense(f"{prefix}wq_a", f"{prefix}wkv"),
            q_norm=self.take(f"{prefix}q_norm.weight"),
            wq_b=self.dense(f"{prefix}wq_b"),
            kv_norm=self.take(f"{prefix}kv_norm.weight"),
            sink=self.take(f"{prefix}attn_sink"),
            wo_a=wo_a,
            wo_b=self.dense(f"{prefix}wo_b"),
            freqs=freqs,
            pages=pages,
            compressor=self._compressor(prefix, pages, freqs)
            if pages and plan.mode is LayerMode.FULL
            else None,
            indexer=self._indexer(f"{prefix}indexer.", plan, pages, freqs)
            if pages and plan.selects
            else None,
        )

    def _compressor(self, prefix: str, pages: SourcePages, freqs: torch.Tensor) -> Compressor:
        tail = self._tails
        pools = pages.ratio > 1
        self._tails += pools
        return Compressor(
            pages=pages,
            tail=tail,
            wkv=self.plain(f"{prefix}compressor.wkv.weight"),
            wgate=self.plain(f"{prefix}compressor.wgate.weight") if pools else None,
            norm=self.take(f"{prefix}compressor.norm.weight"),
            key=self.plain(f"{prefix}indexer.wk.weight"),
            key_norm=self.take(f"{prefix}indexer.k_norm.weight"),
            freqs=freqs,
            eps=self._config.rms_norm_eps,
        )

    def _indexer(self, prefix: str, plan: LayerPlan, pages: SourcePages, freqs: torch.Tensor) -> Indexer:
        config = self._config
        return Indexer(
            pages=pages,
            wq=self.dense(f"{prefix}wq_b"),
            weights=self.plain(f"{prefix}weights_proj.weight"),
            heads=config.index_heads,
            topk=config.index_topk,
            uses_candidates=plan.uses_candidates,
            candidate_block=config.candidate_block_size if plan.makes_candidates else 0,
            candidate_keep=config.candidate_topk_blocks,
            freqs=freqs,
        )

    def _moe(self, prefix: str, per_token: int) -> MixtureOfExperts:
        config = self._config
        w1, w3, w2 = (
            (self.take(f"{prefix}experts.{name}.weight"), self.take(f"{prefix}experts.{name}.scale"))
            for name in ("w1", "w3", "w2")
        )
        return MixtureOfExperts(
            gate=self.plain(f"{prefix}gate.weight"),
            bias=self.take(f"{prefix}gate.bias"),
            bias_image=self.take(f"{prefix}gate.bias_vl"),
            experts=Experts.of(w1, w3, w2, self._budget),
            shared_in=self.dense(f"{prefix}shared_experts.w1", f"{prefix}shared_experts.w3"),
            shared_out=self.dense(f"{prefix}shared_experts.w2"),
            per_token=per_token,
            routed_scale=config.routed_scaling_factor,
            limit=config.swiglu_limit,
        )

    def _engram(self, prefix: str) -> EngramLayer:
        return EngramLayer(
            table=self.take(f"{prefix}embed.weight").view(torch.uint8),
            scales=self.take(f"{prefix}embed.scale"),
            wkv=self.dense(f"{prefix}wkv"),
            q_weight=self.take(f"{prefix}q_weight"),
            k_weight=self.take(f"{prefix}k_weight"),
            eps=self._config.rms_norm_eps,
        )
