"""The small model's tokenizer and chat template, and conversations as ids (spec §12).

A byte-level BPE trained on generated text. `WordEncoder` gives the ids of `tokenizers`, piece by piece from a
cache: the pre-tokenizer cuts text the same way wherever it stands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import tokenizers
from cedar.model.config import VisionConfig
from cedar.model.images import plan_image
from cedar.training.checkpoint_config import ASSISTANT, BEGIN, END, IMAGE, SPECIAL_TOKENS, USER, VOCAB_SIZE
from cedar.training.image_tasks import IMAGE_TURNS
from cedar.training.text_tasks import TEXT_TURNS, Span, Turn, filler, make_facts
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}<｜System｜>
{%- elif message.role == 'user' -%}<｜User｜>
{%- elif message.role == 'assistant' -%}<｜Assistant｜>
{%- else -%}{{ raise_exception('this model takes system, user and assistant messages only') }}
{%- endif -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<｜deepseek_image｜>{%- endif -%}
{%- endfor -%}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<｜Assistant｜>{%- endif -%}
"""

CORPUS_ROUNDS: Final = 1500


def corpus(seed: int, rounds: int = CORPUS_ROUNDS) -> Iterator[str]:
    """Generated text for the tokenizer: filler, facts, and every kind of turn."""
    rng = random.Random(seed)
    sentences = filler(rng)
    for _ in range(rounds):
        yield " ".join(next(sentences) for _ in range(4))
        turns = [make(rng) for make in dict.fromkeys(TEXT_TURNS)]
        turns += [fact.turn for fact in make_facts(rng, 3)]
        turns += [make(rng, True) for make in IMAGE_TURNS] if rng.random() < 0.05 else []
        for turn in turns:
            yield turn.question
            yield turn.answer


def train_tokenizer(seed: int = 0, rounds: int = CORPUS_ROUNDS) -> tokenizers.Tokenizer:
    """The tokenizer, a pure function of the seed."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, rounds), trainer)
    return tokenizer


class WordEncoder:
    """Text to ids with a cache of pieces."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cut = tokenizer.pre_tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids of plain text."""
        known = self._known
        words = text.split(" ")
        ids: list[int] = []
        for number, word in enumerate(words):
            piece = f" {word}" if number else word
            if piece not in known:
                known[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
            ids += known[piece]
        return ids

    def measure(self, text: str) -> int:
        """Tokens of a text."""
        return len(self(text))


@dataclass(frozen=True)
class Encoded:
    """A conversation as ids, each image over its span; `answer` marks tokens to be predicted.

    `spans` hold the first position of every image, in the order of `images`.
    """

    ids: list[int]
    answer: list[bool]
    spans: list[int]
    images: list[Image.Image]


def span_measure(vision: VisionConfig | None) -> Span:
    """The positions that serving gives an image of a size."""
    assert vision is not None

    @cache
    def span(size: tuple[int, int]) -> int:
        return plan_image(*size, vision).span_length

    return lambda image: span(image.size)


def encode_conversation(turns: Sequence[Turn], encode: WordEncoder, span: Span) -> Encoded:
    """As the chat template writes it, every answer followed by the end token."""
    out = Encoded([BEGIN], [False], [], [])

    def add(ids: Sequence[int], answer: bool) -> None:
        out.ids.extend(ids)
        out.answer.extend([answer] * len(ids))

    for turn in turns:
        add([USER], False)
        for image in turn.images:
            out.spans.append(len(out.ids))
            out.images.append(image)
            add([IMAGE] * span(image), False)
        add(encode(turn.question), False)
        add([ASSISTANT], False)
        add([*encode(turn.answer), END], True)
    return out
