"""The checkpoint's own chat template, rendered in a sandbox, as every tool on the hub renders it (spec §12).

A template gives one string in which its control tokens and the conversation's words are mixed. Before
rendering, each place where the words spell a control token, or could complete one across their edge, gets a
mark (a character that occurs nowhere else); after the string has been cut at its control tokens, the marks
are taken out. So only the template can write a control token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Final, NoReturn

from cedar.model.chat import (
    BuiltinChatFormat,
    ChatFormat,
    ChatOptions,
    EncodedChat,
    ImagePart,
    Message,
    SpecialTokens,
    check_messages,
    plain_text,
    separate_reasoning,
)
from cedar.model.prompt_errors import ChatError, ChatTemplateError
from cedar.model.spelling import SpellingGuard, spelling_pattern
from cedar.model.storage import Storage
from cedar.model.tokenizer import Control, Segment, Tokenizer

TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"

_PRIVATE_USE: Final = range(0xE000, 0xF900)


class TemplateChatFormat:
    """A prompt format given by a Jinja template. `now` is the clock behind the template's `strftime_now`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: SpecialTokens,
        template: str,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise ChatTemplateError("source", f"<{error}>", "a Jinja template that compiles") from None
        self._source = template
        self._tokenizer = tokenizer
        self._special = special
        spellings = tuple(tokenizer.control_tokens)
        self._control = spelling_pattern(spellings)
        self._guard = SpellingGuard(spellings)

    def encode(self, messages: Sequence[Message], options: ChatOptions | None = None) -> EncodedChat:
        """Prompt ids as the template writes them. Raises `ChatError` when the conversation is refused."""
        options = options or ChatOptions()
        check_messages(messages)
        messages = [separate_reasoning(message) for message in messages]
        images = tuple(part.data for m in messages for part in m.content if isinstance(part, ImagePart))
        mark = self._unused_character([*map(_message, messages), *options.tools])

        def say(text: str) -> str:
            return self._guard.mark(text, mark)

        said = [_message(message, say, with_images=bool(images)) for message in messages]
        segments = self._cut(self._render(said, _guarded(options.tools, say), options), mark)
        placed = segments.count(self._special.image)
        if placed != len(images):
            raise ChatTemplateError("image tokens", placed, f"{len(images)}, one for each image")
        return EncodedChat(self._tokenizer.encode_segments(segments), images)

    def _render(self, messages: list[dict[str, object]], tools: Any, options: ChatOptions) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                bos_token=self._special.begin.token,
                eos_token=self._special.end.token,
                thinking=options.thinking,
                enable_thinking=options.thinking,
                reasoning_effort=options.effort,
            )
        except _Refused as error:
            raise ChatError("messages", f"<{error}>", "a conversation that the chat template takes") from None
        except Exception as error:  # a template may fail in any expression it evaluates
            raise ChatTemplateError(
                "rendering", f"<{type(error).__name__}: {error}>", "without errors"
            ) from None

    def _cut(self, text: str, mark: str) -> list[Segment]:
        """The rendered string as plain text and control tokens, without marks."""
        segments: list[Segment] = []
        end = 0
        for match in self._control.finditer(text):
            segments += [text[end : match.start()].replace(mark, ""), Control(match.group())]
            end = match.end()
        return [*segments, text[end:].replace(mark, "")]

    def _unused_character(self, values: Sequence[object]) -> str:
        """A private-use character that neither the values nor the template hold."""
        used = set(self._source).union(*map(set, chain.from_iterable(map(_strings, values))))
        mark = next((chr(c) for c in _PRIVATE_USE if chr(c) not in used), None)
        if mark is None:
            raise ChatError("messages", "every private-use character", "text that leaves one of them unused")
        return mark


def load_chat_format(storage: Storage, tokenizer: Tokenizer, special: SpecialTokens) -> ChatFormat:
    """The format of a checkpoint folder: its own template if it ships one, else the built-in format.

    Raises `ChatTemplateError`.
    """
    template = find_chat_template(lambda name: storage.read_all(name) if storage.exists(name) else None)
    if template is None:
        return BuiltinChatFormat(tokenizer, special)
    return TemplateChatFormat(tokenizer, special, template)


def find_chat_template(read: Callable[[str], bytes | None]) -> str | None:
    """The template a checkpoint ships, or None. `read` gives a file's bytes, None where there is no such
    file.

    `chat_template.jinja` comes before `tokenizer_config.json`. Raises `ChatTemplateError` for a file that is
    not text.
    """
    try:
        source = read(TEMPLATE_FILE)
        if source is not None:
            return source.decode()
        config = json.loads(read(TOKENIZER_CONFIG_FILE) or b"{}")
    except ValueError as error:
        raise ChatTemplateError(
            "file", f"<{error}>", "UTF-8 text, and JSON in tokenizer_config.json"
        ) from None
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ChatTemplateError("chat_template", type(template).__name__, "a string")
    return template


class _Refused(Exception):
    """What a template's `raise_exception` says."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _message(
    message: Message, say: Callable[[str], str] = str, *, with_images: bool = True
) -> dict[str, object]:
    """A message in the form that templates read, what it says passed through `say`, the words of the form
    not.

    Content is a list of parts only in conversations with images.
    """
    content: object = say(plain_text(message))
    if with_images:
        content = [
            {"type": "text", "text": say(part)} if isinstance(part, str) else {"type": "image"}
            for part in message.content
        ]
    fields: dict[str, object] = {"role": message.role, "content": content}
    if message.reasoning:
        fields["reasoning_content"] = say(message.reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": say(call.name), "arguments": _guarded(call.arguments, say)},
            }
            for call in message.tool_calls
        ]
    return fields


def _guarded(value: Any, say: Callable[[str], str]) -> Any:
    """A JSON value with every string, keys too, passed through `say`."""
    if isinstance(value, str):
        return say(value)
    if isinstance(value, Mapping):
        return {_guarded(key, say): _guarded(item, say) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, say) for item in value]
    return value


def _strings(value: object) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []
