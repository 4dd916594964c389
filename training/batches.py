"""Conversations as padded batches, made by worker processes from seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import tokenizers
import torch
from cedar.model.config import ModelConfig
from cedar.model.images import image_patches, plan_image
from cedar.training.checkpoint_config import IMAGE_SIDE, PAD
from cedar.training.context import Batch
from cedar.training.conversations import Mixture, training_conversation
from cedar.training.tokenization import Encoded, WordEncoder, encode_conversation
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What batches of one phase look like. `sparse`: share of rows that read selected entries only."""

    rows: int
    tokens: int
    sparse: float
    replay: float  # share of rows whose windows are cut as a replay cuts them
    queries: int = 64
    text_weight: float = 0.1
    mixture: Mixture = field(default_factory=Mixture)


def collate(
    conversations: Sequence[Encoded], shape: BatchShape, config: ModelConfig, rng: random.Random
) -> Batch:
    """Pads to `shape.tokens`, places images, draws replay starts and taught queries."""
    assert config.vision is not None
    plan = plan_image(IMAGE_SIDE, IMAGE_SIDE, config.vision)
    rows, tokens = len(conversations), shape.tokens
    ids = torch.full((rows, tokens), PAD)
    weight = torch.zeros(rows, tokens)
    is_image = torch.zeros(rows, tokens, dtype=torch.bool)
    positions: list[Tensor] = []
    patches: list[Tensor] = []
    starts = torch.zeros(2, rows, dtype=torch.int64)
    for row, item in enumerate(conversations):
        length = min(len(item.ids), tokens)
        ids[row, :length] = torch.tensor(item.ids[:length])
        answer = torch.tensor(item.answer[:length])
        weight[row, :length] = torch.where(answer, 1.0, shape.text_weight)
        for start, image in zip(item.spans, item.images, strict=True):
            if start + plan.span_length <= length:
                is_image[row, start : start + plan.span_length] = True
                positions.append(row * tokens + start + torch.arange(plan.span_length))
                patches.append(image_patches(image, plan, config.vision.patch_size).flatten(1))
        starts[:, row] = torch.tensor(_replay_starts(answer, config.window, shape.replay, rng))
    weight = weight.masked_fill(is_image, 0.0)
    weight[:, 0] = 0.0
    side = config.vision.patch_size
    chance = torch.where(torch.roll(weight, -1, 1) >= 1.0, 1.0, 0.02) + 1e-4
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return Batch(
        ids=ids,
        loss_weight=weight,
        is_image=is_image,
        image_positions=torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64),
        patches=torch.stack(patches) if patches else torch.zeros(0, 1, 3 * side**2, dtype=torch.bfloat16),
        encoder_start=starts[0],
        decoder_start=starts[1],
        dense=torch.rand(rows, generator=generator) >= shape.sparse,
        queries=torch.multinomial(chance, min(shape.queries, tokens), generator=generator),
    )


def _replay_starts(answer: Tensor, window: int, share: float, rng: random.Random) -> tuple[int, int]:
    """Where a page hit restarted the encoder and where the decoder began: W before an answer, as served."""
    begins = torch.nonzero(answer[1:] & ~answer[:-1]).flatten().tolist()
    if not begins or rng.random() >= share:
        return 0, 0
    prompt = rng.choice(begins) + 1
    decoder = max(0, prompt - window)
    encoder = max(0, rng.randrange(prompt) - window) if rng.random() < 0.3 else 0
    return encoder, decoder


class ConversationBatches(IterableDataset[Batch]):
    """An endless stream of batches; each worker has its own seed."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: ModelConfig, shape: BatchShape, seed: int
    ) -> None:
        self._text = tokenizer.to_str()
        self._config, self._shape, self._seed = config, shape, seed

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        info = get_worker_info()
        rng = random.Random(f"{self._seed}/{0 if info is None else info.id}")
        encode = WordEncoder(tokenizers.Tokenizer.from_str(self._text))
        assert self._config.vision is not None
        span = plan_image(IMAGE_SIDE, IMAGE_SIDE, self._config.vision).span_length
        while True:
            rows = []
            for _ in range(self._shape.rows):
                turns = training_conversation(
                    rng, self._shape.tokens - 1, encode.measure, self._shape.mixture, span
                )
                rows.append(encode_conversation(turns, encode, span))
            yield collate(rows, self._shape, self._config, rng)


def stream(
    tokenizer: tokenizers.Tokenizer, config: ModelConfig, shape: BatchShape, *, seed: int, workers: int
) -> Iterator[Batch]:
    """Batches of one phase, in this process when `workers` is 0."""
    data = ConversationBatches(tokenizer, config, shape, seed)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=bool(workers) and torch.cuda.is_available(),
    )
    return cast("Iterator[Batch]", iter(loader))
