"""Training of the draft stages against the frozen backbone: they learn to say what it would say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from cedar.training.context import Batch, Context
from cedar.training.draft import Anchors, DraftStages
from cedar.training.layers import Gate
from cedar.training.optimiser import Optimisers
from cedar.training.replayed import Replayed, Tensors
from torch import Tensor

if TYPE_CHECKING:
    from cedar.training.trainer import Trainer

_ANCHORS_PER_ROW = 24


def train_drafts(trainer: Trainer, steps: int) -> dict[str, Tensor]:
    """Weights by published name."""
    with torch.cuda.stream(trainer.stream):
        return _trained(trainer, steps)


def _trained(trainer: Trainer, steps: int) -> dict[str, Tensor]:
    drafts = DraftStages(trainer.assets.config).to(trainer.device)
    settings = trainer.settings
    optimisers = Optimisers(drafts, settings.draft_rates, settings.clip)
    gates = [m for m in drafts.modules() if isinstance(m, Gate)]

    def learned(tensors: Tensors) -> Tensors:
        values = dict(tensors)
        images, rate = values.pop("images"), values.pop("rate")
        optimisers.zero()
        loss, measures = _loss(trainer, drafts, Batch.of(values), images)
        loss.backward()
        optimisers.step(rate)
        for gate in gates:
            gate.balance(settings.balance_rate)
        return measures

    learn = Replayed(learned)
    phase = next(number for number, p in enumerate(settings.phases) if not p.all_dense)
    begun = time.monotonic()
    for step in range(steps):
        progress = step / steps
        batch = trainer.feed.next(phase).to(trainer.device)
        with torch.no_grad():
            images = trainer.network.image_rows(batch)
        rate = torch.full((), max(0.02, min(1.0, (1 - progress) / 0.6)), device=trainer.device)
        measures = learn({**batch.tensors, "images": images, "rate": rate})
        if (step + 1) % settings.log_every == 0:
            trainer.log({"draft_step": step + 1, "took_s": time.monotonic() - begun, **_floats(measures)})
    return {name: value.detach() for name, value in drafts.state_dict().items()}


def choose_anchors(batch: Batch, block: int) -> Anchors:
    """Some of the taught queries of each row, far enough from its end."""
    rows, tokens = batch.ids.shape
    count = min(_ANCHORS_PER_ROW, batch.queries.shape[1])
    position = batch.queries[:, :count].clamp_max(tokens - block - 2).flatten()
    row = torch.arange(rows, device=position.device).repeat_interleave(count)
    after = position.unsqueeze(1) + 1 + torch.arange(block + 1, device=position.device)
    begins = batch.decoder_start[row]
    return Anchors(
        row=row,
        position=position,
        tokens=batch.ids[row.unsqueeze(1), after],
        begins=torch.where(position >= begins, begins, 0),
        main_tokens=tokens,
    )


def _loss(
    trainer: Trainer, drafts: DraftStages, batch: Batch, images: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    block = drafts.draft.block_size
    taps: list[Tensor] = []
    with torch.no_grad():
        said = trainer.network(Context(trainer.assets.config, batch), taps, images).argmax(-1)
        anchors = choose_anchors(batch, block)
        after = anchors.position.unsqueeze(1) + 1 + torch.arange(block, device=said.device)
        row = anchors.row.unsqueeze(1)
        label = said[row, after]  # what the backbone says after each block token
        weight = torch.where(batch.loss_weight[row, after + 1] >= 1.0, 1.0, 0.1)
    logits, confidence = drafts(trainer.network, taps, anchors)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
    flat = weight.flatten()
    loss = (each * flat).sum() / flat.sum()
    with torch.no_grad():
        right = (logits.argmax(-1) == label).float()
        answer = (weight >= 1.0).float()
        accepted = (right * answer).cumprod(1).sum(1)
        starts = answer[:, 0]
    trust = torch.nn.functional.binary_cross_entropy_with_logits(confidence.flatten(), right.flatten())
    measures = {
        "draft_loss": loss.detach(),
        "draft_accuracy": (right * answer).sum() / answer.sum().clamp_min(1),
        "draft_accepted": (accepted * starts).sum() / starts.sum().clamp_min(1),
        "confidence_loss": trust.detach(),
    }
    return loss + 0.1 * trust, measures


def _floats(values: Tensors) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
