"""Checks of what a caller hands to the network: token ids, and images against their positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from cedar.model.config import ModelConfig
from cedar.model.errors import InputError
from cedar.model.spans import ImageSpan


class Grid(Protocol):
    """The token grid of one image, as `images.ImagePlan` has it."""

    @property
    def rows(self) -> int:
        """Token rows."""

    @property
    def columns(self) -> int:
        """Token columns."""

    @property
    def span_length(self) -> int:
        """Prompt positions."""


def token_ids(input_ids: Sequence[int] | torch.Tensor, config: ModelConfig) -> list[int]:
    """A prompt's ids as a list.

    Raises InputError when empty, too long, misshapen or outside the vocabulary.
    """
    if isinstance(input_ids, torch.Tensor):
        input_ids = _flat(input_ids)
    ids = list(input_ids)
    if not ids:
        raise InputError("input_ids", [], "at least one token id")
    if len(ids) > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise InputError("input_ids length", len(ids), f"at most max_position_embeddings, {limit}")
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < config.vocab_size:
            limit = config.vocab_size - 1
            raise InputError(
                f"input_ids[{position}]", value, f"an integer from 0 to vocab_size - 1 = {limit}"
            )
    return ids


def image_spans(
    ids: Sequence[int], images: Iterable[tuple[Grid, bytes]], image_token_id: int
) -> tuple[ImageSpan, ...]:
    """Where each image, (grid, content hash) in prompt order, lies among `ids`.

    Every image takes its whole span of image tokens, and every image token belongs to an image; spans of
    neighbouring images may touch. Raises InputError when counts or lengths do not match.
    """
    images = list(images)
    runs = _runs(ids, image_token_id)
    spans: list[ImageSpan] = []
    waiting = iter(images)
    for start, end in runs:
        position = start
        while position < end:
            image = next(waiting, None)
            if image is None:
                raise InputError(
                    "images",
                    len(images),
                    f"as many as input_ids hold: tokens {position} to {end} have no image",
                )
            grid, content_hash = image
            if position + grid.span_length > end:
                wanted = f"{grid.span_length} for a grid of {grid.rows} x {grid.columns}"
                raise InputError(
                    f"images[{len(spans)}] tokens from position {position}", end - position, wanted
                )
            spans.append(ImageSpan(position, grid.span_length, grid.rows, grid.columns, content_hash))
            position += grid.span_length
    if len(spans) != len(images):
        raise InputError("images", len(images), f"{len(spans)}, the number of images that input_ids hold")
    return tuple(spans)


def _flat(input_ids: torch.Tensor) -> list[int]:
    shape = list(input_ids.shape)
    if input_ids.dtype.is_floating_point or input_ids.dtype.is_complex or input_ids.dtype == torch.bool:
        raise InputError("input_ids dtype", input_ids.dtype, "an integer type")
    if input_ids.dim() not in (1, 2) or (input_ids.dim() == 2 and shape[0] != 1):
        raise InputError("input_ids shape", shape, "[T] or [1, T]")
    flat: list[int] = input_ids.reshape(-1).tolist()
    return flat


def _runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    runs = []
    start = None
    for position, value in enumerate([*ids, -1]):
        if value == token and start is None:
            start = position
        elif value != token and start is not None:
            runs.append((start, position))
            start = None
    return runs
