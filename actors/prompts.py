"""The gateway's door to the model: prompts in, text out, and the names under which pages are kept.

No weights are read. ``prepare`` is for threads (it tokenizes, and decodes images); the rest is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cedar.actors.errors import ConfigError, InvalidRequest
from cedar.actors.sampling import model_sampling
from cedar.kvstore.layout import PageLayout
from cedar.model.chat import ChatOptions, EncodedChat, ImagePart, Message
from cedar.model.detokenize import Detokenizer
from cedar.model.errors import InputError, ModelError
from cedar.model.prompt import PromptFormat
from cedar.v1 import common_pb2, generation_pb2


@dataclass(frozen=True)
class Prompt:
    """What the stages need of a prompt. ``files``: encoded image files by content hash."""

    ids: Sequence[int]
    images: Sequence[common_pb2.ImageSpan]
    files: Mapping[bytes, bytes]


class PromptTools:
    """Tokenizer, chat format and image planning of one checkpoint. Safe to share between threads."""

    def __init__(self, form: PromptFormat, layout: PageLayout, fingerprint: bytes) -> None:
        self._format = form
        self.fingerprint = fingerprint
        self.format_id = layout.format_id
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_bytes
        self.bytes_per_token = layout.bytes_per_token
        self.window_tokens = form.config.window
        self.context_tokens = form.config.max_position_embeddings
        self.vocabulary = form.config.vocab_size
        self.end_token = form.config.eos_token_id
        self.vision = form.config.vision is not None

    @classmethod
    def load(
        cls,
        path: str,
        page_tokens: int | None = None,
        *,
        max_images: int = 64,
        max_image_bytes: int = 20 << 20,
        max_image_pixels: int = 64_000_000,
    ) -> PromptTools:
        """Read what a checkpoint folder (or fsspec URL) says of prompts. Blocks.

        ``page_tokens`` as the workers have it; the others limit what a request may hold. Raises the model's
        named config and checkpoint errors.
        """
        from cedar.model.checkpoint import Checkpoint
        from cedar.model.fingerprint import fingerprint
        from cedar.model.images import ImageLimits
        from cedar.model.schedule import page_layout

        limits = ImageLimits(max_bytes=max_image_bytes, max_pixels=max_image_pixels)
        form = PromptFormat.open(path, max_images=max_images, image_limits=limits)
        layout = page_layout(form.config, page_tokens)
        return cls(form, layout, fingerprint(Checkpoint.open(path), layout))

    def prepare(self, request: generation_pb2.GenerateRequest) -> Prompt:
        """Check a request and turn it into ids and image spans. InvalidRequest names what is wrong."""
        with _callers_fault():
            self._check_sampling(request.sampling)
            ids, files = self._encode(request)
            built = self._format.build(ids, files)
        spans = [
            common_pb2.ImageSpan(
                start=image.start,
                length=image.length,
                rows=image.rows,
                columns=image.columns,
                content_hash=image.content_hash,
            )
            for image in built.images
        ]
        by_hash = {image.content_hash: data for image, data in zip(built.images, files, strict=True)}
        return Prompt(built.ids, spans, by_hash)

    def text(self, stops: Sequence[str] = ()) -> Detokenizer:
        """The text of one growing reply, cut before the first stop string; the end token adds nothing."""
        with _callers_fault():
            return self._format.detokenizer(stops)

    def _check_sampling(self, sampling: common_pb2.SamplingParams) -> None:
        asked = common_pb2.SamplingParams()
        asked.CopyFrom(sampling)
        asked.max_tokens = sampling.max_tokens or 1  # unset: the gateway's default
        model_sampling(asked, self.vocabulary)

    def _encode(self, request: generation_pb2.GenerateRequest) -> tuple[Sequence[int], Sequence[bytes]]:
        kind = request.WhichOneof("prompt")
        if kind == "conversation":
            if request.images:
                raise InvalidRequest("images", len(request.images), "none beside a conversation's own")
            chat = self._chat(request.conversation)
            return chat.ids, chat.images
        if kind == "token_ids":
            return list(request.token_ids.ids), list(request.images)
        if kind == "text":
            if not request.text and not request.images:
                raise InvalidRequest("text", "", "must not be empty")
            return self._format.encode_text(request.text, len(request.images)), list(request.images)
        raise InvalidRequest("prompt", None, "one of text, token_ids, conversation must be set")

    def _chat(self, conversation: generation_pb2.Conversation) -> EncodedChat:
        messages = [
            Message(
                role=message.role,  # type: ignore[arg-type]  # the chat format refuses unknown roles
                content=tuple(
                    ImagePart(part.image) if part.HasField("image") else part.text for part in message.content
                ),
            )
            for message in conversation.messages
        ]
        return self._format.encode_chat(messages, ChatOptions(thinking=conversation.thinking))


def check_network(
    config: Mapping[str, object], page_tokens: int | None = None, *, drafting: bool = False
) -> None:
    """Whether a checkpoint's ``config.json`` describes a network that a page of so many tokens fits, and that
    can draft, if asked.

    Raises this package's ``ConfigError``: the field (``page_tokens``, or one of the file), value and limit.
    """
    from cedar.model.config import parse_config
    from cedar.model.schedule import check_drafting, page_layout

    try:
        parsed = parse_config(config)
        page_layout(parsed, page_tokens)
        if drafting:
            check_drafting(parsed)
    except ModelError as error:
        raise ConfigError(error.field, error.value, f"must be {error.allowed}") from None


@contextmanager
def _callers_fault() -> Iterator[None]:
    """The model's input errors as this package's, with the same words."""
    try:
        yield
    except InputError as error:
        raise InvalidRequest(
            f"{error.subject}{error.field}", error.value, f"must be {error.allowed}"
        ) from None
