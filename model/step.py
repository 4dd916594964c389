"""The index tensors of one forward call: which rows run, and where each reads and writes (spec §3, §9).

A step runs N rows: positions [begin, end) of each of S sequences, flat. Everything that layers share is
worked out once, on the host, and moved to the device in one piece: visible counts, window rows, group
members, ring slots.

Window rows. With one row a sequence (decode) a row is written to its ring slot before the layer reads: it
replaces position i-W, which nothing reads any more. A longer chunk would overwrite slots that its own earlier
rows need, so it reads a staging buffer, `rings of the S sequences | the chunk's rows`, and the rings are
written after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from cedar.model.config import ModelConfig
from cedar.model.state import KVMemory, SequenceState

Span = tuple[SequenceState, int, int]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """Which groups of m tokens close in a step, and what stays in the tails.

    `members` int64 [G, m] index rows of `tails of the S sequences | the chunk's rows`, (m-1) tail rows a
    sequence.
    """

    members: torch.Tensor
    seq: torch.Tensor  # int64 [G]
    entry: torch.Tensor  # int64 [G]
    positions: torch.Tensor  # int64 [G], first token of the group
    kept_rows: torch.Tensor  # int64 [K], chunk rows that go to a tail
    kept_slots: torch.Tensor  # int64 [K]
    kept_places: torch.Tensor  # int64 [K], place in the group

    @property
    def closes(self) -> bool:
        """Whether any group closes."""
        return self.entry.shape[0] > 0


class Step:
    """Rows of one forward call and their addresses; N rows, S sequences, on the memory's device."""

    def __init__(self, memory: KVMemory, config: ModelConfig, spans: Sequence[Span]) -> None:
        self.memory = memory
        self.spans = spans
        self.device = memory.pages.device
        self._window = config.window
        counts = torch.tensor([end - begin for _, begin, end in spans])
        self._counts = counts
        self._begins = torch.tensor([begin for _, begin, _ in spans])
        self._offsets = counts.cumsum(0) - counts
        self._seq = torch.repeat_interleave(torch.arange(len(spans)), counts)
        self.rows = int(self._seq.shape[0])
        self._positions = torch.arange(self.rows) - (self._offsets - self._begins)[self._seq]
        self._slots = torch.tensor([seq.slot for seq, _, _ in spans])
        self.direct = self.rows == len(spans)
        self._visible: dict[int, torch.Tensor] = {}
        self._groups: dict[int, GroupPlan] = {}
        self._window_rows: dict[bool, torch.Tensor] = {}

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [N]."""
        return self._positions.to(self.device)

    @cached_property
    def seq(self) -> torch.Tensor:
        """int64 [N], index into the step's sequences."""
        return self._seq.to(self.device)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """int32 [S, most pages], padded with page 0."""
        width = max(len(seq.pages) for seq, _, _ in self.spans)
        table = torch.zeros(len(self.spans), width, dtype=torch.int32)
        for row, (seq, _, _) in enumerate(self.spans):
            table[row, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int32)
        return table.to(self.device)

    @cached_property
    def image_mask(self) -> torch.Tensor | None:
        """bool [N], None when no row is inside an image."""
        masks = [seq.image_mask(begin, end) for seq, begin, end in self.spans]
        if all(mask is None for mask in masks):
            return None
        filled = [
            torch.zeros(end - begin, dtype=torch.bool) if mask is None else mask
            for mask, (_, begin, end) in zip(masks, self.spans, strict=True)
        ]
        return torch.cat(filled).to(self.device)

    @cached_property
    def is_image(self) -> torch.Tensor:
        """bool [N]."""
        mask = self.image_mask
        return torch.zeros(self.rows, dtype=torch.bool, device=self.device) if mask is None else mask

    def visible(self, ratio: int) -> torch.Tensor:
        """int64 [N]: entries of a source of this ratio that each row may read, those with (j+1)·m <= i+1."""
        if ratio not in self._visible:
            self._visible[ratio] = ((self._positions + 1) // ratio).to(self.device)
        return self._visible[ratio]

    def most_visible(self, ratio: int) -> int:
        """The greatest `visible`, known without asking the device."""
        return max(end for _, _, end in self.spans) // ratio

    def groups(self, ratio: int) -> GroupPlan:
        """The groups of a source of this ratio that this step closes and may write."""
        if ratio not in self._groups:
            self._groups[ratio] = self._plan_groups(ratio)
        return self._groups[ratio]

    def window_rows(self, decoder: bool) -> torch.Tensor:
        """int64 [N, W]: rows of what `write_window` gives for positions i-W+1 to i, -1 where not readable."""
        if decoder not in self._window_rows:
            self._window_rows[decoder] = self._plan_window(decoder)
        return self._window_rows[decoder]

    def write_window(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Give this step's window rows uint8 [N, B] of `layer` to its rings; returns the buffer to read,
        uint8 [R, B].

        After the layer's attention has read the buffer, `close_window` must run.
        """
        if self.direct:
            flat = self._flat_rings(layer)
            flat[self._ring_targets] = rows
            return flat
        return torch.cat((self.memory.rings[self.slots, layer].flatten(0, 1), rows))

    def close_window(self, layer: int, rows: torch.Tensor) -> None:
        """Write the last W rows of each sequence to its ring: no row of the chunk needs the old ones now."""
        if not self.direct:
            self._flat_rings(layer)[self._ring_targets] = rows[self._ring_rows]

    def _flat_rings(self, layer: int) -> torch.Tensor:
        """Ring rows from this layer of slot 0 on; a row of slot s lies s·L·W further."""
        return self.memory.rings.flatten(0, 2)[layer * self._window :]

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [S], sequence slots in memory."""
        return self._slots.to(self.device)

    @cached_property
    def _ring_rows_host(self) -> torch.Tensor:
        ends = (self._begins + self._counts)[self._seq]
        return torch.nonzero(self._positions >= ends - self._window).squeeze(1)

    @cached_property
    def _ring_rows(self) -> torch.Tensor:
        return self._ring_rows_host.to(self.device)

    @cached_property
    def _ring_targets(self) -> torch.Tensor:
        chosen = self._ring_rows_host
        slots, positions = self._slots[self._seq[chosen]], self._positions[chosen]
        return (slots * self._slot_stride + positions % self._window).to(self.device)

    @property
    def _slot_stride(self) -> int:
        return self.memory.rings.shape[1] * self._window

    def _plan_window(self, decoder: bool) -> torch.Tensor:
        window = self._window
        lower = torch.tensor(
            [seq.decoder_start if decoder else seq.encoder_start for seq, _, _ in self.spans]
        )
        read = self._positions.unsqueeze(1) + torch.arange(1 - window, 1)
        seq = self._seq.unsqueeze(1)
        if self.direct:
            rows = self._slots[seq] * self._slot_stride + read % window
        else:
            begin = self._begins[seq]
            in_chunk = len(self.spans) * window + self._offsets[seq] + read - begin
            rows = torch.where(read >= begin, in_chunk, seq * window + read % window)
        return torch.where(read >= lower[seq].clamp_min(0), rows, -1).to(self.device)

    def _plan_groups(self, ratio: int) -> GroupPlan:
        write_from = torch.tensor([seq.write_from for seq, _, _ in self.spans])[self._seq]
        closing = torch.nonzero(
            ((self._positions + 1) % ratio == 0) & (self._positions + 1 > write_from)
        ).squeeze(1)
        seq, last = self._seq[closing], self._positions[closing]
        member = last.unsqueeze(1) + torch.arange(1 - ratio, 1)
        begin = self._begins[seq].unsqueeze(1)
        tails = len(self.spans) * (ratio - 1)
        in_chunk = tails + self._offsets[seq].unsqueeze(1) + member - begin
        in_tail = seq.unsqueeze(1) * (ratio - 1) + member % ratio
        ends = (self._begins + self._counts)[self._seq]
        kept = torch.nonzero(self._positions >= ends // ratio * ratio).squeeze(1)
        moved = [
            tensor.to(self.device)
            for tensor in (
                torch.where(member >= begin, in_chunk, in_tail),
                seq,
                last // ratio,
                last - (ratio - 1),
                kept,
                self._slots[self._seq[kept]],
                self._positions[kept] % ratio,
            )
        ]
        return GroupPlan(*moved)
