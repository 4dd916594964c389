"""The differentiable twin of the served network: same names, same values, whole batches (spec §3).

Letters: B rows, T tokens, N = B·T, hc streams, d hidden, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from cedar.model.config import ModelConfig
from cedar.model.engram_ids import EngramHashPlan, hash_plans
from cedar.model.images import END, NEWLINE, START
from cedar.model.schedule import layer_plan
from cedar.training.attention import Entries
from cedar.training.context import Batch, Context
from cedar.training.fused import collapse_norm
from cedar.training.layers import Layer, engram_rows
from cedar.training.matrices import Norm, Plain
from cedar.training.vision import Aligner, VisionTower
from torch import Tensor, nn


class Embedding(nn.Module):
    """Token rows."""

    def __init__(self, vocab: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, d) * 0.7)


class TrainingNetwork(nn.Module):
    """All weights but the draft stages, in fp32, under their published names."""

    def __init__(self, config: ModelConfig, compressed: Tensor) -> None:
        """`compressed` int64 [V]: token id to Engram id."""
        super().__init__()
        if config.vision is None or config.engram is None:
            raise ValueError("config has no vision or no Engram, must have both")
        d = config.hidden_size
        self.config = config
        self.embed = Embedding(config.vocab_size, d)
        self.layers = nn.ModuleList(Layer(config, plan) for plan in layer_plan(config))
        self.norm = Norm(d, config.rms_norm_eps)
        self.head = Plain(config.vocab_size, d, 0.2)
        self.vision = VisionTower(config.vision)
        self.aligner = Aligner(config.vision, d)
        for name in ("image_start", "image_newline", "image_end"):
            self.register_parameter(name, nn.Parameter(torch.randn(d) * 0.7))
        self.register_buffer("compressed", compressed, persistent=False)
        engram = config.engram
        self.hash_plans: dict[int, EngramHashPlan] = {
            plan.layer: plan
            for plan in hash_plans(
                layer_ids=engram.layer_ids,
                vocab_size=engram.vocab_size,
                compressed_vocab_size=engram.compressed_vocab_size,
                max_ngram_size=engram.max_ngram_size,
                heads=engram.heads,
            )
        }

    def forward(
        self, context: Context, taps: list[Tensor] | None = None, images: Tensor | None = None
    ) -> Tensor:
        """Logits fp32 [B, T, V]. `taps` receives the mean stream bf16 [N, d] entering each draft target.

        `images`: what `image_rows` gives for the batch, where the caller has it already.
        """
        streams, pre = self.enter(context, self.image_rows(context.batch) if images is None else images)
        windows = self._token_windows(context.batch)
        entries = Entries()
        for module in self.layers:
            layer = cast("Layer", module)
            if taps is not None and layer.plan.draft_target:
                taps.append(streams.float().mean(1).to(streams.dtype))
            plan = self.hash_plans.get(layer.plan.layer)
            hashed = None if plan is None else engram_rows(plan, windows)
            streams, pre = layer(streams, pre, context, entries, hashed)
        normed = collapse_norm(streams, pre, self.norm.weight, self.config.rms_norm_eps)
        logits: Tensor = self.head.full(normed)
        return logits.view(context.rows, context.tokens, -1)

    def enter(self, context: Context, images: Tensor) -> tuple[Tensor, Tensor]:
        """Streams bf16 [N, hc, d] of the embedded batch, images in place, and the first pre fp32 [N, hc]."""
        batch = context.batch
        rows = torch.nn.functional.embedding(batch.ids, self.embed.weight).to(torch.bfloat16).flatten(0, 1)
        rows = torch.where(batch.is_image.view(-1, 1), images, rows)
        streams = rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(rows.shape[0], self.config.hc_mult, device=rows.device)
        pre[:, 0] = 1.0
        return streams, pre

    def image_rows(self, batch: Batch) -> Tensor:
        """bf16 [N, d]: the rows of image positions, zero elsewhere."""
        kinds = batch.kinds.view(-1, 1)
        count = kinds.shape[0]
        device = kinds.device
        rows = torch.zeros(count + 1, self.config.hidden_size, dtype=torch.bfloat16, device=device)
        for pictures in batch.pictures:
            slots = self.aligner(self.vision(pictures.patches, pictures.places)).flatten(0, 1)
            at = pictures.slots.flatten()
            rows = rows.index_copy(0, torch.where(at < 0, count, at), slots)  # the last row takes the padding
        rows = rows[:count]
        for kind, name in ((START, "image_start"), (NEWLINE, "image_newline"), (END, "image_end")):
            rows = torch.where(kinds == kind, self.get_parameter(name).to(torch.bfloat16), rows)
        return rows

    def _token_windows(self, batch: Batch) -> Tensor:
        """int64 [N, G]: compressed ids of a position and those before it, pad from a stop on."""
        engram = self.config.engram
        assert engram is not None
        ids = batch.ids.masked_fill(batch.is_image, -1)
        back = [ids]
        for k in range(1, engram.max_ngram_size):
            back.append(torch.nn.functional.pad(ids[:, :-k], (k, 0), value=-1))
        windows = torch.stack(back, -1).flatten(0, 1)
        stopped = (windows < 0).cummax(1).values
        compressed = cast("Tensor", self.compressed)
        return torch.where(stopped, compressed[engram.pad_token_id], compressed[windows.clamp_min(0)])
