"""Marks break every spelling, within a text and across its ends, and leave other text alone."""

from __future__ import annotations

from cedar.model.spelling import SpellingGuard, spelling_pattern
from hypothesis import given
from hypothesis import strategies as st

TOKENS = ["<a>", "</a>", "<｜User｜>", "<｜Username｜>", "｜D｜", "<｜place▁no▁1｜>", "<｜place▁no▁2｜>"]
GUARD = SpellingGuard(TOKENS)
MARK = "\ue000"

pieces = st.lists(
    st.sampled_from([*TOKENS, "<", ">", "a", "/", "｜", "User", "D", " ", "\n", "<｜User"]), max_size=5
)
texts = pieces.map("".join)


def test_the_pattern_is_leftmost_and_longest():
    found = spelling_pattern(["<a", "<ab", "<abcdefg>", "<abcdefgh", "x"]).findall(
        "<abcdefgh <ab <a x<abcdefg>"
    )
    assert found == ["<abcdefgh", "<ab", "<a", "x", "<abcdefg>"]


def test_no_spellings_match_nothing():
    assert spelling_pattern([]).findall("anything") == []
    assert SpellingGuard([]).mark("anything", MARK) == "anything"


@given(st.sampled_from(TOKENS), st.data())
def test_a_token_split_over_a_template_and_guarded_text_is_broken(token, data):
    start = data.draw(st.integers(0, len(token) - 1))
    end = data.draw(st.integers(start + 1, len(token)))
    space = data.draw(st.sampled_from(["", " ", "\n"]))
    guarded = GUARD.mark(space + token[start:end] + space, MARK)
    assert token not in token[:start] + guarded + token[end:]
    assert token not in token[:start] + guarded.strip() + token[end:]


@given(texts, texts, texts)
def test_no_token_takes_a_character_from_guarded_text(before, text, after):
    """Whatever stands around it, a token that is found lies wholly outside the guarded text."""
    guarded = GUARD.mark(text, MARK)
    whole = before + guarded + after
    core = guarded.strip()
    start = len(before) + guarded.find(core)
    for match in spelling_pattern(TOKENS).finditer(whole):
        assert not core or match.end() <= start or match.start() >= start + len(core)


@given(texts, texts, texts)
def test_two_guarded_texts_together_hold_no_token(first, second, third):
    joined = "".join(GUARD.mark(text, MARK) for text in (first, second, third))
    assert not spelling_pattern(TOKENS).search(joined)


@given(texts)
def test_only_marks_are_added_and_the_ends_can_still_be_trimmed(text):
    guarded = GUARD.mark(text, MARK)
    assert guarded.replace(MARK, "") == text
    assert guarded.strip().replace(MARK, "") == text.strip()


@given(st.text("bxyz =.\n", max_size=30))
def test_text_near_no_token_is_untouched(text):
    assert GUARD.mark(text, MARK) == text
