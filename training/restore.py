"""A checkpoint folder back to the differentiable network: the inverse of `export`.

Values are those that the stored ones stand for. Quantising them again gives the same stored ones, so the
network computes what the served one does.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from cedar.kernels.fp4_ref import unpack_e8m0
from cedar.kernels.fp8_ref import dequantize, expand_blocks
from cedar.model.checkpoint import Checkpoint
from cedar.model.engram_ids import compressed_ids
from cedar.model.tensors import expected_tensors
from cedar.training.export import EXPERT
from cedar.training.network import TrainingNetwork
from tokenizers import Tokenizer
from torch import Tensor


def restored_network(folder: Path, device: torch.device) -> TrainingNetwork:
    """The backbone of a published checkpoint as the differentiable network."""
    checkpoint = Checkpoint.open(str(folder))
    config = checkpoint.config
    if config.engram is None:
        raise ValueError(f"{folder} has no Engram tables, must have some")
    mapping = compressed_ids(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        vocab_size=config.vocab_size,
        compressed_vocab_size=config.engram.compressed_vocab_size,
    )
    network = TrainingNetwork(config, torch.from_numpy(mapping.astype(np.int64)))
    weights = restored_weights(checkpoint)
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    return network.to(device)


def restored_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """fp32 under published names, experts stacked, the draft stages among them."""
    stored = {spec.name: tensor for spec, tensor in checkpoint.read(expected_tensors(checkpoint.config))}
    weights: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        if scale is None:
            weights[name] = tensor.float()
            continue
        scale = scale.view(torch.uint8)
        if match := EXPERT.match(name):
            value = unpack_e8m0(tensor.view(torch.uint8), scale, torch.float32)
            experts[f"{match['stem']}.{match['name']}"][int(match["expert"])] = value
        elif ".engram.embed." in name:
            weights[name] = dequantize(tensor, scale).float()
        else:
            weights[name] = expand_blocks(tensor, scale, torch.float32)
    for name, parts in experts.items():
        weights[name] = torch.stack([parts[number] for number in sorted(parts)])
    return weights
