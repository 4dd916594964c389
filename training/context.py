"""What all layers of one training forward share: positions, rotary tables, masks, the sampled queries.

Letters: B rows, T tokens, W window, n = T / W blocks, M entries of a source, S sampled queries a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from cedar.kernels.rope import YarnParams, rope_frequencies
from cedar.model.config import ModelConfig
from cedar.training.vision import Pictures
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Token rows padded to one length, a multiple of the window."""

    ids: Tensor  # int64 [B, T]
    loss_weight: Tensor  # fp32 [B, T]: of predicting the token at this position
    kinds: Tensor  # int64 [B, T]: kind of an image's position as `cedar.model.images` numbers it, -1 of text
    encoder_start: Tensor  # int64 [B]: encoder windows of positions from here on do not reach below it
    decoder_start: Tensor  # int64 [B]
    dense: Tensor  # bool [B]: rows that read every visible entry
    queries: Tensor  # int64 [B, S]: positions where selection is taught
    pictures: tuple[Pictures, ...] = ()  # by size

    @property
    def is_image(self) -> Tensor:
        """bool [B, T]."""
        return self.kinds >= 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything but the pictures: of one shape in every batch of a phase."""
        return {k: v for k, v in self.__dict__.items() if k != "pictures"}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """A batch of such tensors, without pictures."""
        values: dict[str, Any] = dict(tensors)
        return cls(**values)

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; the loader calls it."""
        return self._each(lambda value: value.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """A copy on the device."""
        return self._each(partial(_moved, device=device))

    def _each(self, function: Callable[[Any], Any]) -> Batch:
        values = {k: function(v) for k, v in self.tensors.items()}
        return Batch(**values, pictures=tuple(function(p) for p in self.pictures))


def _moved(value: Tensor | Pictures, device: torch.device) -> Tensor | Pictures:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)


@cache
def frequencies(dim: int, theta: float, yarn: YarnParams | None, device: torch.device) -> Tensor:
    """`rope_frequencies` on the device, copied there once: a recorded graph cannot wait for a copy."""
    return rope_frequencies(dim, theta, yarn).to(device)


@dataclass(eq=False)
class Selections:
    """What selecting layers hand up within one forward, and what teaches them."""

    pool: Tensor | None = None  # bool [B, T, M]
    taught: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    """Index scores fp32 [B, S, M] of each source with the attention masses [B, S, M] it should follow."""
    learners: list[int] = field(default_factory=list)  # who learns from what the running layer reads
    pool_learner: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """Pages that come from a store: what a source wrote in another forward, for groups below a hit."""

    hit: Tensor  # int64 [B], tokens
    written: list[tuple[Tensor, Tensor]]  # of each source, entries bf16 [B, M, D] and index keys [B, M, Di]

    def over(self, mine: Tensor, source: int, part: int, ratio: int) -> Tensor:
        """`mine` [B, M, .] with the loaded rows of complete groups in place."""
        ends = (torch.arange(mine.shape[1], device=mine.device) + 1) * ratio
        return torch.where((ends <= self.hit.unsqueeze(1)).unsqueeze(2), self.written[source][part], mine)


class Context:
    """Tables and masks of one batch, made once; and how its forward differs from serving, for evaluation.

    `all_dense`: no selection. `pool` False: no candidate pool. `packed` False: entries and index keys stay
    bf16. `loaded`: pages below a prefix hit. `written` collects what the sources write.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: Batch,
        *,
        all_dense: bool = False,
        pool: bool = True,
        packed: bool = True,
        loaded: Loaded | None = None,
    ) -> None:
        self.config = config
        self.batch = batch
        rows, tokens = batch.ids.shape
        if tokens % config.window:
            raise ValueError(f"batch length is {tokens}, must be a multiple of the window {config.window}")
        self.rows, self.tokens = rows, tokens
        self.device = batch.ids.device
        yarn = config.yarn
        params = None
        if yarn is not None:
            params = YarnParams(
                yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original_max_position_embeddings
            )
        plain = frequencies(config.rope_dim, config.rope_theta, None, self.device)
        source = frequencies(config.rope_dim, config.compress_rope_theta, params, self.device)
        self._freqs = (plain, source)
        self._angles: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = {}
        self._windows: dict[bool, Tensor] = {}
        self.selections = Selections()
        self.all_dense, self.pool, self.packed, self.loaded = all_dense, pool, packed, loaded
        self.written: list[tuple[Tensor, Tensor]] = []

    def angles(self, compressed: bool, stride: int = 1, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin fp32 [rows·T/stride, R/2] at every stride-th position."""
        key = (compressed, stride, self.rows if rows is None else rows)
        if key not in self._angles:
            positions = torch.arange(0, self.tokens // stride * stride, stride, device=self.device)
            angles = positions.float().unsqueeze(-1) * self._freqs[compressed]
            angles = angles.repeat(key[2], 1)
            self._angles[key] = angles.cos(), angles.sin()
        return self._angles[key]

    def window_mask(self, decoder: bool) -> Tensor:
        """bool [B, n, W, 2W]: block b's queries over the keys of blocks b-1 and b."""
        if decoder not in self._windows:
            width = self.config.window
            starts = self.batch.decoder_start if decoder else self.batch.encoder_start
            query = torch.arange(self.tokens, device=self.device).view(-1, width, 1)
            key = query[:, :1] - width + torch.arange(2 * width, device=self.device)
            near = (key <= query) & (key > query - width) & (key >= 0)
            start = starts.view(-1, 1, 1, 1)
            self._windows[decoder] = near & ((key >= start) | (query < start))
        return self._windows[decoder]

    def visible(self, ratio: int) -> Tensor:
        """bool [T, M]: entries complete at each position."""
        queries = torch.arange(self.tokens, device=self.device)
        entries = torch.arange(self.tokens // ratio, device=self.device)
        return (entries + 1) * ratio <= queries.unsqueeze(1) + 1
