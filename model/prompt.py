"""What a caller sends, as the network takes it: ids with every image spread over its span (spec §8).

In ids an image is either one image token or already its whole span of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cedar.model.chat import ChatFormat, ChatOptions, EncodedChat, Message, SpecialTokens
from cedar.model.chat_template import load_chat_format
from cedar.model.config import ModelConfig, parse_config
from cedar.model.detokenize import Detokenizer
from cedar.model.images import ImageLimits, PlannedImage, describe_image, token_types
from cedar.model.prompt_errors import PromptError, naming_image
from cedar.model.spans import ImageSpan
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer

TEXT = -1
"""The token type of a position outside every image."""


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """What a prompt may hold. `context_tokens` counts the prompt and at least one token of reply."""

    vocab_size: int
    context_tokens: int
    image_token_id: int
    max_images: int = 64

    @classmethod
    def of(cls, config: ModelConfig, *, max_images: int = 64) -> PromptLimits:
        """The limits that a model's config sets; a text-only model takes no image."""
        return cls(
            vocab_size=config.vocab_size,
            context_tokens=config.max_position_embeddings,
            image_token_id=config.image_token_id,
            max_images=0 if config.vision is None else max_images,
        )


@dataclass(frozen=True)
class Prompt:
    """Checked ids, the image token at every position of an image's span, and the spans in order."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()

    @property
    def token_types(self) -> list[int]:
        """For each position its kind within an image's span, or TEXT."""
        types = [TEXT] * len(self.ids)
        for span in self.images:
            types[span.start : span.end] = token_types(span.rows, span.columns)
        return types


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A checkpoint's way from what a caller sends to a `Prompt`, and from ids back to text. Needs no weights.

    Each `encode_*` gives ids with one image token for each image; `build` plans the images and spreads them.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    chat: ChatFormat
    limits: PromptLimits
    image_limits: ImageLimits

    @classmethod
    def open(
        cls, path: str, *, max_images: int = 64, image_limits: ImageLimits | None = None
    ) -> PromptFormat:
        """Reads config, tokenizer and template of the checkpoint folder `path`, local or any fsspec URL.

        Raises `ConfigError` or `CheckpointError`.
        """
        storage = Storage(path)
        config = parse_config(storage.read_all("config.json"))
        tokenizer = Tokenizer.load(storage)
        special = SpecialTokens.from_ids(
            tokenizer, begin=config.bos_token_id, end=config.eos_token_id, image=config.image_token_id
        )
        return cls(
            config=config,
            tokenizer=tokenizer,
            chat=load_chat_format(storage, tokenizer, special),
            limits=PromptLimits.of(config, max_images=max_images),
            image_limits=image_limits or ImageLimits(),
        )

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> EncodedChat:
        """A conversation, up to where the assistant's reply begins. Raises `ChatError`."""
        return self.chat.encode(messages, options)

    def encode_text(self, text: str, images: int = 0) -> list[int]:
        """Raw text after the begin token; `images` image tokens stand before the text."""
        ids = self.tokenizer.encode(text)
        return [self.config.bos_token_id, *[self.config.image_token_id] * images, *ids]

    def build(self, ids: Sequence[int], images: Sequence[bytes] = ()) -> Prompt:
        """The prompt of ids and image files. Raises `PromptError`, or `ImageError` for an image it cannot
        take.
        """
        if len(images) > self.limits.max_images:  # before any of them is decoded
            raise PromptError("images", len(images), f"at most {self.limits.max_images}")
        vision = self.config.vision
        planned: list[PlannedImage] = []
        if vision is not None:
            for index, data in enumerate(images):
                with naming_image(index):
                    planned.append(describe_image(data, vision, self.image_limits))
        return build_prompt(ids, planned, self.limits)

    def detokenizer(self, stops: Sequence[str] = ()) -> Detokenizer:
        """The text of one reply; the end token adds nothing to it."""
        return Detokenizer(self.tokenizer, stops, hidden=(self.config.eos_token_id,))


def build_prompt(ids: Sequence[int], images: Sequence[PlannedImage], limits: PromptLimits) -> Prompt:
    """Checks ids and images against the limits and spreads the images over their spans.

    `images` are in the order of their tokens. Raises `PromptError`.
    """
    if len(ids) == 0:
        raise PromptError("ids", [], "at least one token")
    if len(images) > limits.max_images:
        raise PromptError("images", len(images), f"at most {limits.max_images}")
    _check_ids(ids, limits)
    spread = sum(image.span_length for image in images)
    tokens = sum(token_id == limits.image_token_id for token_id in ids)
    if tokens not in (len(images), spread):
        allowed = f"{len(images)}, one for each image, or the {spread} positions of their spans"
        raise PromptError("image tokens", tokens, allowed if images else "0 in a prompt without images")
    expanded = tokens == spread
    length = len(ids) if expanded else len(ids) - tokens + spread
    if length >= limits.context_tokens:
        raise PromptError("length", length, f"below the context of {limits.context_tokens} tokens")
    return _spread(ids, images, limits.image_token_id, expanded=expanded)


def _check_ids(ids: Sequence[int], limits: PromptLimits) -> None:
    for position, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < limits.vocab_size:
            raise PromptError(f"ids[{position}]", token_id, f"an integer from 0 to {limits.vocab_size - 1}")


def _spread(
    ids: Sequence[int], images: Sequence[PlannedImage], image_token_id: int, *, expanded: bool
) -> Prompt:
    out: list[int] = []
    spans: list[ImageSpan] = []
    waiting = iter(images)
    position = 0
    while position < len(ids):
        if ids[position] != image_token_id:
            out.append(ids[position])
            position += 1
            continue
        image = next(waiting)
        length = image.span_length
        taken = length if expanded else 1
        if any(token_id != image_token_id for token_id in ids[position : position + taken]):
            raise PromptError(
                f"ids[{position}]", "an image's tokens", f"a run of {length} for image {len(spans)}"
            )
        spans.append(
            ImageSpan(
                start=len(out),
                length=length,
                rows=image.plan.rows,
                columns=image.plan.columns,
                content_hash=image.content_hash,
            )
        )
        out += [image_token_id] * length
        position += taken
    return Prompt(out, tuple(spans))
