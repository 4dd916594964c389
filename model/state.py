"""What the network remembers: the tensors an engine owns, and everything that belongs to one request (spec
§5).

`KVMemory` is storage without meaning: pages, window rings and compressor tails, addressed by page slot and
sequence slot. `SequenceState` says what of it is a request's and up to where it is valid. Nothing else is
kept between calls, so a sequence can be dropped, exported or rebuilt by handling these two.

Letters: P page slots, S sequence slots, L layers, W window, D head dim, m the ratio of a source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cedar.kernels.fp8 import window_row_bytes
from cedar.kvstore.layout import PageLayout
from cedar.model.config import DraftConfig, ModelConfig
from cedar.model.errors import InputError
from cedar.model.spans import ImageSpan

__all__ = ["ImageSpan", "KVMemory", "SequenceState", "StreamTail", "check_sequence", "tailed_ratios"]


@dataclass(frozen=True, eq=False, repr=False)
class KVMemory:
    """The tensors of one engine; pages and slots are handed out by its owner, not here."""

    pages: torch.Tensor  # uint8 [P, page_bytes]
    ring_storage: torch.Tensor  # uint8 [S + X, L, W, D + D/32]: rings, then room for rows that may not stay
    tails: torch.Tensor  # fp32 [S, sources with m > 1, 2 (kv, gate), largest m - 1, D]
    draft_rings: torch.Tensor  # uint8 [S, draft stages or 0, W, D + D/32]

    @property
    def rings(self) -> torch.Tensor:
        """uint8 [S, L, W, D + D/32]."""
        return self.ring_storage[: self.draft_rings.shape[0]]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        layout: PageLayout,
        *,
        pages: int,
        slots: int,
        device: torch.device | str,
        drafting: bool = False,
    ) -> KVMemory:
        """Zeroed memory for `pages` page slots and `slots` sequences, with draft rings when `drafting`.

        Unused bytes of a page stay zero for ever.
        """
        draft = config.draft if drafting else None
        stages, spare = (0, 0) if draft is None else (draft.stages, _spare_slots(config, draft, slots))
        ratios = tailed_ratios(config)
        depth = max(ratios, default=1) - 1
        row = window_row_bytes(config.head_dim)
        return cls(
            pages=torch.zeros(pages, layout.page_bytes, dtype=torch.uint8, device=device),
            ring_storage=torch.zeros(
                slots + spare, config.layers, config.window, row, dtype=torch.uint8, device=device
            ),
            tails=torch.zeros(slots, len(ratios), 2, depth, config.head_dim, device=device),
            draft_rings=torch.zeros(slots, stages, config.window, row, dtype=torch.uint8, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(t.nbytes for t in (self.pages, self.ring_storage, self.tails, self.draft_rings))


def _spare_slots(config: ModelConfig, draft: DraftConfig, slots: int) -> int:
    """Slots whose windows hold a block of every sequence, their number rounded up to a power of two."""
    rows = (1 << (slots - 1).bit_length()) * (draft.block_size + 1)
    return -(-rows // config.window)


def tailed_ratios(config: ModelConfig) -> tuple[int, ...]:
    """Ratios of the sources that keep a tail (m > 1), in layer order: the second axis of `KVMemory.tails`."""
    ratios = (config.compress_ratios[layer] for layer in config.kv_source_layer_ids)
    return tuple(ratio for ratio in ratios if ratio > 1)


@dataclass(eq=False, repr=False)
class StreamTail:
    """Rows that have run the lower layers of a prompt and wait for the rest; position of row 0 is `start`.

    `began` is the sequence length at which this prefill began, `layer` the first layer that the rows have not
    run.
    """

    layer: int
    began: int
    start: int
    streams: torch.Tensor  # bf16 [n, hc, d]
    pre: torch.Tensor  # fp32 [n, hc]

    @classmethod
    def begin(cls, layer: int, at: int, streams: torch.Tensor, pre: torch.Tensor) -> StreamTail:
        """The rows of the first chunk of a prefill that began at position `at`."""
        return cls(layer=layer, began=at, start=at, streams=streams, pre=pre)

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.streams.shape[0]

    def waits(self, length: int, layers: int) -> bool:
        """Whether rows up to `length` have still to run some of a network's `layers`."""
        return self.end == length and self.layer < layers

    def append(self, streams: torch.Tensor, pre: torch.Tensor) -> None:
        """Add the rows of the next chunk."""
        self.streams = torch.cat((self.streams, streams))
        self.pre = torch.cat((self.pre, pre))

    def drop_below(self, position: int) -> None:
        """Forget rows of positions below `position`, and their memory."""
        surplus = min(position, self.end) - self.start
        if surplus > 0:
            self.streams = self.streams[surplus:].clone()
            self.pre = self.pre[surplus:].clone()
            self.start += surplus


@dataclass(eq=False)
class SequenceState:
    """One request. `ids[:length]` have run; `pages` are page slots in order; images are ascending and
    disjoint.

    Window reads of layers below the decoder stop at `encoder_start`, those of decoder layers at
    `decoder_start`, those of draft stages at `draft_start`. Global entries of groups that end at or
    below `write_from` are only read: their pages
    were loaded. After an exception out of a network call the slot's contents are undefined and the sequence
    must be dropped.
    """

    slot: int
    pages: list[int]
    ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    length: int = 0
    encoder_start: int = 0
    decoder_start: int = 0
    draft_start: int = 0
    write_from: int = 0
    decoder_from: int | None = None
    tail: StreamTail | None = field(default=None, repr=False)

    def in_image(self, position: int) -> bool:
        """Whether `position` is inside an image span."""
        return any(image.start <= position < image.end for image in self.images)

    def image_mask(self, begin: int, end: int) -> torch.Tensor | None:
        """bool [end - begin] on the host: inside an image or not; None when no position is."""
        mask = None
        for image in self.images:
            low, high = max(image.start, begin), min(image.end, end)
            if low < high:
                mask = torch.zeros(end - begin, dtype=torch.bool) if mask is None else mask
                mask[low - begin : high - begin] = True
        return mask


def check_sequence(
    seq: SequenceState, upto: int, memory: KVMemory, config: ModelConfig, page_tokens: int
) -> None:
    """Refuse a call that would run past the ids, the context, the pages or the slots. Raises InputError."""
    if upto > len(seq.ids):
        raise InputError("upto", upto, f"at most the number of token ids, {len(seq.ids)}")
    if upto > config.max_position_embeddings:
        raise InputError(
            "input_ids length", upto, f"at most max_position_embeddings, {config.max_position_embeddings}"
        )
    needed = -(-upto // page_tokens)
    if len(seq.pages) < needed:
        raise InputError(
            "pages", len(seq.pages), f"at least {needed} to hold {upto} tokens at {page_tokens} a page"
        )
    if not 0 <= seq.slot < memory.rings.shape[0]:
        raise InputError("slot", seq.slot, f"from 0 to {memory.rings.shape[0] - 1}")
