"""The index tensors of one forward call: which rows run, and where each reads and writes (spec §3, §9).

A step runs N rows: positions [begin, end) of each of S sequences, flat. Everything that layers share is
worked out once, on the host, and moved to the device in one piece: visible counts, window rows, group
members, ring slots.

Window rows. With one row a sequence (decode) a row is written to its ring slot before the layer reads: it
replaces position i-W, which nothing reads any more. A longer chunk would overwrite slots that its own
earlier rows need, so it reads a staging buffer, `rings of the S sequences | the chunk's rows`; the rings
are written when the buffer has taken what they held.

Wide entries. Layers that share a source of keys read the same entries, each for many queries. Where that pays
(`kernels.wide_keys`), a chunk expands all that its rows may see, once, when the first of those layers asks,
and holds them until the next source produces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from cedar.kernels.compress import EntryPlanes
from cedar.kernels.latents import Staging
from cedar.kernels.rope import rope_table
from cedar.kernels.wide_keys import expand_entries
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

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that close a group, where a group is one token."""
        return rows[self.members.squeeze(1)]

    @property
    def closes(self) -> bool:
        """Whether any group closes."""
        return self.entry.shape[0] > 0


class WindowPlan(NamedTuple):
    """Window keys of one layer: the buffer uint8 [R, B] that attention reads, the rows int64 [N] of it
    where the step's own belong, and how the rest of it is filled.
    """

    buffer: torch.Tensor
    places: torch.Tensor
    staging: Staging | None = None


class Step:
    """Rows of one forward call and their addresses; N rows, S sequences, on the memory's device."""

    _wide: tuple[EntryPlanes, torch.Tensor] | None = None

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
        self._ropes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [N], the rows' tokens."""
        ids = [token for seq, begin, end in self.spans for token in seq.ids[begin:end]]
        return torch.tensor(ids, dtype=torch.int64).to(self.device)

    def rope(self, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) fp32 [N, R/2] at the rows' positions, made once for each set of frequencies."""
        if id(freqs) not in self._ropes:
            self._ropes[id(freqs)] = rope_table(self.positions, freqs)
        return self._ropes[id(freqs)]

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

    @property
    def window(self) -> int:
        """Positions that a row reads window keys of."""
        return self._window

    @property
    def may_expand(self) -> bool:
        """Whether keys may be expanded once for all rows: in a chunk, never in what a CUDA graph holds."""
        return not self.direct

    def all_visible(self, ratio: int) -> int:
        """Entries of a source of this ratio in `wide_entries`, of all sequences together."""
        return len(self.spans) * self.most_visible(ratio)

    def wide_entries(self, planes: EntryPlanes, ratio: int) -> torch.Tensor:
        """fp16 [S, E, D], every entry of a source that a row may read, expanded (`expand_entries`).

        Made when first asked for after the source's entries of this step were written, and kept for the
        layers that share them.
        """
        if self._wide is None or self._wide[0] != planes:
            self.drop_wide_entries()
            made = expand_entries(
                self.memory.pages,
                planes.main_payload,
                planes.main_scales,
                self.page_table,
                self.most_visible(ratio),
            )
            self._wide = (planes, made)
        return self._wide[1]

    def drop_wide_entries(self) -> None:
        """What was expanded has been read: another source is about to write, or the layers are done."""
        self._wide = None

    def groups(self, ratio: int) -> GroupPlan:
        """The groups of a source of this ratio that this step closes and may write."""
        if ratio not in self._groups:
            self._groups[ratio] = self._plan_groups(ratio)
        return self._groups[ratio]

    def window_rows(self, decoder: bool) -> torch.Tensor:
        """int64 [N, W]: rows of what `open_window` gives for positions i-W+1 to i, -1 where not readable."""
        if decoder not in self._window_rows:
            self._window_rows[decoder] = self._plan_window(decoder)
        return self._window_rows[decoder]

    def open_window(self, layer: int) -> WindowPlan:
        """Where this layer's window keys of the step are to be written, and read. After the attention has
        read them, `close_window` must run.
        """
        rings = self._flat_rings(layer)
        if self.direct:
            return WindowPlan(rings, self._ring_targets)
        kept = self._ring_sources.shape[0]
        buffer = rings.new_empty(kept + self.rows, rings.shape[1])
        staging = Staging(rings, self._ring_sources, self._ring_targets, self._saved)
        return WindowPlan(buffer, self._own_places, staging)

    def close_window(self, layer: int, buffer: torch.Tensor) -> None:
        """The attention of `layer` has read the buffer; its last N rows are the step's own unless
        `direct`.
        """

    def group_rope(self, ratio: int, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) fp32 [G, R/2] at the first position of each group of `groups`."""
        return rope_table(self.groups(ratio).positions, freqs)

    def join_groups(
        self, tail: int, ratio: int, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """kv and gate fp32 [G, m, D] of the groups that close, from this step's rows fp32 [N, D] and
        source `tail`'s open groups; what stays open is kept.
        """
        members = self.groups(ratio).members
        before = self.memory.tails[self.slots, tail, :, : ratio - 1]  # [S, 2, m - 1, D]
        together = [torch.cat((before[:, i].flatten(0, 1), new)) for i, new in enumerate((kv, gate))]
        self.write_tails(tail, ratio, kv, gate)
        return together[0][members], together[1][members]

    def write_tails(self, tail: int, ratio: int, kv: torch.Tensor, gate: torch.Tensor) -> None:
        """Leave the rows fp32 [N, D] of groups that are still open to source `tail` of this ratio."""
        groups = self.groups(ratio)
        self.memory.tails[groups.kept_slots, tail, :, groups.kept_places] = torch.stack(
            (kv[groups.kept_rows], gate[groups.kept_rows]), dim=1
        )

    def _flat_rings(self, layer: int) -> torch.Tensor:
        """Ring rows from this layer of slot 0 on; a row of slot s lies s·L·W further."""
        return self.memory.rings.flatten(0, 2)[layer * self._window :]

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [S], sequence slots in memory."""
        return self._slots.to(self.device)

    @cached_property
    def _moves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the host: `Staging`'s sources int64 [S·W], targets and saved int64 [N]."""
        ends = (self._begins + self._counts)[self._seq]
        slots = self._positions % self._window
        saved = self._seq * self._window + slots
        targets = torch.where(
            self._positions >= ends - self._window, self._slots[self._seq] * self._slot_stride + slots, -1
        )
        first = (self._slots * self._slot_stride).unsqueeze(1)
        sources = (first + torch.arange(self._window)).flatten()
        sources[saved[targets >= 0]] = -1
        return sources, targets, saved

    @cached_property
    def _ring_sources(self) -> torch.Tensor:
        return self._moves[0].to(self.device)

    @cached_property
    def _ring_targets(self) -> torch.Tensor:
        return self._moves[1].to(self.device)

    @cached_property
    def _saved(self) -> torch.Tensor:
        return self._moves[2].to(self.device)

    @cached_property
    def _own_places(self) -> torch.Tensor:
        """int64 [N], rows of the staging buffer that are the chunk's."""
        first = len(self.spans) * self._window
        return torch.arange(first, first + self.rows, device=self.device)

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
