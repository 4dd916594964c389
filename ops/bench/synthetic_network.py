"""A text network of V4.1-Flash's schedule (40 layers, its sources, Engram, candidate pool) with random
weights.

Widths are the caller's, so that a step's launches can be measured without its weights, or one layer with its
real ones. Magnitudes are such that activations neither vanish nor overflow; the tokens it gives mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from cedar.model.block import Layer
from cedar.model.config import ModelConfig, parse_config
from cedar.model.dense import ExpansionBudget
from cedar.model.engram import EngramHasher
from cedar.model.network import Network
from cedar.model.schedule import layer_plan, page_layout
from cedar.model.tensors import TensorSpec, stage_tensors
from cedar.model.text import TextNetwork
from cedar.model.weights import LayerBuilder

TINY: Final[Mapping[str, Any]] = {
    "vocab_size": 1024, "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8,
    "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 6, "index_n_heads": 8, "index_head_dim": 128,
    "max_position_embeddings": 65_536,
}  # fmt: skip
# Narrow, but with the heads, groups and index heads that Hopper's own kernels take.
NARROW: Final[Mapping[str, Any]] = {
    "vocab_size": 1024, "hidden_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_groups": 8, "o_lora_rank": 64,
    "n_routed_experts": 32, "num_experts_per_tok": 6, "index_n_heads": 32, "index_head_dim": 128,
    "max_position_embeddings": 65_536,
}  # fmt: skip
FLASH: Final[Mapping[str, Any]] = {
    "vocab_size": 129_280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024,
    "n_routed_experts": 384, "num_experts_per_tok": 6, "index_n_heads": 32, "index_head_dim": 128,
    "max_position_embeddings": 1_048_576,
}  # fmt: skip
_SCHEDULE: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v41_text", "num_hidden_layers": 40, "num_key_value_heads": 1,
    "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False,
    "tie_word_embeddings": False, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20, "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_topk": 512,
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_nextn_predict_layers": 0,
    "engram_layer_ids": [1, 14], "engram_num_embeddings": [434, 606], "engram_max_ngram_size": 4,
    "engram_vocab_size": 61, "engram_n_heads": 2, "engram_head_dim": 64, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 512,
}  # fmt: skip


def synthetic_config(widths: Mapping[str, Any]) -> ModelConfig:
    """Flash's schedule at these widths (keys of `text_config`)."""
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}  # fmt: skip
    return parse_config(
        {
            "model_type": "deepseek_v41", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
            "pad_token_id": 2, "image_token_id": 3, "quantization_config": quantization,
            "text_config": {**_SCHEDULE, **widths},
        }
    )  # fmt: skip


def synthetic_network(widths: Mapping[str, Any], device: str) -> Network:
    """The network on `device`."""
    config = synthetic_config(widths)
    where = torch.device(device)
    layout = page_layout(config, 256)
    tensors = _tensors(config, where)
    builder = LayerBuilder(config, layout, tensors, where, ExpansionBudget(where, 0))
    layers = tuple(builder.layer(plan) for plan in layer_plan(config))
    assert config.engram is not None
    compressed = torch.arange(config.vocab_size) % config.engram.compressed_vocab_size
    text = TextNetwork(
        config=config,
        embedding=builder.take("embed.weight"),
        layers=layers,
        norm=builder.take("norm.weight"),
        head=builder.plain("head.weight"),
        hasher=EngramHasher(config.engram, compressed),
    )
    return Network(
        config=config, layout=layout, plan=layer_plan(config), device=where, stage="decode",
        fingerprint=bytes(32), text=text, vision=None,
    )  # fmt: skip


def synthetic_layer(widths: Mapping[str, Any], number: int, device: str) -> tuple[Layer, Network]:
    """Layer `number` alone (no source of keys, as sources count), and the network on `device` that it would
    be of, which has no weights: it allocates memory. For widths of which forty layers do not fit.
    """
    config = synthetic_config(widths)
    where, layout, plan = torch.device(device), page_layout(config, 256), layer_plan(config)
    tensors = _tensors(config, where, f"layers.{number}.")
    layer = LayerBuilder(config, layout, tensors, where, ExpansionBudget(where, 0)).layer(plan[number])
    network = Network(
        config=config, layout=layout, plan=plan, device=where, stage="decode", fingerprint=bytes(32),
        text=None, vision=None,
    )  # fmt: skip
    return layer, network


def _tensors(config: ModelConfig, device: torch.device, prefix: str = "") -> dict[str, torch.Tensor]:
    """Random tensors as `load_tensors` gives them, those whose names begin so: experts stacked, Engram tables
    on the host.
    """
    torch.manual_seed(11)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in stage_tensors(config, "decode").items():
        if not name.startswith(prefix):
            continue
        if ".experts." in name:
            stem, _, part = name.rpartition(".experts.")
            number, _, kind = part.partition(".")
            if number == "0":
                stacked = TensorSpec(
                    f"{stem}.experts.{kind}", spec.dtype, (config.routed_experts, *spec.shape)
                )
                tensors[stacked.name] = _random(stacked, device)
            continue
        tensors[name] = _random(spec, torch.device("cpu") if ".engram.embed." in name else device)
    return tensors


def _random(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if spec.dtype == "F8_E8M0":  # 2^-8 for E4M3 values near 1: a product of a few hundred stays near 1
        return torch.full(spec.shape, 119, dtype=torch.uint8, device=device)
    if spec.dtype == "I8":
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device)
    values = torch.randn(spec.shape, device=device)
    if spec.dtype == "F8_E4M3":
        return values.to(torch.float8_e4m3fn)
    if spec.dtype == "F32":
        return values * 0.02
    if spec.name.endswith("norm.weight"):
        values = 1 + values * 0.1
    elif values.dim() == 2 and spec.name != "embed.weight":
        values = values * spec.shape[1] ** -0.5
    return values.to(torch.bfloat16)
