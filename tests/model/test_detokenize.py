"""Any text, cut anywhere into tokens, with any stop strings, gives what the whole text gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from cedar.model.detokenize import Detokenizer, StopMatcher, cut_at_stop
from cedar.model.prompt_errors import SamplingError
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
TOKENIZER = Tokenizer.load(Storage(str(GOLDEN)))
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(640) if len(TOKENIZER.token_bytes(i)) == 1}

few_letters = st.text("ab é👍", max_size=24)
stop_lists = st.lists(st.text("ab é👍", min_size=1, max_size=5), max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule letter by letter: the first end at which any stop string is complete, there the longest."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, None


def run(detokenizer: Detokenizer, ids: list[int]) -> str:
    out = []
    for token_id in ids:
        out.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            break
    return "".join(out) + detokenizer.flush()


@given(few_letters, stop_lists)
def test_the_rule_on_a_whole_text(text, stops):
    assert cut_at_stop(text, stops) == brute_force(text, stops)


@given(st.data(), few_letters, stop_lists)
@example(None, "aab", ["ab"])
def test_any_split_of_text_matches_alike(data, text, stops):
    matcher = StopMatcher(stops)
    at = 0
    out = ""
    while at < len(text):
        step = data.draw(st.integers(1, 4)) if data is not None else 1
        out += matcher.push(text[at : at + step])
        at += step
    assert (out + matcher.flush(), matcher.stop) == brute_force(text, stops)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_byte_by_byte_equals_the_whole_text(text, stops):
    ids = [BYTE_IDS[bytes([b])] for b in text.encode()]
    detokenizer = Detokenizer(TOKENIZER, stops)
    assert (run(detokenizer, ids), detokenizer.stop) == cut_at_stop(text, stops)


@given(
    st.lists(st.integers(0, 639), max_size=30), st.lists(st.text("abet ", min_size=1, max_size=3), max_size=3)
)
def test_any_ids_equal_the_whole_decoding(ids, stops):
    detokenizer = Detokenizer(TOKENIZER, stops)
    assert (run(detokenizer, ids), detokenizer.stop) == cut_at_stop(TOKENIZER.decode(ids), stops)


@given(st.text(max_size=20))
def test_no_half_character_is_ever_given(text):
    detokenizer = Detokenizer(TOKENIZER)
    given_so_far = ""
    for byte in text.encode():
        given_so_far += detokenizer.push(BYTE_IDS[bytes([byte])])
        assert text.startswith(given_so_far)
    assert given_so_far == text
    assert detokenizer.flush() == ""


@given(few_letters, stop_lists)
def test_only_what_may_become_a_stop_string_is_held(text, stops):
    matcher = StopMatcher(stops)
    out = ""
    for n, letter in enumerate(text, start=1):
        out += matcher.push(letter)
        if matcher.stop is not None:
            return
        held = text[len(out) : n]
        assert out + held == text[:n]
        assert not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)


def test_an_unfinished_character_is_replaced_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, ["\ufffd!"])
    for byte in "é".encode()[:1]:
        assert detokenizer.push(BYTE_IDS[bytes([byte])]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_hidden_tokens_add_nothing():
    end = TOKENIZER.control_id("<｜end▁of▁sentence｜>")
    shown, hidden = Detokenizer(TOKENIZER), Detokenizer(TOKENIZER, hidden=[end])
    assert shown.push(end) == "<｜end▁of▁sentence｜>"
    assert hidden.push(end) == ""


def test_nothing_follows_a_stop_string():
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.stop == "b"
    assert matcher.push("more") == matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(SamplingError, match="stop"):
        StopMatcher([""])
