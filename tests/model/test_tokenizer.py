"""Plain text and control tokens never mix; ids and bytes agree with the library's own decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from cedar.model.errors import CheckpointError
from cedar.model.prompt_errors import TokenizerError
from cedar.model.storage import Storage
from cedar.model.tokenizer import Control, Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
SOURCE = (GOLDEN / "tokenizer.json").read_bytes()
TOKENIZER = Tokenizer.load(Storage(str(GOLDEN)))
LIBRARY = tokenizers.Tokenizer.from_buffer(SOURCE)
CONTROL = TOKENIZER.control_tokens


def edited(**changes: object) -> bytes:
    return json.dumps(json.loads(SOURCE) | changes).encode()


def test_golden_prompt_text_gives_its_ids():
    ids = load_file(GOLDEN / "expected.safetensors")["text/input_ids"][0].tolist()
    assert ids[0] == TOKENIZER.control_id("<｜begin▁of▁sentence｜>")
    assert TOKENIZER.encode(TOKENIZER.decode(ids[1:])) == ids[1:]


@given(st.text())
def test_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.sampled_from([*CONTROL, "a", " ", "<", "｜", "think>"])).map("".join))
def test_a_spelled_control_token_stays_text(text):
    ids = TOKENIZER.encode(text)
    assert not set(ids) & set(CONTROL.values())
    assert TOKENIZER.decode(ids) == text


def test_control_tokens_without_the_special_flag_are_control_tokens_too():
    added = [entry | {"special": False} for entry in json.loads(SOURCE)["added_tokens"]]
    tokenizer = Tokenizer.from_json(edited(added_tokens=added))
    assert tokenizer.control_tokens == CONTROL
    assert tokenizer.encode("<think>") == TOKENIZER.encode("<think>")
    assert CONTROL["<think>"] not in tokenizer.encode("<think>")


@given(st.lists(st.integers(0, 639)))
def test_decoding_equals_the_library(ids):
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)
    assert TOKENIZER.decode(ids, control=False) == LIBRARY.decode(ids, skip_special_tokens=True)


@given(st.lists(st.one_of(st.text(), st.sampled_from(list(CONTROL)).map(Control))))
def test_segments_are_text_between_control_tokens(segments):
    ids = TOKENIZER.encode_segments(segments)
    assert TOKENIZER.decode(ids) == "".join(s if isinstance(s, str) else s.token for s in segments)
    wanted = [CONTROL[s.token] for s in segments if isinstance(s, Control)]
    assert [i for i in ids if i in set(CONTROL.values())] == wanted


def test_neighbouring_texts_are_encoded_as_one():
    assert TOKENIZER.encode_segments(["th", "e the"]) == TOKENIZER.encode("the the")


def test_a_lone_surrogate_becomes_a_question_mark():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"


def test_unknown_ids_add_nothing():
    assert TOKENIZER.token_bytes(640) == TOKENIZER.token_bytes(-1) == b""


def test_unknown_control_tokens_are_named():
    with pytest.raises(TokenizerError, match="<nothing>"):
        TOKENIZER.control_id("<nothing>")
    with pytest.raises(TokenizerError, match="id 600"):
        TOKENIZER.control_token(600)
    assert TOKENIZER.control_token(8) == Control("<think>")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json=.*missing"):
        Tokenizer.load(Storage(str(tmp_path)))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "valid JSON"),
        (b"\xff", "valid JSON"),
        (b"[]", "a JSON object"),
        (b"{}", "ByteLevel"),
        (edited(decoder={"type": "WordPiece"}), "ByteLevel"),
        (edited(model={"type": "BPE"}), "tokenizers library"),
        (edited(added_tokens=[7]), "tokenizers library"),
    ],
)
def test_damaged_files_are_refused(data, named):
    with pytest.raises(TokenizerError, match=named):
        Tokenizer.from_json(data)


def test_truncation_and_padding_are_ignored():
    tokenizer = Tokenizer.from_json(
        edited(
            truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            padding={
                "strategy": {"Fixed": 40},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 2,
                "pad_type_id": 0,
                "pad_token": "<｜▁pad▁｜>",
            },
        )
    )
    assert tokenizer.encode("a long enough text") == TOKENIZER.encode("a long enough text")
