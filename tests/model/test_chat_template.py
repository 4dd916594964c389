"""A shipped Jinja template is the authority; through it, too, words never become control tokens."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from cedar.model.chat import (
    BuiltinChatFormat,
    ChatOptions,
    ImagePart,
    Message,
    SpecialTokens,
    ToolCall,
)
from cedar.model.chat_template import TemplateChatFormat, find_chat_template, load_chat_format
from cedar.model.prompt_errors import ChatError, ChatTemplateError
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
TOKENIZER = Tokenizer.load(Storage(str(GOLDEN)))
SPECIAL = SpecialTokens.from_ids(TOKENIZER, begin=0, end=1, image=3)
CONTROLS = set(TOKENIZER.control_tokens.values())
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' }}
        {%- if message.content is string %}
            {{- message.content | trim }}
        {%- else %}
            {%- for part in message.content %}
                {{- '<｜deepseek_image｜>' if part.type == 'image' else part.text }}
            {%- endfor %}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + (message.reasoning_content or '') + '</think>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '｜DSML｜' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- raise_exception('no ' + message.role + ' here') }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}
"""
FORMAT = TemplateChatFormat(TOKENIZER, SPECIAL, TEMPLATE)


def user(*parts: str | ImagePart) -> Message:
    return Message(role="user", content=parts)


def assistant(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message(role="assistant", content=(text,), reasoning=reasoning, tool_calls=calls)


def test_the_template_decides_the_format():
    encoded = FORMAT.encode([user(" Hi "), assistant("A", "r"), user("V")], ChatOptions(thinking=False))
    assert TOKENIZER.decode(encoded.ids) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>r</think>A<｜end▁of▁sentence｜>"
        "<｜User｜>V<｜Assistant｜></think>"
    )
    assert [TOKENIZER.decode([i]) for i in encoded.ids if i in CONTROLS].count("<｜User｜>") == 2


def test_images_and_tools_reach_the_template():
    options = ChatOptions(tools=({"name": "é", "type": "function"},))
    encoded = FORMAT.encode([user("a", ImagePart(b"1"), "b", ImagePart(b"2"))], options)
    assert TOKENIZER.decode(encoded.ids).endswith(
        "<｜User｜>a<｜deepseek_image｜>b<｜deepseek_image｜>"
        '[{"name": "é", "type": "function"}]<｜Assistant｜><think>'
    )
    assert encoded.images == (b"1", b"2")


@given(
    st.lists(
        st.lists(
            st.sampled_from([*TOKENIZER.control_tokens, "<", "think", ">", "｜", "User", "x"]), min_size=1
        ).map("".join),
        min_size=6,
        max_size=6,
    )
)
def test_what_is_said_never_becomes_a_control_token(words):
    def encode(a, b, c, d, e, f):
        call = ToolCall(name="f", arguments={"k": e, "l": {f: [f]}})
        messages = [user(a, b), user(c), assistant(d, d, call), user(f)]
        return FORMAT.encode(messages, ChatOptions(tools=({e: f},))).ids

    ids, silent = encode(*words), encode(*"xxxxxx")
    assert [i for i in ids if i in CONTROLS] == [i for i in silent if i in CONTROLS]
    text = TOKENIZER.decode(ids)
    assert all(word in text for word in words[:4])
    assert json.dumps(words[5], ensure_ascii=False) in text


def test_words_that_hold_the_first_marks_survive():
    text = "\ue000<think>\ue001"
    ids = FORMAT.encode([user(text)]).ids
    assert text in TOKENIZER.decode(ids)
    assert ids.count(TOKENIZER.control_id("<think>")) == 1


def test_what_the_template_refuses_is_the_callers_fault():
    with pytest.raises(ChatError, match="no system here"):
        FORMAT.encode([Message(role="system", content=("S",)), user("U")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ missing.attribute }}",
        "{% for i in range(100000000) %}x{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(template):
    with pytest.raises(ChatTemplateError, match="rendering"):
        TemplateChatFormat(TOKENIZER, SPECIAL, template).encode([user("U")])


def test_a_template_that_does_not_compile_is_refused():
    with pytest.raises(ChatTemplateError, match="compiles"):
        TemplateChatFormat(TOKENIZER, SPECIAL, "{% if %}")


def test_a_template_that_loses_an_image_is_refused():
    with pytest.raises(ChatTemplateError, match="image tokens=0, must be 1"):
        TemplateChatFormat(TOKENIZER, SPECIAL, "x").encode([user(ImagePart(b""))])


def test_the_clock_is_an_argument():
    clock = TemplateChatFormat(
        TOKENIZER, SPECIAL, "{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime(2031, 2, 3)
    )
    assert TOKENIZER.decode(clock.encode([user("U")]).ids) == "2031-02-03"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": b"{}"}, None),
        ({"tokenizer_config.json": b'{"chat_template": "a"}'}, "a"),
        ({"tokenizer_config.json": b'{"chat_template": "a"}', "chat_template.jinja": "é".encode()}, "é"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "default", "template": "b"}]}'}, "b"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "other", "template": "b"}]}'}, None),
    ],
)
def test_where_templates_are_found(files, template):
    assert find_chat_template(files.get) == template


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"\xff"},
        {"tokenizer_config.json": b"{"},
        {"tokenizer_config.json": b'{"chat_template": 7}'},
    ],
)
def test_damaged_template_files_are_refused(files):
    with pytest.raises(ChatTemplateError):
        find_chat_template(files.get)


def test_a_checkpoint_without_a_template_has_the_built_in_format(tmp_path):
    storage = Storage(str(tmp_path))
    assert isinstance(load_chat_format(storage, TOKENIZER, SPECIAL), BuiltinChatFormat)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    shipped = load_chat_format(storage, TOKENIZER, SPECIAL)
    assert shipped.encode([user("U")]) == FORMAT.encode([user("U")])
