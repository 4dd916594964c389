"""Conversations as padded batches, made by worker processes from seeds."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import tokenizers
import torch
from cedar.model.config import ModelConfig
from cedar.model.images import SLOT, image_patches, plan_image, token_types
from cedar.training.checkpoint_config import PAD
from cedar.training.context import Batch
from cedar.training.conversations import Mixture, training_conversation
from cedar.training.tokenization import Encoded, WordEncoder, encode_conversation, span_measure
from cedar.training.vision import Pictures, cell_places, in_cells
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized


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
    rows, tokens = len(conversations), shape.tokens
    ids = torch.full((rows, tokens), PAD)
    weight = torch.zeros(rows, tokens)
    kinds = torch.full((rows, tokens), -1)
    shown: list[tuple[int, Image.Image]] = []
    starts = torch.zeros(2, rows, dtype=torch.int64)
    for row, item in enumerate(conversations):
        length = min(len(item.ids), tokens)
        ids[row, :length] = torch.tensor(item.ids[:length])
        answer = torch.tensor(item.answer[:length])
        weight[row, :length] = torch.where(answer, 1.0, shape.text_weight)
        for start, image in zip(item.spans, item.images, strict=True):
            assert config.vision is not None
            plan = plan_image(*image.size, config.vision)
            if start + plan.span_length <= length:
                types = torch.tensor(token_types(plan.rows, plan.columns))
                kinds[row, start : start + plan.span_length] = types
                shown.append((row * tokens + start, image))
        starts[:, row] = torch.tensor(_replay_starts(answer, config.window, shape.replay, rng))
    weight = weight.masked_fill(kinds >= 0, 0.0)
    weight[:, 0] = 0.0
    chance = torch.where(torch.roll(weight, -1, 1) >= 1.0, 1.0, 0.02) + 1e-4
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return Batch(
        ids=ids,
        loss_weight=weight,
        kinds=kinds,
        encoder_start=starts[0],
        decoder_start=starts[1],
        dense=torch.rand(rows, generator=generator) >= shape.sparse,
        queries=torch.multinomial(chance, min(shape.queries, tokens), generator=generator),
        pictures=_pictures(shown, config),
    )


def _pictures(shown: Sequence[tuple[int, Image.Image]], config: ModelConfig) -> tuple[Pictures, ...]:
    """Images with the flat position where each one's span starts, padded to a few numbers of cells."""
    vision = config.vision
    assert vision is not None
    side = vision.downsample_ratio
    rooms = (4, 16, vision.max_image_tokens - 3)
    sized: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {room: [] for room in rooms}
    for start, image in shown:
        plan = plan_image(*image.size, vision)
        cells = plan.rows * plan.columns
        room = next(room for room in rooms if cells <= room)
        patches = in_cells(image_patches(image, plan, vision.patch_size), plan, side)
        kinds = torch.tensor(token_types(plan.rows, plan.columns))
        slots = start + torch.nonzero(kinds == SLOT).flatten()
        more = room - cells
        sized[room].append(
            (
                pad(patches, (0, 0, 0, more * side**2)),
                pad(cell_places(plan, side), (0, 0, 0, more * side**2), value=-1),
                pad(slots, (0, more), value=-1),
            )
        )
    pictures = []
    for items in filter(None, sized.values()):
        patches, places, slots = map(torch.stack, zip(*items, strict=True))
        pictures.append(Pictures(patches=patches, places=places, slots=slots))
    return tuple(pictures)


def _replay_starts(answer: Tensor, window: int, share: float, rng: random.Random) -> tuple[int, int]:
    """Where a page hit restarted the encoder and where the decoder began: W before an answer, as served."""
    begins = torch.nonzero(answer[1:] & ~answer[:-1]).flatten().tolist()
    if not begins or rng.random() >= share:
        return 0, 0
    prompt = rng.choice(begins) + 1
    decoder = max(0, prompt - window)
    encoder = max(0, rng.randrange(prompt) - window) if rng.random() < 0.3 else 0
    return encoder, decoder


class Feed:
    """Batches of whichever phase is asked for, from worker processes (or this one when `workers` is 0).

    The workers start once, before anything is recorded on an accelerator, and change over with the phase.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        config: ModelConfig,
        shapes: Sequence[BatchShape],
        *,
        seed: int,
        workers: int,
    ) -> None:
        self._phase = multiprocessing.Value("i", 0)
        loader = DataLoader(
            _Batches(tokenizer, config, shapes, self._phase, seed),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=2 if workers else None,
            pin_memory=bool(workers) and torch.cuda.is_available(),
        )
        self._made = cast("Iterator[tuple[int, Batch]]", iter(loader))

    def next(self, phase: int) -> Batch:
        """The next batch of a phase; what was made ahead for another one is dropped."""
        self._phase.value = phase
        while True:
            made_for, batch = next(self._made)
            if made_for == phase:
                return batch


class _Batches(IterableDataset[tuple[int, Batch]]):
    """An endless stream of batches and the phases that they are for; each worker has its own seed."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        config: ModelConfig,
        shapes: Sequence[BatchShape],
        phase: Synchronized[int],
        seed: int,
    ) -> None:
        self._text = tokenizer.to_str()
        self._config, self._shapes, self._phase, self._seed = config, shapes, phase, seed

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        torch.set_num_threads(1)
        info = get_worker_info()
        rng = random.Random(f"{self._seed}/{0 if info is None else info.id}")
        encode = WordEncoder(tokenizers.Tokenizer.from_str(self._text))
        span = span_measure(self._config.vision)
        while True:
            phase = self._phase.value
            shape = self._shapes[phase]
            rows = []
            for _ in range(shape.rows):
                turns = training_conversation(rng, shape.tokens - 1, encode.measure, shape.mixture, span)
                rows.append(encode_conversation(turns, encode, span))
            yield phase, collate(rows, shape, self._config, rng)
