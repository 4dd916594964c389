"""Questions with one right answer each, on which a checkpoint is judged: recall by length, and every task.

Drawn from seeds that training never uses, digits from held-out images.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from cedar.training.conversations import Measure, recall_conversation
from cedar.training.image_tasks import DIGIT_LONGEST, IMAGE_TURNS, LONGEST, digit_turn, draw_size
from cedar.training.text_tasks import TEXT_TURNS, Turn

SEED: Final = 977


@dataclass(frozen=True)
class Case:
    """A conversation whose last answer is asked for; the answers before it are given."""

    task: str
    turns: list[Turn]


def recall_cases(length: int, count: int, measure: Measure, seed: int = SEED) -> Iterator[Case]:
    """Recall with one to four needles; every second case asks for the last of several turns."""
    rng = random.Random(seed + length)
    for number in range(count):
        needles = 1 + number % 4
        questions = needles if number % 2 else 1
        turns = recall_conversation(rng, length - 8, needles, questions, measure)
        yield Case(f"recall {length}", turns)


def task_cases(count: int, opening: int, measure: Measure, seed: int = SEED) -> Iterator[Case]:
    """Every other task; with `opening` tokens, after a first turn of that length about something else.

    Pictures are asked about at 84 x 84 pixels and, under a name that says so, at other sizes.
    """
    rng = random.Random(seed)
    place = "later turn" if opening else "first turn"
    for make, note in _makers():
        for _ in range(count):
            turn = make(rng)
            before = recall_conversation(rng, opening, 1, 1, measure) if opening else []
            yield Case(f"{turn.kind}{note}, {place}", [*before, turn])


def _makers() -> Iterator[tuple[Callable[[random.Random], Turn], str]]:
    for make in dict.fromkeys(TEXT_TURNS):
        yield make, ""
    for draw in dict.fromkeys(IMAGE_TURNS):
        yield partial(draw, held_out=True), ""
    for draw in dict.fromkeys(IMAGE_TURNS):
        yield partial(_drawn, draw), " of any size"


def _drawn(draw: Callable[..., Turn], rng: random.Random) -> Turn:
    longest = DIGIT_LONGEST if draw is digit_turn else LONGEST
    turn: Turn = draw(rng, True, draw_size(rng, smallest=0.0, longest=longest))
    return turn
