"""Every tensor of a published checkpoint: its name, dtype and shape, and which stage runs it (spec §2).

Pure arithmetic on a config: nothing is opened. `expected_tensors` is the contract that loading checks and
that `cedar model inspect` adds up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cedar.model.config import QUANT_GROUP, DraftConfig, ModelConfig, VisionConfig
from cedar.model.errors import InputError
from cedar.model.schedule import LayerMode, layer_plan

DTYPE_BYTES: Final = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
STAGES: Final = ("encoder", "prefill", "decode")

_VISION_PREFIXES: Final = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
_DRAFT_PREFIX: Final = "mtp."
_DRAFT_RINGS: Final = re.compile(r"^mtp\.\d+\.(main_proj|main_norm|attn\.wkv|attn\.kv_norm)\.")


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor must be: `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def check_stage(stage: str | None) -> None:
    """Refuse a stage name that does not exist; None means all of them."""
    if stage is not None and stage not in STAGES:
        raise InputError("stage", stage, f"one of {list(STAGES)} or None")


def needed_by(name: str, stage: str | None, drafting: bool = False) -> bool:
    """Whether `stage` runs tensor `name`. Of the draft module, which only `drafting` asks for, Prefill makes
    the window keys and no more.
    """
    if name.startswith(_DRAFT_PREFIX):
        if stage == "prefill":
            return drafting and _DRAFT_RINGS.match(name) is not None
        return drafting and stage != "encoder"
    if stage is None:
        return True
    return name.startswith(_VISION_PREFIXES) == (stage == "encoder")


def stage_tensors(config: ModelConfig, stage: str | None, drafting: bool = False) -> dict[str, TensorSpec]:
    """The tensors that `stage` loads, by name."""
    check_stage(stage)
    return {spec.name: spec for spec in expected_tensors(config) if needed_by(spec.name, stage, drafting)}


def expected_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor that a checkpoint of this config holds."""
    d = config.hidden_size
    yield TensorSpec("embed.weight", "BF16", (config.vocab_size, d))
    for plan in layer_plan(config):
        yield from _backbone_layer(config, plan.layer, plan.mode, plan.ratio)
    yield TensorSpec("norm.weight", "BF16", (d,))
    yield TensorSpec("head.weight", "BF16", (config.vocab_size, d))
    if config.vision is not None:
        yield from _vision(config.vision, d)
    if config.draft is not None:
        yield from _draft(config, config.draft)


