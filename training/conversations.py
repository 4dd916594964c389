"""Conversations of a wanted length: hidden facts asked for over several turns, mixed with other tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cedar.training.image_tasks import IMAGE_TURNS
from cedar.training.text_tasks import TEXT_TURNS, Span, Turn, filler, make_facts

Measure = Callable[[str], int]
"""Tokens of a text."""

TURN_OVERHEAD = 4  # control tokens of a turn, and room for a border merge


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a training conversation is made of. `facts` hidden at most; `images`: share of picture turns."""

    facts: int = 8
    images: float = 0.25
    text: float = 0.35
    reserve: float = 0.45  # share of the length kept for turns after the first
    plain: float = 0.3  # share of conversations that begin without filler


def hide(rng: random.Random, statements: list[str], tokens: int, measure: Measure) -> str:
    """A text of at most `tokens` tokens with the statements at random places among filler sentences."""
    left = tokens - sum(measure(" " + statement) for statement in statements)
    sentences: list[str] = []
    for sentence in filler(rng):
        left -= measure(" " + sentence)
        if left < 0:
            break
        sentences.append(sentence)
    for statement in statements:
        sentences.insert(rng.randint(0, len(sentences)), statement)
    return " ".join(sentences)


def recall_conversation(
    rng: random.Random, tokens: int, needles: int, questions: int, measure: Measure
) -> list[Turn]:
    """`needles` facts in filler of about `tokens` tokens in all, then `questions` of them, one a turn."""
    facts = make_facts(rng, needles)
    asked = rng.sample(facts, min(questions, needles))
    turns = [fact.turn for fact in asked]
    used = sum(turn_tokens(turn, measure) for turn in turns)
    text = hide(rng, [fact.statement for fact in facts], max(0, tokens - used - TURN_OVERHEAD), measure)
    first = turns[0]
    return [Turn(first.kind, f"{text} {first.question}", first.answer), *turns[1:]]


def training_conversation(
    rng: random.Random, tokens: int, measure: Measure, mixture: Mixture, span: Span
) -> list[Turn]:
    """A conversation that fills `tokens` tokens: mostly facts in filler, then turns until the room is used.

    Every fact is asked for at most once, between other text and picture tasks.
    """
    if rng.random() < mixture.plain:
        return list(_fitting(rng, tokens - TURN_OVERHEAD, measure, mixture, [], span))
    needles = rng.randint(1, mixture.facts)
    facts = make_facts(rng, needles)
    reserve = min(int(tokens * mixture.reserve), 600) if needles else tokens
    text = hide(rng, [fact.statement for fact in facts], max(60, tokens - reserve), measure)
    waiting = [fact.turn for fact in rng.sample(facts, needles)]
    first = waiting.pop()
    turns = [Turn(first.kind, f"{text} {first.question}", first.answer)]
    left = tokens - turn_tokens(turns[0], measure) - TURN_OVERHEAD
    return [*turns, *_fitting(rng, left, measure, mixture, waiting, span)]


def _fitting(
    rng: random.Random, left: int, measure: Measure, mixture: Mixture, waiting: list[Turn], span: Span
) -> Iterator[Turn]:
    """Turns until four in a row would not fit into `left` tokens."""
    misfits = 0
    while misfits < 4:
        turn = _next_turn(rng, mixture, waiting)
        tokens = turn_tokens(turn, measure) + sum(map(span, turn.images))
        if tokens > left:
            misfits += 1
            continue
        left -= tokens
        yield turn


def turn_tokens(turn: Turn, measure: Measure) -> int:
    """Tokens of a turn without its images."""
    return measure(turn.question) + measure(turn.answer) + TURN_OVERHEAD


def _next_turn(rng: random.Random, mixture: Mixture, waiting: list[Turn]) -> Turn:
    """The next question; facts that wait to be asked for are taken out of `waiting`."""
    draw = rng.random()
    if waiting and draw > mixture.images + mixture.text:
        return waiting.pop()
    if draw * (mixture.images + mixture.text) < mixture.images:
        return rng.choice(IMAGE_TURNS)(rng)
    return rng.choice(TEXT_TURNS)(rng)
