"""Conversations survive a file exactly; broken files are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from cedar.ops.conversation_file import ConversationFile, Turn
from cedar.ops.exits import CommandError
from hypothesis import given
from hypothesis import strategies as st

PARTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.binary(), max_size=4)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PARTS), max_size=5)


@given(TURNS)
def test_what_is_saved_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, list[str]]]
) -> None:
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    conversation = ConversationFile.open(path)
    for role, content in turns:
        conversation.add(role, *content)
    conversation.save()
    assert ConversationFile.open(path).turns == [Turn(role, tuple(content)) for role, content in turns]
    assert list(path.parent.iterdir()) == [path]


def test_plain_text_content_written_by_hand_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text('[{"role": "user", "content": "hello"}]')
    assert ConversationFile.open(path).turns == [Turn("user", ("hello",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "a list of turns"),
        ("[1]", "turn 0"),
        ('[{"role": "king", "content": ""}]', "king"),
        ('[{"role": "user"}]', "content"),
        ('[{"role": "user", "content": [{"image": "?"}]}]', "base64"),
        ('[{"role": "user", "content": [{"sound": "x"}]}]', "a part is"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(CommandError, match=message) as raised:
        ConversationFile.open(path)
    assert str(path) in str(raised.value)


def test_without_a_path_nothing_is_written() -> None:
    conversation = ConversationFile.open(None)
    conversation.add("user", "hello")
    conversation.save()
