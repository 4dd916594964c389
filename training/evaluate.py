"""Accuracy of a checkpoint by task, length and way of serving.

Every number is right answers over questions asked; an answer is right when it is the expected one to the last
character and ends there. Prompts are drawn from a seed that training never used, digits from held-out images.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cedar.model.network import Network
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from cedar.training.checkpoint_config import END
from cedar.training.conversations import recall_conversation
from cedar.training.image_tasks import compare_turn, digit_turn, figure_turn
from cedar.training.serving import Way, answer, load, prompt_of
from cedar.training.text_tasks import TEXT_TURNS, Turn
from cedar.training.tokenization import WordEncoder, encode_conversation

SEED = 977
_ROOM = 24  # tokens an answer may have


@dataclass(frozen=True)
class Case:
    """A conversation whose last answer is asked for; the answers before it are given."""

    task: str
    turns: list[Turn]


def recall_cases(length: int, count: int, measure: Callable[[str], int]) -> Iterator[Case]:
    """Recall with one to four needles; every second case asks for the last of several turns."""
    rng = random.Random(SEED + length)
    for number in range(count):
        needles = 1 + number % 4
        questions = needles if number % 2 else 1
        turns = recall_conversation(rng, length - 8, needles, questions, measure)
        yield Case(f"recall {length}", turns)


def task_cases(count: int, opening: int, measure: Callable[[str], int]) -> Iterator[Case]:
    """Every other task; with `opening` tokens, after a first turn of that length about something else."""
    rng = random.Random(SEED)
    makers: list[Callable[[random.Random], Turn]] = list(dict.fromkeys(TEXT_TURNS))
    makers += [lambda r, make=make: make(r, True) for make in (digit_turn, figure_turn, compare_turn)]  # type: ignore[misc]
    for make in makers:
        for _ in range(count):
            turn = make(rng)
            before = recall_conversation(rng, opening, 1, 1, measure) if opening else []
            name = f"{turn.kind}, later turn" if opening else f"{turn.kind}, first turn"
            yield Case(name, [*before, turn])


def run_case(network: Network, tokenizer: Tokenizer, case: Case, way: Way) -> bool:
    """Whether the network answers the case's last question right."""
    span = 8 if not any(turn.images for turn in case.turns) else _span(network, case)
    encoded = encode_conversation(case.turns, WordEncoder(tokenizer.backend), span)
    wanted = [*tokenizer.encode(case.turns[-1].answer), END]
    prompt = prompt_of(network, encoded, len(encoded.ids) - len(wanted))
    return answer(network, prompt, way, _ROOM) == wanted


def _span(network: Network, case: Case) -> int:
    image = next(image for turn in case.turns for image in turn.images)
    return network.prepare(image).plan.span_length


def evaluate(
    folder: Path, lengths: dict[int, int], tasks: int, ways: Sequence[Way], device: str = "cpu"
) -> Iterator[tuple[str, str, int, int]]:
    """(task, way, right, asked) as they become known. `lengths`: recall cases of each length."""
    tokenizer = Tokenizer.load(Storage(str(folder)))
    measure = WordEncoder(tokenizer.backend).measure
    networks = {pool: load(folder, pool=pool, device=device) for pool in {way.pool for way in ways}}
    jobs: list[tuple[list[Case], Sequence[Way]]] = []
    for opening in (0, 160) if tasks else ():
        cases = list(task_cases(tasks, opening, measure))
        jobs += [
            ([c for c in cases if c.task == name], ways[:1]) for name in dict.fromkeys(c.task for c in cases)
        ]
    jobs += [(list(recall_cases(length, count, measure)), ways) for length, count in lengths.items()]
    for cases, asked in jobs:
        for way in asked:
            right = sum(run_case(networks[way.pool], tokenizer, case, way) for case in cases)
            yield cases[0].task, way.name, right, len(cases)
