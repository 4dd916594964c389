"""From a client's request to ids and spans, and back to text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cedar.actors.errors import InvalidRequest
from cedar.actors.prompts import PromptTools
from cedar.v1.common_pb2 import SamplingParams, TokenIds
from cedar.v1.generation_pb2 import ContentPart, Conversation, GenerateRequest, Message

GOLDEN = Path(__file__).parent.parent / "golden" / "v41-tiny"
IMAGE = (GOLDEN / "image.png").read_bytes()


@pytest.fixture(scope="session")
def tools() -> PromptTools:
    return PromptTools.load(str(GOLDEN))


def test_it_names_the_same_model_as_the_workers(tools: PromptTools, network: Any) -> None:
    assert tools.fingerprint == network.fingerprint
    assert tools.format_id == network.layout.format_id
    assert (tools.page_tokens, tools.page_bytes) == (network.layout.page_tokens, network.layout.page_bytes)
    assert tools.vision
    assert tools.window_tokens == 16


def test_text_ids_and_conversation(tools: PromptTools) -> None:
    text = tools.prepare(GenerateRequest(text="hello there"))
    assert text.ids[0] == 0
    again = tools.prepare(GenerateRequest(token_ids=TokenIds(ids=text.ids)))
    assert list(again.ids) == list(text.ids)
    told = Conversation(messages=[Message(role="user", content=[ContentPart(text="hello there")])])
    chat = tools.prepare(GenerateRequest(conversation=told))
    assert len(chat.ids) > len(text.ids)


def test_an_image_takes_its_span_and_keeps_its_file(tools: PromptTools) -> None:
    parts = [ContentPart(image=IMAGE), ContentPart(text="what is it?")]
    prompt = tools.prepare(
        GenerateRequest(conversation=Conversation(messages=[Message(role="user", content=parts)]))
    )
    (span,) = prompt.images
    assert span.length == span.rows * (span.columns + 1) + 2
    assert set(prompt.ids[span.start : span.start + span.length]) == {3}
    assert prompt.files == {span.content_hash: IMAGE}
    before = tools.prepare(GenerateRequest(text="what is it?", images=[IMAGE, IMAGE]))
    assert [image.start for image in before.images] == [1, 1 + span.length]
    assert len(before.files) == 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GenerateRequest(), "^prompt: one of text, token_ids, conversation must be set$"),
        (GenerateRequest(text=""), "must not be empty"),
        (GenerateRequest(token_ids=TokenIds()), "at least one token"),
        (GenerateRequest(token_ids=TokenIds(ids=[640])), "639"),
        (GenerateRequest(token_ids=TokenIds(ids=[5, 3])), "image"),
        (GenerateRequest(token_ids=TokenIds(ids=[5] * 600)), "context of 512"),
        (GenerateRequest(text="x", images=[b"no image"]), r"^images\[0\]: bytes=.*formats"),
        (GenerateRequest(text="x", images=[IMAGE, b"no image"]), r"^images\[1\]: bytes=.*formats"),
        (GenerateRequest(conversation=Conversation()), "messages"),
        (GenerateRequest(conversation=Conversation(messages=[Message(role="judge")])), "role"),
        (GenerateRequest(text="x", sampling=SamplingParams(temperature=-1)), "temperature"),
        (GenerateRequest(text="x", sampling=SamplingParams(top_p=2)), "top_p"),
        (GenerateRequest(text="x", sampling=SamplingParams(stop_ids=[640])), "stop_ids"),
        (GenerateRequest(text="x", sampling=SamplingParams(stop=[""])), "stop"),
    ],
)
def test_what_is_wrong_is_named(tools: PromptTools, request_: GenerateRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        tools.prepare(request_)


def test_text_is_cut_before_a_stop_string(tools: PromptTools) -> None:
    ids = tools.prepare(GenerateRequest(text="one two three")).ids[1:]
    text = tools.text([" three"])
    assert "".join(map(text.push, ids)) + text.flush() == "one two"
    assert text.stop == " three"
    plain = tools.text()
    assert "".join(map(plain.push, [*ids, 1])) + plain.flush() == "one two three"


def test_the_gateway_needs_no_torch() -> None:
    """Its process starts without the two seconds and the memory that torch takes."""
    script = f"""
import sys
from cedar.actors.prompts import PromptTools
from cedar.v1.common_pb2 import SamplingParams
from cedar.v1.generation_pb2 import GenerateRequest
tools = PromptTools.load({str(GOLDEN)!r})
image = open({str(GOLDEN / "image.png")!r}, "rb").read()
asked = SamplingParams(temperature=0.5, max_tokens=3, stop=["x"])
prompt = tools.prepare(GenerateRequest(text="what is it?", images=[image], sampling=asked))
assert len(prompt.images) == 1
assert tools.text(["x"]).push(prompt.ids[-1])
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
