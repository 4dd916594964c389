"""config.json: what parses, what is refused, and the layer plan that follows from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cedar.model.config import ModelConfig, parse_config
from cedar.model.errors import ConfigError
from cedar.model.schedule import LayerMode, default_page_tokens, layer_plan, page_layout
from cedar.model.tensors import expected_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
TINY: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text())


def changed(path: str, value: object) -> dict[str, Any]:
    """The tiny config with one field set, or removed when `value` is None."""
    data = copy.deepcopy(TINY)
    *folders, key = path.split(".")
    at = data
    for folder in folders:
        at = at[folder]
    if value is None:
        del at[key]
    else:
        at[key] = value
    return data


def flash() -> dict[str, Any]:
    """The published flash config, from the spec's table."""
    data = copy.deepcopy(TINY)
    data["image_token_id"] = 129264
    data["text_config"].update(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=40,
        moe_intermediate_size=2304,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_groups=8,
        o_lora_rank=1024,
        n_routed_experts=384,
        num_experts_per_tok=6,
        sliding_window=128,
        compress_ratios=[0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        max_position_embeddings=1048576,
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        engram_layer_ids=[1, 14],
        engram_num_embeddings=[384006168, 384016682],
        engram_n_heads=8,
        engram_head_dim=256,
        engram_vocab_size=16000000,
        engram_compressed_vocab_size=99092,
        dspark_markov_rank=256,
        dspark_target_layer_ids=[37, 38, 39],
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
        dspark_noise_token_id=128799,
    )
    data["text_config"]["rope_scaling"].update(factor=16, original_max_position_embeddings=65536)
    data["vision_config"].update(
        num_hidden_layers=32,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=2816,
        max_image_tokens=1024,
        min_pixels=295936,
    )
    return data


def test_the_tiny_config_parses() -> None:
    config = parse_config((GOLDEN / "config.json").read_bytes())
    assert (config.layers, config.window, config.decoder_start_layer) == (12, 16, 6)
    assert config.engram is not None
    assert config.engram.columns == 6
    assert config.draft is not None
    assert config.draft.target_layer_ids == (9, 10, 11)
    assert config.vision is not None
    assert config.vision.max_wh_ratio is None
    assert default_page_tokens(config) == 32


def test_the_flash_plan() -> None:
    config = parse_config(flash())
    plan = layer_plan(config)
    modes = {mode: [p.layer for p in plan if p.mode is mode] for mode in LayerMode}
    assert modes[LayerMode.SWA] == [0, 1]
    assert modes[LayerMode.FULL] == [2, 8, 14, 20]
    assert modes[LayerMode.REINDEX] == [24, 28, 32, 36]
    assert len(modes[LayerMode.REUSE]) == 30
    assert [plan[i].kv_source for i in (0, 2, 7, 8, 13, 19, 20, 21, 39)] == [None, 2, 2, 8, 8, 14, 20, 20, 20]
    assert [plan[i].index_source for i in (1, 3, 19, 23, 24, 27, 39)] == [None, 2, 14, 20, 24, 24, 36]
    assert [p.layer for p in plan if p.makes_candidates] == [20]
    assert [p.layer for p in plan if p.uses_candidates] == [24, 28, 32, 36]
    assert [p.layer for p in plan if p.has_engram] == [1, 14]
    assert [p.layer for p in plan if p.draft_target] == [37, 38, 39]
    assert config.decoder_start_layer == 20


def test_flash_sizes_are_those_of_the_published_checkpoint() -> None:
    config = parse_config(flash())
    layout = page_layout(config)
    assert (layout.page_tokens, layout.page_bytes, layout.bytes_per_token) == (256, 227840, 890.0)
    specs = list(expected_tensors(config))
    assert (len(specs), sum(spec.nbytes for spec in specs)) == (96085, 510_286_023_000)


def test_a_text_only_config_parses() -> None:
    data = changed("vision_config", None)
    for key in ("num_nextn_predict_layers", "engram_layer_ids", "rope_scaling", "candidate_source_layer_id"):
        del data["text_config"][key]
    data["text_config"]["compress_ratios"] = TINY["text_config"]["compress_ratios"][:12]
    config = parse_config(data)
    assert (config.vision, config.draft, config.engram, config.yarn) == (None, None, None, None)
    assert not any(p.uses_candidates or p.makes_candidates for p in layer_plan(config))


REFUSALS: list[tuple[str, object, str]] = [
    ("model_type", "deepseek_v4", "deepseek_v41"),
    ("model_type", None, "given"),
    ("image_token_id", 640, "0 to 639"),
    ("bos_token_id", -1, "0 to 639"),
    ("quantization_config", None, "an object"),
    ("quantization_config.weight_block_size", [128, 128], "[32, 32]"),
    ("quantization_config.scale_fmt", "float", "ue8m0"),
    ("quantization_config.expert_dtype", "fp8", "fp4"),
    ("text_config", None, "an object"),
    ("text_config.vocab_size", 0, "at least 1"),
    ("text_config.vocab_size", True, "an integer"),
    ("text_config.vocab_size", "640", "an integer"),
    ("text_config.vocab_size", None, "given"),
    ("text_config.hidden_size", 100, "multiple of 32"),
    ("text_config.head_dim", 80, "multiple of 32"),
    ("text_config.qk_rope_head_dim", 34, "32"),
    ("text_config.qk_rope_head_dim", 15, "multiple of 2"),
    ("text_config.o_groups", 3, "divisor of heads x head_dim = 256"),
    ("text_config.o_lora_rank", 3, "multiple of 32"),
    ("text_config.num_experts_per_tok", 9, "1 to 8"),
    ("text_config.n_shared_experts", 2, "1 to 1"),
    ("text_config.num_key_value_heads", 2, "1"),
    ("text_config.hidden_act", "gelu", "silu"),
    ("text_config.tie_word_embeddings", True, "False"),
    ("text_config.scoring_func", "softmax", "sqrtsoftplus"),
    ("text_config.norm_topk_prob", False, "True"),
    ("text_config.rms_norm_eps", 0, "above 0"),
    ("text_config.rms_norm_eps", float("nan"), "finite"),
    ("text_config.rope_theta", "10000", "number"),
    ("text_config.rope_scaling.rope_type", "linear", "yarn"),
    ("text_config.rope_scaling.factor", 0, "above 0"),
    ("text_config.compress_ratios", [0, 0, 2], "15 long"),
    ("text_config.compress_ratios", "0,0,2", "list of integers"),
    ("text_config.compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 1], "0: a draft layer"),
    ("text_config.compress_ratios", [0, 0, -2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "from 0 to 16"),
    ("text_config.compress_ratios", [0, 0, 32, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "from 0 to 16"),
    (
        "text_config.compress_ratios",
        [0, 0, 2, 1, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "ratio of its key/value source 2",
    ),
    (
        "text_config.compress_ratios",
        [0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "below every key/value source",
    ),
    ("text_config.compress_ratios", [0, 0, 2, 2, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0], "above 0"),
    ("text_config.kv_source_layer_ids", [], "at least one layer"),
    ("text_config.kv_source_layer_ids", [4, 2, 6], "ascending"),
    ("text_config.kv_source_layer_ids", [2, 4, 12], "from 0 to 11"),
    ("text_config.kv_source_layer_ids", [2, 4, 7], "in index_source_layer_ids"),
    ("text_config.index_source_layer_ids", [0, 2, 4, 6, 8, 10], "above 0"),
    ("text_config.candidate_block_size", None, "given"),
    ("text_config.candidate_source_layer_id", 7, "in index_source_layer_ids"),
    ("text_config.candidate_source_layer_id", 8, "in kv_source_layer_ids"),
    ("text_config.candidate_source_layer_id", 4, "layer 8 selects from, 6"),
    ("text_config.engram_num_embeddings", [434], "as long as engram_layer_ids, 2"),
    ("text_config.engram_num_embeddings", [434, 0], "at least 1"),
    ("text_config.engram_layer_ids", [1, 14], "from 0 to 11"),
    ("text_config.dspark_target_layer_ids", [9, 10, 12], "from 0 to 11"),
    ("vision_config.hidden_size", 66, "heads"),
    ("vision_config.patch_size", 0, "at least 1"),
]


@pytest.mark.parametrize(("field", "value", "limit"), REFUSALS, ids=lambda x: str(x)[:40])
def test_what_is_refused_names_field_value_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(field, value))
    message = str(caught.value)
    assert field.rpartition(".")[2] in message
    assert limit in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", b"\xff"])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        parse_config(text)


@pytest.mark.parametrize("page_tokens", [0, -2, 31, 1 << 20])
def test_page_tokens_must_hold_whole_groups(page_tokens: int) -> None:
    config: ModelConfig = parse_config(TINY)
    with pytest.raises(ConfigError, match="page_tokens"):
        page_layout(config, page_tokens)
