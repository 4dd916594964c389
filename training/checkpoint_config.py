"""The small model's published `config.json`: every part of the architecture, at small width (spec §1).

Ten layers: 0-1 window only (1 with Engram), 2-3 and 4-5 full and reuse at ratio 2, then the decoder at ratio
1: 6 full (candidate source, Engram), 7 reuse, 8 reindex from the pool, 9 reuse. Top-k 64 and a pool of 64
blocks of 8 bind well within 2,048 tokens; window 128 is the real one.
"""

from __future__ import annotations

import json
from typing import Any, Final

from cedar.model.config import ModelConfig, parse_config
from cedar.model.engram_ids import hash_plans

VOCAB_SIZE: Final = 1024
IMAGE_SIDE: Final = 84  # pixels; two by two tokens, a span of eight positions

SPECIAL_TOKENS: Final = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜deepseek_image｜>",
    "<｜noise｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
BEGIN, END, PAD, IMAGE, NOISE, USER, ASSISTANT = range(7)

_ENGRAM_LAYERS: Final = (1, 6)
_ENGRAM_ROWS_FROM: Final = 1499
_ENGRAM_HEADS: Final = 2
_NGRAM: Final = 4


def published_config(compressed_vocab_size: int) -> dict[str, Any]:
    """The decoded `config.json` for a tokenizer with that many distinct Engram ids."""
    plans = hash_plans(
        layer_ids=_ENGRAM_LAYERS,
        vocab_size=_ENGRAM_ROWS_FROM,
        compressed_vocab_size=compressed_vocab_size,
        max_ngram_size=_NGRAM,
        heads=_ENGRAM_HEADS,
    )
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": list(_ENGRAM_LAYERS),
        "engram_num_embeddings": [plan.rows for plan in plans],
        "engram_max_ngram_size": _NGRAM,
        "engram_vocab_size": _ENGRAM_ROWS_FROM,
        "engram_n_heads": _ENGRAM_HEADS,
        "engram_head_dim": 64,
        "engram_pad_token_id": PAD,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    vision = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": IMAGE_SIDE**2,
        "max_wh_ratio": None,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "image_token_id": IMAGE,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": vision,
    }


def shrunk_config(published: dict[str, Any]) -> dict[str, Any]:
    """A narrow variant with the same schedule, for smoke runs: window, top-k and pool bind in 64 tokens."""
    narrow = json.loads(json.dumps(published))
    narrow["text_config"] |= {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "n_routed_experts": 4,
        "sliding_window": 16,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "dspark_markov_rank": 16,
    }
    narrow["vision_config"] |= {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    result: dict[str, Any] = narrow
    return result


def typed(published: dict[str, Any]) -> ModelConfig:
    """The checked record of a decoded config."""
    return parse_config(published)