def _backbone_layer(config: ModelConfig, layer: int, mode: LayerMode, ratio: int) -> Iterator[TensorSpec]:
    prefix = f"layers.{layer}."
    d, head_dim = config.hidden_size, config.head_dim
    yield from _block(config, prefix, config.routed_experts)
    if mode is LayerMode.FULL:
        yield TensorSpec(f"{prefix}attn.compressor.wkv.weight", "BF16", (head_dim, d))
        yield TensorSpec(f"{prefix}attn.compressor.norm.weight", "BF16", (head_dim,))
        if ratio > 1:
            yield TensorSpec(f"{prefix}attn.compressor.wgate.weight", "BF16", (head_dim, d))
        yield TensorSpec(f"{prefix}attn.indexer.wk.weight", "BF16", (config.index_head_dim, head_dim))
        yield TensorSpec(f"{prefix}attn.indexer.k_norm.weight", "BF16", (config.index_head_dim,))
    if mode in (LayerMode.FULL, LayerMode.REINDEX):
        index_width = config.index_heads * config.index_head_dim
        yield from _dense(f"{prefix}attn.indexer.wq_b", index_width, config.q_lora_rank)
        yield TensorSpec(f"{prefix}attn.indexer.weights_proj.weight", "BF16", (config.index_heads, d))
    engram = config.engram
    if engram is not None and layer in engram.layer_ids:
        rows = engram.num_embeddings[engram.layer_ids.index(layer)]
        yield TensorSpec(f"{prefix}engram.embed.weight", "F8_E4M3", (rows, engram.head_dim))
        yield TensorSpec(f"{prefix}engram.embed.scale", "F8_E8M0", (rows, engram.head_dim // QUANT_GROUP))
        yield from _dense(f"{prefix}engram.wkv", (config.hc_mult + 1) * d, engram.columns * engram.head_dim)
        for name in ("q_weight", "k_weight"):
            yield TensorSpec(f"{prefix}engram.{name}", "BF16", (config.hc_mult, d))


def _block(config: ModelConfig, prefix: str, experts: int) -> Iterator[TensorSpec]:
    """What a backbone layer and a draft stage have in common."""
    d, heads, head_dim = config.hidden_size, config.heads, config.head_dim
    hc, inter = config.hc_mult, config.moe_intermediate_size
    for name in ("attn_norm", "ffn_norm"):
        yield TensorSpec(f"{prefix}{name}.weight", "BF16", (d,))
    for name in ("hc_attn", "hc_ffn"):
        yield TensorSpec(f"{prefix}{name}_fn", "F32", (config.hc_rows, hc * d))
        yield TensorSpec(f"{prefix}{name}_base", "F32", (config.hc_rows,))
        yield TensorSpec(f"{prefix}{name}_scale", "F32", (3,))
    yield from _dense(f"{prefix}attn.wq_a", config.q_lora_rank, d)
    yield from _dense(f"{prefix}attn.wq_b", heads * head_dim, config.q_lora_rank)
    yield from _dense(f"{prefix}attn.wkv", head_dim, d)
    yield from _dense(
        f"{prefix}attn.wo_a", config.o_groups * config.o_lora_rank, heads * head_dim // config.o_groups
    )
    yield from _dense(f"{prefix}attn.wo_b", d, config.o_groups * config.o_lora_rank)
    yield TensorSpec(f"{prefix}attn.q_norm.weight", "BF16", (config.q_lora_rank,))
    yield TensorSpec(f"{prefix}attn.kv_norm.weight", "BF16", (head_dim,))
    yield TensorSpec(f"{prefix}attn.attn_sink", "F32", (heads,))
    yield TensorSpec(f"{prefix}ffn.gate.weight", "BF16", (experts, d))
    for name in ("bias", "bias_vl"):
        yield TensorSpec(f"{prefix}ffn.gate.{name}", "F32", (experts,))
    for expert in range(experts):
        for name, rows, columns in (("w1", inter, d), ("w2", d, inter), ("w3", inter, d)):
            stem = f"{prefix}ffn.experts.{expert}.{name}"
            yield TensorSpec(f"{stem}.weight", "I8", (rows, columns // 2))
            yield TensorSpec(f"{stem}.scale", "F8_E8M0", (rows, columns // QUANT_GROUP))
    for name, rows, columns in (("w1", inter, d), ("w2", d, inter), ("w3", inter, d)):
        yield from _dense(f"{prefix}ffn.shared_experts.{name}", rows, columns)


def _dense(stem: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{stem}.weight", "F8_E4M3", (rows, columns))
    blocks = (-(-rows // QUANT_GROUP), -(-columns // QUANT_GROUP))
    yield TensorSpec(f"{stem}.scale", "F8_E8M0", blocks)


def _vision(vision: VisionConfig, d: int) -> Iterator[TensorSpec]:
    hidden, inter = vision.hidden_size, vision.intermediate_size
    for name in ("image_start", "image_end", "image_newline"):
        yield TensorSpec(name, "BF16", (d,))
    yield from _biased("vision.patch_embed.proj", hidden, 3 * vision.patch_size**2)
    for block in range(vision.layers):
        prefix = f"vision.blocks.{block}."
        for name in ("norm1", "norm2"):
            yield TensorSpec(f"{prefix}{name}.weight", "BF16", (hidden,))
        yield from _biased(f"{prefix}attn.wqkv", 3 * hidden, hidden)
        yield from _biased(f"{prefix}attn.wo", hidden, hidden)
        yield TensorSpec(f"{prefix}mlp.w1.weight", "BF16", (2 * inter, hidden))
        yield TensorSpec(f"{prefix}mlp.w2.weight", "BF16", (hidden, inter))
    yield TensorSpec("vision.norm.weight", "BF16", (hidden,))
    yield from _biased("aligner.w1", d, hidden * vision.downsample_ratio**2)
    yield from _biased("aligner.w2", d, d)


def _biased(stem: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{stem}.weight", "BF16", (rows, columns))
    yield TensorSpec(f"{stem}.bias", "BF16", (rows,))


def _draft(config: ModelConfig, draft: DraftConfig) -> Iterator[TensorSpec]:
    d, vocab = config.hidden_size, config.vocab_size
    for stage in range(draft.stages):
        yield from _block(config, f"mtp.{stage}.", draft.routed_experts)
    yield from _dense("mtp.0.main_proj", d, d * len(draft.target_layer_ids))
    yield TensorSpec("mtp.0.main_norm.weight", "BF16", (d,))
    last = f"mtp.{draft.stages - 1}."
    yield TensorSpec(f"{last}norm.weight", "BF16", (d,))
    yield TensorSpec(f"{last}markov_head.embed.weight", "BF16", (vocab, draft.markov_rank))
    yield TensorSpec(f"{last}markov_head.head.weight", "BF16", (vocab, draft.markov_rank))
    yield TensorSpec(f"{last}confidence_head.proj.weight", "BF16", (1, d + draft.markov_rank))
