"""The small tokenizer, and conversations exactly as serving builds them."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from cedar.model.chat import ImagePart, Message
from cedar.model.prompt import PromptFormat
from cedar.training.assets import Assets
from cedar.training.conversations import Mixture, training_conversation
from cedar.training.draft import DraftStages
from cedar.training.export import export_checkpoint
from cedar.training.image_tasks import compare_turn, figure_turn
from cedar.training.network import TrainingNetwork
from cedar.training.text_tasks import sum_turn
from cedar.training.tokenization import WordEncoder, encode_conversation, span_measure, train_tokenizer


@pytest.fixture(scope="module")
def checkpoint(narrow: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    weights = dict(TrainingNetwork(narrow.config, narrow.compressed).state_dict())
    weights |= DraftStages(narrow.config).state_dict()
    export_checkpoint(folder, narrow.published, weights, narrow.tokenizer)
    return folder


def test_training_the_tokenizer_twice_gives_one_tokenizer() -> None:
    assert train_tokenizer(3, 100).to_str() == train_tokenizer(3, 100).to_str()


def test_pieces_give_the_ids_of_the_whole_text(narrow: Assets) -> None:
    encode, span = WordEncoder(narrow.tokenizer), span_measure(narrow.config.vision)
    for seed in range(20):
        for turn in training_conversation(random.Random(seed), 300, encode.measure, Mixture(), span):
            for text in (turn.question, turn.answer):
                assert encode(text) == narrow.tokenizer.encode(text, add_special_tokens=False).ids


def test_any_text_survives(narrow: Assets) -> None:
    text = "Zürich, 東京 and a tab\t."
    assert narrow.tokenizer.decode(narrow.tokenizer.encode(text).ids) == text


def test_training_ids_are_what_serving_sends(narrow: Assets, checkpoint: Path) -> None:
    form = PromptFormat.open(str(checkpoint))
    rng = random.Random(9)
    turns = [figure_turn(rng), compare_turn(rng, size=(200, 130)), sum_turn(rng)]
    span = span_measure(narrow.config.vision)
    encoded = encode_conversation(turns, WordEncoder(narrow.tokenizer), span)
    messages: list[Message] = []
    for turn in turns:
        parts: list[str | ImagePart] = []
        for image in turn.images:
            file = io.BytesIO()
            image.save(file, "PNG")
            parts.append(ImagePart(file.getvalue()))
        messages.append(Message(role="user", content=(*parts, turn.question)))
        messages.append(Message(role="assistant", content=(turn.answer,), reasoning=""))
    chat = form.encode_chat(messages[:-1])
    prompt = form.build(chat.ids, chat.images)
    assert prompt.ids == encoded.ids[: len(prompt.ids)]
    rest = encoded.ids[len(prompt.ids) :]
    assert narrow.tokenizer.decode(rest) == turns[-1].answer
    assert rest[-1] == form.config.eos_token_id
