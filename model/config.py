"""The published `config.json` as a frozen, checked record (spec §1).

`parse_config` takes the decoded JSON; every value that decides the arithmetic is read, typed and bounded
here, so the rest of the package never looks at a dictionary. Keys that change nothing are ignored; keys that
would change the arithmetic in a way the spec does not describe are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cedar.model.config_fields import Fields
from cedar.model.errors import ConfigError

MODEL_TYPES: Final = ("deepseek_v41",)
QUANT_GROUP: Final = 32  # channels that share an activation scale, and the side of a weight block


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """`rope_scaling` of type yarn: used on layers with a compression ratio above 0."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Hash tables of n-grams; `layer_ids[i]` owns a table of `num_embeddings[i]` rows (spec §7)."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Rows gathered for one position: one for each n-gram size and head."""
        return (self.max_ngram_size - 1) * self.heads


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The DSpark draft module (spec §9)."""

    stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    routed_experts: int
    experts_per_token: int


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and what preprocessing needs (spec §8)."""

    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the text network needs, under the names of the spec's table."""

    model_type: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    routed_experts: int
    experts_per_token: int
    shared_experts: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    window: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig | None
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    max_position_embeddings: int
    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig | None

    @property
    def hc_rows(self) -> int:
        """Rows of an mHC projection: pre, post and the hc x hc mixing matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def decoder_start_layer(self) -> int:
        """First layer of the decoder half: the last key/value source (spec §14)."""
        return self.kv_source_layer_ids[-1]


def parse_config(data: Mapping[str, Any] | str | bytes) -> ModelConfig:
    """Read a published `config.json` (its text or the decoded object).

    Raises ConfigError naming the field.
    """
    if isinstance(data, str | bytes):
        try:
            data = json.loads(data)
        except ValueError as error:
            raise ConfigError("config.json", str(error), "valid JSON") from None
    if not isinstance(data, Mapping):
        raise ConfigError("config.json", type(data).__name__, "a JSON object")
    root = Fields(data, "")
    model_type = root.text("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError("model_type", model_type, f"one of {list(MODEL_TYPES)}")
    _check_quantization(root)
    config = _parse_text(root, root.section("text_config"), model_type)
    from cedar.model.schedule import layer_plan  # the schedule reads a config, and a config must have one

    layer_plan(config)
    return config


def _parse_text(root: Fields, text: Fields, model_type: str) -> ModelConfig:
    for key, expected in _FIXED_TEXT_KEYS.items():
        text.fixed(key, expected)
    vocab = text.count("vocab_size")
    hidden = text.multiple("hidden_size", QUANT_GROUP)
    heads = text.count("num_attention_heads")
    head_dim = text.multiple("head_dim", QUANT_GROUP)
    index_head_dim = text.multiple("index_head_dim", QUANT_GROUP)
    rope_dim = text.multiple("qk_rope_head_dim", 2)
    smaller = min(head_dim, index_head_dim)
    if rope_dim > smaller:
        raise ConfigError(
            "text_config.qk_rope_head_dim", rope_dim, f"at most head_dim and index_head_dim, {smaller}"
        )
    o_groups = text.count("o_groups")
    if heads * head_dim % o_groups:
        raise ConfigError(
            "text_config.o_groups", o_groups, f"a divisor of heads x head_dim = {heads * head_dim}"
        )
    o_lora = text.count("o_lora_rank")
    if o_groups * o_lora % QUANT_GROUP:
        raise ConfigError(
            "text_config.o_lora_rank", o_lora, f"such that o_groups x it is a multiple of {QUANT_GROUP}"
        )
    experts = text.count("n_routed_experts")
    layers = text.count("num_hidden_layers")
    pools = not text.absent("candidate_source_layer_id")
    return ModelConfig(
        model_type=model_type,
        bos_token_id=root.index("bos_token_id", vocab),
        eos_token_id=root.index("eos_token_id", vocab),
        pad_token_id=root.index("pad_token_id", vocab),
        image_token_id=root.index("image_token_id", vocab),
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=text.multiple("q_lora_rank", QUANT_GROUP),
        o_groups=o_groups,
        o_lora_rank=o_lora,
        moe_intermediate_size=text.multiple("moe_intermediate_size", QUANT_GROUP),
        routed_experts=experts,
        experts_per_token=text.count("num_experts_per_tok", most=experts),
        shared_experts=text.count("n_shared_experts", most=1),
        routed_scaling_factor=text.positive("routed_scaling_factor"),
        swiglu_limit=text.positive("swiglu_limit"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        window=text.count("sliding_window"),
        rope_theta=text.positive("rope_theta"),
        compress_rope_theta=text.positive("compress_rope_theta"),
        yarn=_parse_yarn(text),
        compress_ratios=text.integers("compress_ratios"),
        kv_source_layer_ids=text.integers("kv_source_layer_ids"),
        index_source_layer_ids=text.integers("index_source_layer_ids"),
        index_heads=text.count("index_n_heads"),
        index_head_dim=index_head_dim,
        index_topk=text.count("index_topk"),
        candidate_source_layer_id=text.optional_count("candidate_source_layer_id"),
        candidate_topk_blocks=text.count("candidate_topk_blocks") if pools else 0,
        candidate_block_size=text.count("candidate_block_size") if pools else 0,
        hc_mult=text.count("hc_mult"),
        hc_sinkhorn_iters=text.count("hc_sinkhorn_iters"),
        hc_eps=text.positive("hc_eps"),
        max_position_embeddings=text.count("max_position_embeddings"),
        engram=_parse_engram(text, layers, vocab),
        draft=_parse_draft(text, layers, vocab),
        vision=_parse_vision(root),
    )


def _parse_yarn(text: Fields) -> YarnConfig | None:
    if text.absent("rope_scaling"):
        return None
    scaling = text.section("rope_scaling")
    kind = scaling.text("rope_type") if not scaling.absent("rope_type") else scaling.text("type")
    if kind != "yarn":
        raise ConfigError(scaling.name("rope_type"), kind, "'yarn'")
    return YarnConfig(
        factor=scaling.positive("factor"),
        beta_fast=scaling.positive("beta_fast"),
        beta_slow=scaling.positive("beta_slow"),
        original_max_position_embeddings=scaling.count("original_max_position_embeddings"),
    )


def _parse_engram(text: Fields, layers: int, vocab: int) -> EngramConfig | None:
    if text.absent("engram_layer_ids") or not text.integers("engram_layer_ids"):
        return None
    layer_ids = text.ascending("engram_layer_ids", layers)
    rows = text.integers("engram_num_embeddings")
    if len(rows) != len(layer_ids):
        raise ConfigError(
            text.name("engram_num_embeddings"),
            list(rows),
            f"as long as engram_layer_ids, {len(layer_ids)} values",
        )
    if min(rows) < 1:
        raise ConfigError(text.name("engram_num_embeddings"), list(rows), "at least 1 row each")
    compressed = text.count("engram_compressed_vocab_size")
    return EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=rows,
        max_ngram_size=text.count("engram_max_ngram_size", least=2),
        vocab_size=text.count("engram_vocab_size", least=2),
        heads=text.count("engram_n_heads"),
        head_dim=text.multiple("engram_head_dim", QUANT_GROUP),
        pad_token_id=text.index("engram_pad_token_id", vocab),
        compressed_vocab_size=compressed,
    )


def _parse_draft(text: Fields, layers: int, vocab: int) -> DraftConfig | None:
    stages = text.optional_count("num_nextn_predict_layers") or 0
    if stages == 0:
        return None
    experts = text.count("dspark_n_routed_experts")
    return DraftConfig(
        stages=stages,
        block_size=text.count("dspark_block_size"),
        noise_token_id=text.index("dspark_noise_token_id", vocab),
        target_layer_ids=text.ascending("dspark_target_layer_ids", layers),
        markov_rank=text.count("dspark_markov_rank"),
        routed_experts=experts,
        experts_per_token=text.count("dspark_num_experts_per_tok", most=experts),
    )


def _parse_vision(root: Fields) -> VisionConfig | None:
    if root.absent("vision_config"):
        return None
    vision = root.section("vision_config")
    hidden = vision.count("hidden_size")
    heads = vision.count("num_attention_heads")
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(vision.name("hidden_size"), hidden, f"heads ({heads}) times a multiple of 4")
    return VisionConfig(
        layers=vision.count("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        intermediate_size=vision.count("intermediate_size"),
        patch_size=vision.count("patch_size"),
        rope_theta=vision.positive("rope_theta"),
        downsample_ratio=vision.count("downsample_ratio"),
        max_image_tokens=vision.count("max_image_tokens", least=4),
        min_pixels=vision.optional_count("min_pixels") or 0,
        max_wh_ratio=None if vision.absent("max_wh_ratio") else vision.positive("max_wh_ratio"),
    )


def _check_quantization(root: Fields) -> None:
    section = root.section("quantization_config")
    for key, expected in _FIXED_QUANTIZATION_KEYS.items():
        section.fixed(key, expected)


# Keys with one meaning in the spec: absent means that meaning, any other value is refused.
_FIXED_TEXT_KEYS: Final[Mapping[str, object]] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_QUANTIZATION_KEYS: Final[Mapping[str, object]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [QUANT_GROUP, QUANT_GROUP],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
