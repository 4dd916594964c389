"""Generated tasks are a pure function of the seed, and their answers are right."""

from __future__ import annotations

import random
from itertools import pairwise

from cedar.training.assets import Assets
from cedar.training.conversations import Mixture, recall_conversation, training_conversation
from cedar.training.image_tasks import TRAIN_DIGITS, compare_turn, digit_image, digit_turn, figure_turn
from cedar.training.text_tasks import (
    continue_turn,
    copy_turn,
    count_turn,
    items_turn,
    make_facts,
    sort_turn,
    sum_turn,
)
from cedar.training.tokenization import WordEncoder, span_measure


def test_the_same_seed_gives_the_same_conversation(narrow: Assets) -> None:
    encode, span = WordEncoder(narrow.tokenizer), span_measure(narrow.config.vision)
    first, second = (
        training_conversation(random.Random(5), 300, encode.measure, Mixture(), span) for _ in range(2)
    )
    assert [(t.kind, t.question, t.answer) for t in first] == [(t.kind, t.question, t.answer) for t in second]
    assert training_conversation(random.Random(6), 300, encode.measure, Mixture(), span) != first


def test_sums_sorts_counts_and_sequences_are_right() -> None:
    rng = random.Random(1)
    for _ in range(200):
        words = sum_turn(rng).answer.rstrip(".").split()
        assert int(words[0]) + int(words[2]) == int(words[4])
        turn = sort_turn(rng)
        asked = turn.question.split(": ")[1].split()
        assert turn.answer.rstrip(".").split(": ")[1].split() == sorted(asked, key=int)
        turn = count_turn(rng)
        word, times = turn.question.split()[3], int(turn.answer.split(": ")[1].split()[0])
        assert turn.question.split(": ")[1].split().count(word) == times
        assert turn.answer.split(": ")[0].split(", ") == [f"{word} {n}" for n in range(1, times + 1)]
        turn = items_turn(rng)
        items = turn.question.split(": ")[1].split()
        aloud, total = turn.answer.split(": ")
        assert [piece.split() for piece in aloud.split(", ")] == [[str(n), i] for n, i in enumerate(items, 1)]
        assert int(total.split()[0]) == len(items)
        turn = continue_turn(rng)
        numbers = [int(n) for n in turn.question.split(": ")[1].split()]
        numbers += [int(n) for n in turn.answer.rstrip(".").split()[2:]]
        assert len({b - a for a, b in pairwise(numbers)}) == 1
        turn = copy_turn(rng)
        assert turn.answer == f"The list is {turn.question.split(': ')[1]}."


def test_recall_hides_each_fact_once_and_asks_for_it(narrow: Assets) -> None:
    encode = WordEncoder(narrow.tokenizer)
    turns = recall_conversation(random.Random(3), 600, 4, 3, encode.measure)
    assert len(turns) == 3
    for turn in turns:
        assert turns[0].question.count(turn.answer) == 1
    assert 480 < sum(encode.measure(t.question) + encode.measure(t.answer) for t in turns) <= 600


def test_facts_are_about_different_places() -> None:
    questions = [fact.question.split()[-1] for fact in make_facts(random.Random(2), 20)]
    assert len(set(questions)) == 20


def test_held_out_digits_are_others_than_the_trained_ones() -> None:
    from sklearn.datasets import load_digits

    labels = load_digits().target
    assert len(labels) - TRAIN_DIGITS == 297
    trained = {digit_image(random.Random(n), False)[0].tobytes() for n in range(200)}
    held = {digit_image(random.Random(n), True)[0].tobytes() for n in range(200)}
    assert trained.isdisjoint(held)
    turn = digit_turn(random.Random(0), True)
    assert turn.images[0].size == (84, 84)
    assert turn.answer.startswith("This is the digit ")


def test_pictures_answer_themselves() -> None:
    rng = random.Random(4)
    assert figure_turn(rng).answer.startswith("This is a ")
    turns = [compare_turn(rng) for _ in range(50)]
    for turn in turns:
        first, second = (part.split()[-1] for part in turn.answer.split(":")[0].split(" and "))
        assert turn.answer.endswith(": the same shape.") == (first == second)
        assert len(turn.images) == 2
    assert {turn.answer.split(": ")[1] for turn in turns} == {"the same shape.", "not the same shape."}
    assert len({image.size for turn in turns for image in turn.images}) > 10
    assert figure_turn(rng, size=(200, 90)).images[0].size == (200, 90)
