"""Seeded text tasks with one right answer each, and the filler that facts are hidden in.

Every generator takes a `random.Random` and is a pure function of its state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cedar.training.words import (
    COLOURS,
    NAMES,
    OBJECTS,
    PLACES,
    REMARKS,
    SUBJECTS,
    THINGS,
    TIMES,
    VERBS,
)
from PIL import Image


@dataclass(frozen=True)
class Turn:
    """One question and its exact answer. Images stand before the question's text."""

    kind: str
    question: str
    answer: str
    images: tuple[Image.Image, ...] = field(default=(), compare=False)


Span = Callable[[Image.Image], int]
"""Prompt positions of an image."""


@dataclass(frozen=True)
class Fact:
    """A sentence to hide, and the question that it answers word for word."""

    statement: str
    question: str

    @property
    def turn(self) -> Turn:
        """The question about it."""
        return Turn("recall", self.question, self.statement)


def make_facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts about `count` different places."""
    return [_fact(rng, place) for place in rng.sample(sorted(set(PLACES)), count)]


def _fact(rng: random.Random, place: str) -> Fact:
    family = rng.random()
    if family < 0.6:
        digits = " ".join(str(rng.randrange(10)) for _ in range(3))
        return Fact(f"The key to the {place} is {digits}.", f"What is the key to the {place}?")
    if family < 0.8:
        return Fact(f"The owner of the {place} is {rng.choice(NAMES)}.", f"Who is the owner of the {place}?")
    return Fact(
        f"The door of the {place} is {rng.choice(COLOURS)}.", f"What colour is the door of the {place}?"
    )


def filler(rng: random.Random) -> Iterator[str]:
    """Sentences without end that state no fact anybody asks for."""
    while True:
        if rng.random() < 0.15:
            yield rng.choice(REMARKS)
            continue
        subject, verb = rng.choice(SUBJECTS), rng.choice(VERBS)
        yield f"The {subject} {verb} the {rng.choice(OBJECTS)} {rng.choice(TIMES)}."


def sum_turn(rng: random.Random) -> Turn:
    """A sum of two numbers up to 20."""
    a, b = rng.randrange(21), rng.randrange(21)
    return Turn("sum", f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.")


def copy_turn(rng: random.Random) -> Turn:
    """A list to repeat."""
    items = " ".join(rng.sample(THINGS, rng.randint(3, 6)))
    return Turn("copy", f"Repeat this list: {items}", f"The list is {items}.")


def continue_turn(rng: random.Random) -> Turn:
    """An arithmetic sequence of small numbers to go on with."""
    start, step = rng.randrange(1, 20), rng.randint(1, 5)
    numbers = [start + step * i for i in range(7)]
    shown, rest = numbers[:4], numbers[4:]
    return Turn(
        "continue",
        f"Continue this list: {' '.join(map(str, shown))}",
        f"Next come {' '.join(map(str, rest))}.",
    )


def sort_turn(rng: random.Random) -> Turn:
    """Three to five digits to sort."""
    digits = rng.sample(range(10), rng.randint(3, 5))
    return Turn(
        "sort",
        f"Sort these numbers: {' '.join(map(str, digits))}",
        f"In order: {' '.join(map(str, sorted(digits)))}.",
    )


def items_turn(rng: random.Random) -> Turn:
    """How many items a list has, one to nine: counted aloud, then said."""
    items = rng.sample(THINGS, rng.randint(1, 9))
    aloud = ", ".join(f"{number} {item}" for number, item in enumerate(items, 1))
    return Turn(
        "items",
        f"How many items are in this list: {' '.join(items)}",
        f"{aloud}: {_plural(len(items), 'item')}.",
    )


def count_turn(rng: random.Random) -> Turn:
    """How often a word stands in a list among others, one to six times: counted aloud, then said."""
    thing, *others = rng.sample(THINGS, 5)
    times = rng.randint(1, 6)
    items = [thing] * times + rng.choices(others, k=rng.randint(0, 3))
    rng.shuffle(items)
    aloud = ", ".join(f"{thing} {number}" for number in range(1, times + 1))
    return Turn(
        "count",
        f"How often does {thing} occur in this list: {' '.join(items)}",
        f"{aloud}: {_plural(times, 'time')}.",
    )


def count_short_turn(rng: random.Random) -> Turn:
    """The same question, answered at once."""
    turn = count_turn(rng)
    return Turn("count at once", turn.question + "?", f"It occurs {turn.answer.split(': ')[1]}")


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


TEXT_TURNS: Final[tuple[Callable[[random.Random], Turn], ...]] = (
    sum_turn,
    copy_turn,
    continue_turn,
    sort_turn,
    items_turn,
    count_turn,
    count_turn,  # the hardest of them
    count_short_turn,
    count_short_turn,
)
