"""Opening a checkpoint and building its network."""

from __future__ import annotations

import os

import torch
from cedar.model.block import Layer
from cedar.model.checkpoint import Checkpoint
from cedar.model.config import EngramConfig, ModelConfig
from cedar.model.dense import DEFAULT_EXPANDED_BYTES, ExpansionBudget
from cedar.model.draft_weights import build_drafts
from cedar.model.engram import EngramHasher
from cedar.model.engram_ids import compressed_ids
from cedar.model.fingerprint import fingerprint
from cedar.model.network import DEFAULT_CHUNK_TOKENS, Network
from cedar.model.schedule import check_drafting, layer_plan, page_layout
from cedar.model.tensors import check_stage, stage_tensors
from cedar.model.text import TextNetwork
from cedar.model.tokenizer import Tokenizer
from cedar.model.vision import VisionTower
from cedar.model.weights import LayerBuilder, load_tensors


def load_network(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    stage: str | None = None,
    *,
    page_tokens: int | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    expanded_bytes: int = DEFAULT_EXPANDED_BYTES,
    drafting: bool = False,
) -> Network:
    """The network of the checkpoint at `path`, a local folder or any fsspec URL.

    `stage` "encoder" reads vision and aligner only, "prefill" and "decode" the text layers, None both.
    `page_tokens` is the page format's, by default two windows. `chunk_tokens` bounds the rows of one forward
    call of `logits` and `finish_prefill`; `expanded_bytes` the float64 weight copies kept on the CPU.
    `drafting` loads the draft module, too, of which the prefill stage needs a small part. Raises
    ConfigError, CheckpointError or InputError, each naming the field, its value and what is allowed.
    """
    check_stage(stage)
    return build_network(
        Checkpoint.open(os.fspath(path)),
        torch.device(device),
        stage,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        expanded_bytes=expanded_bytes,
        drafting=drafting,
    )


def build_network(
    checkpoint: Checkpoint,
    device: torch.device,
    stage: str | None,
    *,
    page_tokens: int | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    expanded_bytes: int = DEFAULT_EXPANDED_BYTES,
    drafting: bool = False,
) -> Network:
    """As `load_network`, of an opened checkpoint."""
    config = checkpoint.config
    layout = page_layout(config, page_tokens)
    if drafting:
        check_drafting(config)
    tensors = load_tensors(checkpoint, stage_tensors(config, stage, drafting).values(), device)
    vision = None
    if config.vision is not None and stage in ("encoder", None):
        vision = VisionTower.from_tensors(config.vision, tensors, text_width=config.hidden_size)
    text = drafts = None
    if stage != "encoder":
        hasher = _hasher(checkpoint, config, config.engram) if config.engram else None
        builder = LayerBuilder(config, layout, tensors, device, ExpansionBudget(device, expanded_bytes))
        text = _text_network(config, builder, hasher)
        if drafting:
            drafts = build_drafts(config, builder, rings_only=stage == "prefill")
    return Network(
        config=config,
        layout=layout,
        plan=layer_plan(config),
        device=device,
        stage=stage,
        fingerprint=fingerprint(checkpoint, layout),
        text=text,
        vision=vision,
        drafts=drafts,
        chunk_tokens=chunk_tokens,
    )


def _text_network(config: ModelConfig, builder: LayerBuilder, hasher: EngramHasher | None) -> TextNetwork:
    layers: list[Layer] = [builder.layer(plan) for plan in layer_plan(config)]
    return TextNetwork(
        config=config,
        embedding=builder.take("embed.weight"),
        layers=tuple(layers),
        norm=builder.take("norm.weight"),
        head=builder.plain("head.weight"),
        hasher=hasher,
    )


def _hasher(checkpoint: Checkpoint, config: ModelConfig, engram: EngramConfig) -> EngramHasher:
    tokenizer = Tokenizer.load(checkpoint.storage)
    ids = compressed_ids(
        tokenizer.backend, vocab_size=config.vocab_size, compressed_vocab_size=engram.compressed_vocab_size
    )
    return EngramHasher(engram, torch.from_numpy(ids))
