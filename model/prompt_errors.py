"""Faults of a request or its checkpoint that are found before the network runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cedar.model.errors import CheckpointError, InputError, ModelError


class TokenizerError(CheckpointError):
    """`tokenizer.json` is missing, damaged, of a kind not served, or lacks a token that the prompt format
    needs.
    """

    subject = "tokenizer: "


class EngramTableError(CheckpointError):
    """Tokenizer and config contradict each other on the Engram tables."""

    subject = "engram: "


class ChatTemplateError(CheckpointError):
    """The checkpoint's chat template does not compile, or fails on a conversation."""

    subject = "chat template: "


class ChatError(InputError):
    """A conversation that the prompt format cannot express."""

    subject = "messages: "


class ImageError(InputError):
    """Bytes that are not an image, a damaged image, or one over the limits.

    `index`: which of a prompt's images, in their order; None where there is only one.
    """

    subject = "image: "

    def __init__(self, field: str, value: object, allowed: str, *, index: int | None = None) -> None:
        if index is not None:
            self.subject = f"images[{index}]: "
        super().__init__(field, value, allowed)
        self.index = index


@contextmanager
def naming_image(index: int) -> Iterator[None]:
    """An `ImageError` that leaves the block says that it is about image `index` of the prompt."""
    try:
        yield
    except ImageError as error:
        raise ImageError(error.field, error.value, error.allowed, index=index) from error.__cause__


class PromptError(InputError):
    """A prompt that the model cannot run: empty, too long, ids out of range, images that do not match."""

    subject = "prompt: "


class SamplingError(InputError):
    """A sampling parameter outside its range."""

    subject = "sampling: "


class LogitsError(ModelError):
    """Logits that are not finite: the network's fault, not the caller's. `rows` are the rows of the batch."""

    subject = "logits: "

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__("non-finite rows", list(rows), "finite in every row of the batch")
        self.rows = rows
