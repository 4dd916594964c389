"""Teacher-forced accuracy of the differentiable network by task and length.

An answer counts when every token of it, the end token included, is the likeliest one. Greedy decoding gives
the same answers: a wrong token ends the comparison either way.
"""

from __future__ import annotations

import random
from collections import defaultdict

import tokenizers
import torch
from cedar.model.config import ModelConfig
from cedar.model.images import plan_image
from cedar.training.batches import BatchShape, collate
from cedar.training.checkpoint_config import IMAGE_SIDE
from cedar.training.context import Batch, Context
from cedar.training.conversations import recall_conversation
from cedar.training.image_tasks import compare_turn, digit_turn, figure_turn
from cedar.training.network import TrainingNetwork
from cedar.training.text_tasks import TEXT_TURNS, Turn
from cedar.training.tokenization import Encoded, WordEncoder, encode_conversation


def answers(ids: list[int], marks: list[bool]) -> list[tuple[int, int]]:
    """Begin and end of each answer's tokens."""
    spans, begin = [], None
    for position, marked in enumerate([*marks, False]):
        if marked and begin is None:
            begin = position
        elif not marked and begin is not None:
            spans.append((begin, position))
            begin = None
    return spans


def single_turns(rng: random.Random, count: int) -> list[list[Turn]]:
    """`count` conversations of one turn for every task but recall, images held out."""
    makers = [
        *dict.fromkeys(TEXT_TURNS),
        *(lambda r, m=m: m(r, True) for m in (digit_turn, figure_turn, compare_turn)),
    ]
    return [[make(rng)] for make in makers for _ in range(count)]


@torch.no_grad()
def score(
    network: TrainingNetwork,
    tokenizer: tokenizers.Tokenizer,
    lengths: dict[int, int],
    *,
    seed: int,
    device: torch.device,
    singles: int = 32,
) -> dict[str, float]:
    """Share of right answers by task; recall by length, `lengths` giving how many prompts of each.

    Selection and decoder replay are on, as in serving.
    """
    rng = random.Random(seed)
    config = network.config
    encode = WordEncoder(tokenizer)
    assert config.vision is not None
    span = plan_image(IMAGE_SIDE, IMAGE_SIDE, config.vision).span_length
    results: dict[str, float] = {}
    turns = single_turns(rng, singles)
    short = [encode_conversation(turn, encode, span) for turn in turns]
    if short:
        right = _right(network, short, 128, device, config)
        tally: dict[str, list[bool]] = defaultdict(list)
        for turn, ok in zip(turns, right, strict=True):
            tally[turn[0].kind] += ok
        results |= {kind: sum(ok) / len(ok) for kind, ok in tally.items()}
    for length, count in lengths.items():
        items = []
        for number in range(count):
            conversation = recall_conversation(rng, length - 8, 1 + number % 4, 4, encode.measure)
            items.append(encode_conversation(conversation, encode, span))
        per_call = max(1, 32768 // length)
        right = []
        for start in range(0, count, per_call):
            right += _right(network, items[start : start + per_call], length, device, config)
        results[f"recall-{length}"] = sum(map(sum, right)) / max(1, sum(map(len, right)))
    return results


def _right(
    network: TrainingNetwork, items: list[Encoded], tokens: int, device: torch.device, config: ModelConfig
) -> list[list[bool]]:
    """For each conversation whether each of its answers is right."""
    tokens += -tokens % config.window
    shape = BatchShape(rows=len(items), tokens=tokens, sparse=1.0, replay=0.0, queries=1)
    batch = collate(items, shape, config, random.Random(0))
    batch = _replayed(batch, items, config.window).to(device)
    predicted = network(Context(config, batch)).argmax(-1).cpu()
    results = []
    for row, item in enumerate(items):
        ids = torch.tensor(item.ids[:tokens])
        results.append(
            [
                end <= tokens and bool((predicted[row, begin - 1 : end - 1] == ids[begin:end]).all())
                for begin, end in answers(item.ids, item.answer)
            ]
        )
    return results


def _replayed(batch: Batch, items: list[Encoded], window: int) -> Batch:
    """The decoder starts W tokens before the first answer, as CED prefill of the first turn does."""
    starts = [max(0, answers(item.ids, item.answer)[0][0] - window) for item in items]
    values = dict(batch.__dict__) | {"decoder_start": torch.tensor(starts)}
    return Batch(**values)
