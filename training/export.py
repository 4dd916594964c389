"""Trained weights to a checkpoint folder in the published layout (spec §2)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from cedar.kernels.fp4_ref import pack_e8m0
from cedar.kernels.fp8_ref import AMAX_FLOOR, E4M3_MAX, GROUP, exponent_code, power_above, quantize
from cedar.model.config import parse_config
from cedar.model.tensors import TensorSpec, expected_tensors
from cedar.training.tokenization import CHAT_TEMPLATE
from safetensors.torch import save_file
from torch import Tensor

_SHARD: Final = "model-00001-of-00001.safetensors"
EXPERT: Final = re.compile(
    r"^(?P<stem>.*\.experts)\.(?P<expert>\d+)\.(?P<name>w[123])\.(?P<part>weight|scale)$"
)


def export_checkpoint(
    folder: Path, published: Mapping[str, Any], weights: Mapping[str, Tensor], tokenizer: tokenizers.Tokenizer
) -> int:
    """Write the folder and return its size in bytes. `weights` hold fp32 under published names, experts
    stacked.

    Raises KeyError naming a weight that is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = quantised(published, weights)
    save_file(tensors, folder / _SHARD)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), _SHARD)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")
    (folder / "config.json").write_text(json.dumps(published, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False))
    return sum(path.stat().st_size for path in folder.iterdir())


def quantised(published: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the published layout, by name."""
    return {spec.name: _stored(spec, weights) for spec in expected_tensors(parse_config(published))}


def _stored(spec: TensorSpec, weights: Mapping[str, Tensor]) -> Tensor:
    name = spec.name
    if match := EXPERT.match(name):
        stacked = weights[f"{match['stem']}.{match['name']}"].detach().cpu().float()
        payload, scale = pack_e8m0(stacked[int(match["expert"])])
        if match["part"] == "weight":
            return payload.view(torch.int8).contiguous()
        return scale.view(torch.float8_e8m0fnu).contiguous()
    weight = weights[name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else name]
    weight = weight.detach().cpu().float()
    if spec.dtype == "F32":
        return weight.contiguous()
    if spec.dtype == "BF16":
        return weight.to(torch.bfloat16).contiguous()
    if ".engram.embed." in name:
        q, scale = quantize(weight.to(torch.bfloat16))
    else:
        q, scale = _blocks(weight)
    return q.contiguous() if spec.dtype == "F8_E4M3" else scale.view(torch.float8_e8m0fnu).contiguous()


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [O, I] and E8M0 bytes of 32 x 32 blocks."""
    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight, (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = blocks.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp_min(AMAX_FLOOR)
    scale = power_above(amax * (1.0 / E4M3_MAX))
    q = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return q.flatten(2).flatten(0, 1)[:rows, :columns], exponent_code(scale)[:, 0, :, 0]
