"""From a checkpoint's `mtp.` tensors to the draft module (spec §2)."""

from __future__ import annotations

from cedar.model.config import ModelConfig
from cedar.model.dense import Dense
from cedar.model.draft import DraftHead, DraftNetwork, DraftRings, RingKeys
from cedar.model.schedule import LayerMode, LayerPlan, check_drafting
from cedar.model.weights import LayerBuilder


def build_drafts(config: ModelConfig, builder: LayerBuilder, *, rings_only: bool) -> DraftNetwork:
    """The draft module; `rings_only` where tokens are never proposed. Raises ConfigError."""
    draft = check_drafting(config)
    keys = []
    for stage in range(draft.stages):
        prefix = f"mtp.{stage}.attn."
        weight, scale = builder.look(f"{prefix}wkv.weight"), builder.look(f"{prefix}wkv.scale")
        keys.append(
            RingKeys(Dense.of(weight, scale, builder.budget), builder.look(f"{prefix}kv_norm.weight"))
        )
    rings = DraftRings(
        main_proj=builder.dense("mtp.0.main_proj"),
        main_norm=builder.take("mtp.0.main_norm.weight"),
        keys=tuple(keys),
        freqs=builder.plain_freqs,
        eps=config.rms_norm_eps,
        window=config.window,
    )
    if rings_only:
        return DraftNetwork(config=config, draft=draft, rings=rings, stages=(), head=None)
    stages = tuple(
        builder.layer(_stage_plan(config, stage), f"mtp.{stage}.", draft.experts_per_token)
        for stage in range(draft.stages)
    )
    last = f"mtp.{draft.stages - 1}."
    head = DraftHead(
        norm=builder.take(f"{last}norm.weight"),
        markov_embedding=builder.take(f"{last}markov_head.embed.weight"),
        markov_head=builder.plain(f"{last}markov_head.head.weight"),
        confidence=builder.plain(f"{last}confidence_head.proj.weight"),
    )
    return DraftNetwork(config=config, draft=draft, rings=rings, stages=stages, head=head)


def _stage_plan(config: ModelConfig, stage: int) -> LayerPlan:
    """A window-only layer above the backbone's."""
    return LayerPlan(
        layer=config.layers + stage,
        mode=LayerMode.SWA,
        ratio=0,
        kv_source=None,
        index_source=None,
        uses_candidates=False,
        makes_candidates=False,
        has_engram=False,
        draft_target=False,
    )
