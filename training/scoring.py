"""Teacher-forced accuracy of the differentiable network: many questions a forward, every way of serving.

An answer counts when every token of it, the end token included, is the likeliest one. Greedy decoding gives
the same answers: a wrong token ends the comparison either way.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import tokenizers
import torch
from cedar.model.schedule import default_page_tokens
from cedar.training.batches import BatchShape, collate
from cedar.training.cases import Case, recall_cases, task_cases
from cedar.training.context import Batch, Context, Loaded
from cedar.training.network import TrainingNetwork
from cedar.training.tokenization import Encoded, WordEncoder, encode_conversation, span_measure
from cedar.training.ways import WAYS, Way

_FORWARD_TOKENS: Final = 32768  # of one forward


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


def score(
    network: TrainingNetwork,
    tokenizer: tokenizers.Tokenizer,
    lengths: dict[int, int],
    *,
    seed: int,
    device: torch.device,
    singles: int = 32,
) -> dict[str, float]:
    """Share of right answers by task, `singles` questions each, and of recall by length with `lengths` giving
    how many prompts of each. Selection and decoder replay are on, as in serving.
    """
    measure = WordEncoder(tokenizer).measure
    cases = [*task_cases(singles, 0, measure, seed)]
    for length, count in lengths.items():
        cases += recall_cases(length, count, measure, seed)
    tally: dict[str, list[bool]] = defaultdict(list)
    (rights,) = judge(network, tokenizer, cases, WAYS[:1], device)
    for case, right in zip(cases, rights, strict=True):
        tally[case.task].append(right)
    return {task: sum(each) / len(each) for task, each in tally.items()}


@torch.no_grad()
def judge(
    network: TrainingNetwork,
    tokenizer: tokenizers.Tokenizer,
    cases: Sequence[Case],
    ways: Sequence[Way],
    device: torch.device,
) -> list[list[bool]]:
    """For each way, whether the network would answer each case's last question right when served in that way.

    A window record continues exactly, and so does an exact replay: both are the cold prompt here.
    """
    encode, span = WordEncoder(tokenizer), span_measure(network.config.vision)
    items = [encode_conversation(case.turns, encode, span) for case in cases]
    rights = [[False] * len(items) for _ in ways]
    for tokens, numbers in _together(items, network.config.window):
        together = [items[number] for number in numbers]
        shape = BatchShape(rows=len(together), tokens=tokens, sparse=1.0, replay=0.0, queries=1)
        batch = collate(together, shape, network.config, random.Random(0)).to(device)
        asked = [answers(item.ids, item.answer)[-1] for item in together]
        prompts = torch.tensor([begin for begin, _ in asked], device=device)
        for place, way in enumerate(ways):
            predicted = _predicted(network, batch, prompts, way)
            for row, (number, (begin, end)) in enumerate(zip(numbers, asked, strict=True)):
                said = predicted[row, begin - 1 : end - 1].tolist()
                rights[place][number] = said == items[number].ids[begin:end]
    return rights


def _together(items: Sequence[Encoded], window: int) -> Iterator[tuple[int, list[int]]]:
    """Padded length and numbers of the items of each forward."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        by_length[-(-len(item.ids) // window) * window].append(number)
    for tokens, numbers in sorted(by_length.items()):
        rows = max(1, _FORWARD_TOKENS // tokens)
        for start in range(0, len(numbers), rows):
            yield tokens, numbers[start : start + rows]


def _predicted(network: TrainingNetwork, batch: Batch, prompts: torch.Tensor, way: Way) -> torch.Tensor:
    """int64 [B, T] on the CPU: the likeliest next token everywhere. `prompts` int64 [B]: tokens of each."""
    config = network.config
    if way.replay:
        batch = replace(batch, decoder_start=(prompts - config.window).clamp_min(0))
    page = default_page_tokens(config)
    hit = (prompts * way.hit).long() // page * page
    loaded = None
    if hit.any() and not (way.record or way.exact):
        before = Context(config, batch, pool=way.pool, packed=way.packed)
        network(before)
        loaded = Loaded(hit=hit, written=before.written)
        batch = replace(batch, encoder_start=(hit - config.window).clamp_min(0))
    context = Context(config, batch, pool=way.pool, packed=way.packed, loaded=loaded)
    return network(context).argmax(-1).cpu()


def rows(
    network: TrainingNetwork,
    tokenizer: tokenizers.Tokenizer,
    cases: Iterable[Case],
    ways: Sequence[Way],
    device: torch.device,
) -> Iterator[tuple[str, str, int, int]]:
    """(task, way, right, asked) for each task of the cases in each way."""
    by_task: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_task[case.task].append(case)
    for task, same in by_task.items():
        for way, rights in zip(ways, judge(network, tokenizer, same, ways, device), strict=True):
            yield task, way.name, sum(rights), len(same)
