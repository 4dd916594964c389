"""Faults of a request or its checkpoint that are found before the network runs."""

from __future__ import annotations

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
    """Bytes that are not an image, a damaged image, or one over the limits."""

    subject = "image: "


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
