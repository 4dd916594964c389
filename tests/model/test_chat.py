"""The built-in prompt format, turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from cedar.model.chat import BuiltinChatFormat, ChatOptions, ImagePart, Message, SpecialTokens, ToolCall
from cedar.model.prompt_errors import ChatError, TokenizerError
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
TOKENIZER = Tokenizer.load(Storage(str(GOLDEN)))
SPECIAL = SpecialTokens.from_ids(TOKENIZER, begin=0, end=1, image=3)
FORMAT = BuiltinChatFormat(TOKENIZER, SPECIAL)
PLAIN = ChatOptions(thinking=False)
BEGIN, END, IMAGE = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜deepseek_image｜>"
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def system(text: str) -> Message:
    return Message(role="system", content=(text,))


def user(*parts: str | ImagePart) -> Message:
    return Message(role="user", content=parts)


def tool(text: str) -> Message:
    return Message(role="tool", content=(text,))


def assistant(text: str, reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=(text,), reasoning=reasoning, tool_calls=calls)


def text_of(messages: list[Message], options: ChatOptions | None = None) -> str:
    return TOKENIZER.decode(FORMAT.encode(messages, options).ids)


def test_plain_mode():
    assert text_of([user("Hi")], PLAIN) == f"{BEGIN}<｜User｜>Hi<｜Assistant｜></think>"
    assert text_of([system("Be kind."), user("Hi")], PLAIN) == (
        f"{BEGIN}<｜System｜>Be kind.<｜User｜>Hi<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(("effort", "number"), [("low", 50), ("high", 75), ("max", 100)])
def test_thinking_mode(effort, number):
    options = ChatOptions(effort=effort)
    head = f"{BEGIN}<｜System｜>{EFFORT.format(number)}"
    assert text_of([user("Hi")], options) == f"{head}<｜User｜>Hi<｜Assistant｜><think>"
    assert text_of([system("S"), user("Hi")], options) == f"{head}S<｜User｜>Hi<｜Assistant｜><think>"


def test_thinking_with_high_effort_is_the_default():
    assert text_of([user("Hi")]) == text_of([user("Hi")], ChatOptions(thinking=True, effort="high"))


def test_structure_is_control_tokens():
    ids = FORMAT.encode([system("S"), user("U"), assistant("A", ""), user("V")], PLAIN).ids
    control = [TOKENIZER.decode([i]) for i in ids if i in set(TOKENIZER.control_tokens.values())]
    assert control == [
        BEGIN,
        "<｜System｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "</think>",
        END,
        "<｜User｜>",
        "<｜Assistant｜>",
        "</think>",
    ]


@pytest.mark.parametrize("reasoning", ["because", ""])
@pytest.mark.parametrize("options", [PLAIN, ChatOptions()])
def test_reasoning_of_earlier_turns_is_dropped(reasoning, options):
    messages = [user("U"), assistant("A", reasoning), user("V")]
    assert f"<｜User｜>U<｜Assistant｜></think>A{END}<｜User｜>V<｜Assistant｜>" in text_of(messages, options)


def test_reasoning_inside_the_content_is_separated_unless_it_was_already():
    ending = f"</think>A{END}"
    for content in ("because</think>A", "<think>because</think>A"):
        assert f"<｜Assistant｜>{ending}" in text_of([user("U"), assistant(content), user("V")])
    spelled = text_of([user("U"), assistant("because</think>A", ""), user("V")])
    assert f"<｜Assistant｜></think>because{ending}" in spelled


def test_tool_calls_and_results_keep_the_reasoning():
    call = ToolCall(name="find", arguments={"what": 'a "b" <c>', "limit": 3, "deep": {"é": [True, None]}})
    other = ToolCall(name="stop", arguments={})
    messages = [
        user("U"),
        assistant("Looking.", "hm", call, other),
        tool("r1"),
        tool("r2"),
        user("and?"),
        assistant("A"),
        user("V"),
    ]
    assert text_of(messages) == (
        f"{BEGIN}<｜System｜>{EFFORT.format(75)}<｜User｜>U<｜Assistant｜><think>hm</think>Looking.\n\n"
        "<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="find">\n'
        '<｜DSML｜ parameter name="what" string="true">a "b" <c></｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="limit" string="false">3</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="deep" string="false">{"é": [true, null]}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="stop">\n'
        "</｜DSML｜ invoke>\n"
        f"</｜DSML｜ calls>{END}"
        "<｜User｜><tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>\n\nand?"
        f"<｜Assistant｜><think></think>A{END}<｜User｜>V<｜Assistant｜><think>"
    )
    assert "hm" not in text_of(messages, PLAIN)


def test_parts_are_joined_by_a_blank_line_and_images_come_in_order():
    first, second = ImagePart(b"one"), ImagePart(b"two")
    encoded = FORMAT.encode([user("Look:", first, "here"), assistant("A"), user(second)], PLAIN)
    assert TOKENIZER.decode(encoded.ids) == (
        f"{BEGIN}<｜User｜>Look:\n\n{IMAGE}\n\nhere<｜Assistant｜></think>A{END}"
        f"<｜User｜>{IMAGE}<｜Assistant｜></think>"
    )
    assert encoded.images == (b"one", b"two")
    assert encoded.ids.count(3) == 2


def test_messages_of_one_side_in_a_row_are_one_turn():
    assert text_of([user("U"), user("V")], PLAIN) == text_of([user("U", "V")], PLAIN)
    two = [system("S"), system("T"), user("U")]
    assert text_of(two, PLAIN) == f"{BEGIN}<｜System｜>S\n\nT<｜User｜>U<｜Assistant｜></think>"


@given(st.lists(st.sampled_from([*TOKENIZER.control_tokens, "x", "\n"]), min_size=1).map("".join))
def test_what_is_said_never_becomes_a_control_token(text):
    call = ToolCall(name="f", arguments={"k": text, "l": [text]})
    said = [system(text), user(text), assistant(text, text, call), tool(text), user(text)]
    silent = [
        system("x"),
        user("x"),
        assistant("x", "x", ToolCall(name="f", arguments={"k": "x", "l": ["x"]})),
    ]
    silent += [tool("x"), user("x")]
    controls = set(TOKENIZER.control_tokens.values())
    for options in (PLAIN, ChatOptions()):
        structure = [i for i in FORMAT.encode(silent, options).ids if i in controls]
        assert [i for i in FORMAT.encode(said, options).ids if i in controls] == structure


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "at least one message"),
        ([assistant("A")], r"messages\[0\]\.role='assistant'.*for the last"),
        ([system("S")], "for the last"),
        ([user("U"), system("S")], r"messages\[1\]\.role='system'.*before every other role"),
        ([Message(role="boss", content=("x",))], "'boss'"),
        ([Message(role="system", content=(ImagePart(b""),)), user("U")], "text only for role 'system'"),
        ([Message(role="user", content=("x",), reasoning="r")], "an assistant to have reasoning"),
        ([user("U"), assistant("A", "", ToolCall(name='f"', arguments={})), user("V")], "tool_calls.*quotes"),
        ([user("U"), assistant("A", "", ToolCall(name="f", arguments={"<": 1})), user("V")], "tool_calls"),
    ],
)
def test_conversations_without_a_meaning_are_refused(messages, named):
    with pytest.raises(ChatError, match=named):
        FORMAT.encode(messages)


def test_tools_need_a_template():
    with pytest.raises(ChatError, match="tools"):
        FORMAT.encode([user("U")], ChatOptions(tools=({"name": "f"},)))


def test_ids_that_are_no_control_tokens_are_refused():
    with pytest.raises(TokenizerError, match="id 500"):
        SpecialTokens.from_ids(TOKENIZER, begin=0, end=1, image=500)
