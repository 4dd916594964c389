"""A conversation to prompt ids in the model's own format (spec §12), and the records every format takes.

What a message says is plain text: a control token spelled in it stays characters. Every image is one image
token here; `prompt.py` spreads it over its span. A checkpoint's own template is `chat_template.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from cedar.model.prompt_errors import ChatError
from cedar.model.tokenizer import Control, Segment, Tokenizer

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "high", "max"]

ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant", "tool")
EFFORTS: Final[Mapping[Effort, int]] = {"low": 50, "high": 75, "max": 100}

_SYSTEM, _USER, _ASSISTANT = Control("<｜System｜>"), Control("<｜User｜>"), Control("<｜Assistant｜>")
_THINK, _THOUGHT = Control("<think>"), Control("</think>")
_DSML = Control("｜DSML｜")
_EFFORT_TEXT: Final = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
_BLANK_LINE: Final = "\n\n"


@dataclass(frozen=True, eq=False)
class ImagePart:
    """An image inside a message: the bytes of its file."""

    data: bytes


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call an assistant turn made; argument values are JSON values."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. `content` parts are texts and images; only a user's message may hold images.

    `reasoning` of an assistant: None says that it was not separated, and then everything in the content up
    to the first `</think>` is taken as reasoning; the empty string says that there was none.
    """

    role: Role
    content: tuple[str | ImagePart, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How the reply is asked for. `effort` counts in thinking mode; `tools` describe functions in JSON."""

    thinking: bool = True
    effort: Effort = "high"
    tools: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class EncodedChat:
    """Prompt ids with one image token for each image, and the images in the order of those tokens."""

    ids: list[int]
    images: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokens that the config names by id."""

    begin: Control
    end: Control
    image: Control

    @classmethod
    def from_ids(cls, tokenizer: Tokenizer, *, begin: int, end: int, image: int) -> SpecialTokens:
        """Looks the three ids up. Raises `TokenizerError` when one is not a control token."""
        token = tokenizer.control_token
        return cls(begin=token(begin), end=token(end), image=token(image))


class ChatFormat(Protocol):
    """Turns a conversation into a prompt that ends where the assistant's reply begins."""

    def encode(self, messages: Sequence[Message], options: ChatOptions | None = None) -> EncodedChat:
        """Raises `ChatError` naming what the format cannot express."""
        ...


class BuiltinChatFormat:
    """The model's own prompt format, for checkpoints that ship no template."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def encode(self, messages: Sequence[Message], options: ChatOptions | None = None) -> EncodedChat:
        """Prompt ids that end where the assistant's reply begins. Raises `ChatError` naming the message."""
        options = options or ChatOptions()
        check_messages(messages)
        if options.tools:
            raise ChatError(
                "tools", f"{len(options.tools)} tools", "none: describe tools in the system message"
            )
        segments, images = self._segments([separate_reasoning(m) for m in messages], options)
        return EncodedChat(self._tokenizer.encode_segments(segments), tuple(images))

    def _segments(
        self, messages: Sequence[Message], options: ChatOptions
    ) -> tuple[list[Segment], list[bytes]]:
        segments: list[Segment] = [self._special.begin]
        images: list[bytes] = []
        system = [m for m in messages if m.role == "system"]
        if options.thinking or system:
            segments.append(_SYSTEM)
        if options.thinking:
            segments.append(_EFFORT_TEXT.format(EFFORTS[options.effort]))
        if system:
            segments.append(_BLANK_LINE.join(map(plain_text, system)))
        keep_reasoning = options.thinking and any(m.tool_calls or m.role == "tool" for m in messages)
        previous: Role = "system"
        for message in messages[len(system) :]:
            if message.role == "assistant":
                segments += [_ASSISTANT, *_reply(message, keep_reasoning), self._special.end]
            else:
                segments.append(_BLANK_LINE if previous in ("user", "tool") else _USER)
                segments += self._turn(message, images)
            previous = message.role
        segments += [_ASSISTANT, _THINK if options.thinking else _THOUGHT]
        return segments, images

    def _turn(self, message: Message, images: list[bytes]) -> list[Segment]:
        """A user's or a tool's content, parts joined by a blank line; its images are appended to `images`."""
        segments: list[Segment] = []
        for part in message.content:
            if segments:
                segments.append(_BLANK_LINE)
            if isinstance(part, ImagePart):
                segments.append(self._special.image)
                images.append(part.data)
            else:
                segments.append(part)
        return ["<tool_result>", *segments, "</tool_result>"] if message.role == "tool" else segments


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses conversations without a meaning: system messages come first, a user or tool message last.

    Raises `ChatError`.
    """
    if not messages:
        raise ChatError("messages", [], "at least one message")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise ChatError(f"messages[{i}].role", message.role, f"one of {list(ROLES)}")
        if message.role == "system" and i and messages[i - 1].role != "system":
            raise ChatError(f"messages[{i}].role", message.role, "before every other role")
        if message.role != "user" and any(isinstance(part, ImagePart) for part in message.content):
            raise ChatError(f"messages[{i}].content", "an image", f"text only for role {message.role!r}")
        if message.role != "assistant" and (message.tool_calls or message.reasoning is not None):
            raise ChatError(f"messages[{i}]", message.role, "an assistant to have reasoning or tool calls")
        for name in (name for call in message.tool_calls for name in (call.name, *call.arguments)):
            if not name or any(c in name for c in '"<>\r\n'):
                raise ChatError(
                    f"messages[{i}].tool_calls", name, "free of quotes, angle brackets, line ends"
                )
    last = messages[-1].role
    if last not in ("user", "tool"):
        raise ChatError(f"messages[{len(messages) - 1}].role", last, "'user' or 'tool' for the last")


def separate_reasoning(message: Message) -> Message:
    """The message with an assistant's unseparated reasoning moved from its content to `reasoning`."""
    if message.role != "assistant" or message.reasoning is not None:
        return message
    text = plain_text(message)
    reasoning, mark, answer = text.partition(_THOUGHT.token)
    if not mark:
        return replace(message, reasoning="")
    return replace(message, reasoning=reasoning.removeprefix(_THINK.token), content=(answer,))


def plain_text(message: Message) -> str:
    """The text parts of a message, joined by a blank line."""
    return _BLANK_LINE.join(part for part in message.content if isinstance(part, str))


def _reply(message: Message, keep_reasoning: bool) -> list[Segment]:
    """An assistant's earlier turn, between its role token and the end token."""
    segments: list[Segment] = [_THINK, message.reasoning or ""] if keep_reasoning else []
    segments += [_THOUGHT, plain_text(message)]
    if message.tool_calls:
        segments += [f"{_BLANK_LINE}<", _DSML, " calls>\n"]
        for call in message.tool_calls:
            segments += ["<", _DSML, f' invoke name="{call.name}">\n']
            for key, value in call.arguments.items():
                literal = isinstance(value, str)
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                segments += ["<", _DSML, f' parameter name="{key}" string="{str(literal).lower()}">', text]
                segments += ["</", _DSML, " parameter>\n"]
            segments += ["</", _DSML, " invoke>\n"]
        segments += ["</", _DSML, " calls>"]
    return segments
