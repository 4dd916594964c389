"""A step of one new token for each of B sequences, worked out on the memory's device (spec §9).

Nothing here depends on values, only on shapes: a step may be captured in a CUDA graph and replayed with
other positions, slots and pages in the same tensors. So every row is taken to complete a group; where it
does not, its entry is -1, which nothing writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from cedar.kernels.decode_tables import FIELDS, ID, POSITION, SLOT, WRITES, DecodeTables, decode_tables
from cedar.kernels.group_tails import join_tails
from cedar.kernels.rope import rope_table
from cedar.model.config import ModelConfig
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import GroupPlan, Span, Step


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """What differs between two steps of one shape."""

    fields: torch.Tensor  # int64 [FIELDS or more, B]: `kernels.decode_tables`; WRITES is 0 in padding rows
    page_table: torch.Tensor  # int32 [B, pages]

    @classmethod
    def of(cls, memory: KVMemory, seqs: Sequence[SequenceState]) -> DecodeInputs:
        """Those of the sequences' next tokens."""
        fields = np.empty((FIELDS, len(seqs)), np.int64)
        fill_fields(fields, seqs)
        table = np.zeros((len(seqs), max(len(seq.pages) for seq in seqs)), np.int32)
        for row, seq in enumerate(seqs):
            table[row, : len(seq.pages)] = seq.pages
        device = memory.pages.device
        return cls(torch.from_numpy(fields).to(device), torch.from_numpy(table).to(device))


def fill_fields(fields: npt.NDArray[np.int64], seqs: Sequence[SequenceState]) -> None:
    """Write [FIELDS, B] for the sequences' next tokens; rows past the last repeat the first, writing
    nothing.
    """
    count = len(seqs)
    for column, seq in enumerate(seqs):
        fields[:, column] = (
            seq.ids[seq.length],
            seq.length,
            seq.slot,
            seq.encoder_start,
            seq.decoder_start,
            seq.write_from,
            1,
        )
    fields[:, count:] = fields[:, :1]
    fields[WRITES, count:] = 0


class EveryRow(GroupPlan):
    """Groups that each row is taken to complete."""

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """All of them."""
        return rows


class DecodeStep(Step):
    """B rows, one a sequence. `tokens` bounds every position, on the host: entries past it are not looked
    at.
    """

    def __init__(
        self,
        memory: KVMemory,
        config: ModelConfig,
        inputs: DecodeInputs,
        tokens: int,
        spans: Sequence[Span] = (),
    ) -> None:
        self.memory = memory
        self.spans = spans
        self.device = memory.pages.device
        self.direct = True
        self.rows = inputs.fields.shape[1]
        self._inputs = inputs
        self._tokens = tokens
        self._window = config.window
        self._ratios = tuple(sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids}))
        self._groups: dict[int, GroupPlan] = {}
        self._ropes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._group_ropes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, memory: KVMemory, config: ModelConfig, seqs: Sequence[SequenceState]) -> DecodeStep:
        """The step of these sequences' next tokens."""
        spans = [(seq, seq.length, seq.length + 1) for seq in seqs]
        return cls(memory, config, DecodeInputs.of(memory, seqs), max(end for _, _, end in spans), spans)

    @cached_property
    def _tables(self) -> DecodeTables:
        return decode_tables(self._inputs.fields, self._window, self._slot_stride, self._ratios)

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [B]."""
        return self._inputs.fields[ID]

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [B]."""
        return self._inputs.fields[POSITION]

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [B]."""
        return self._inputs.fields[SLOT]

    @cached_property
    def seq(self) -> torch.Tensor:
        """int32 [B]: row b is sequence b."""
        return torch.arange(self.rows, dtype=torch.int32, device=self.device)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """int32 [B, pages]."""
        return self._inputs.page_table

    @cached_property
    def image_mask(self) -> torch.Tensor | None:
        """None: a decoded token is never inside an image."""
        return None

    def visible(self, ratio: int) -> torch.Tensor:
        """int32 [B], as `Step.visible`."""
        return self._tables.visible[self._ratios.index(ratio)]

    def most_visible(self, ratio: int) -> int:
        """The most entries that a row may see at `tokens` tokens."""
        return self._tokens // ratio

    def window_rows(self, decoder: bool) -> torch.Tensor:
        """int32 [B, W], as `Step.window_rows`."""
        return self._tables.window_rows[int(decoder)]

    @cached_property
    def _ring_targets(self) -> torch.Tensor:
        return self._tables.ring_places

    def _plan_groups(self, ratio: int) -> GroupPlan:
        number = self._ratios.index(ratio)
        none = self.seq[:0].to(torch.int64)
        return EveryRow(
            members=none.view(0, ratio),  # `join_groups` and `take` have no use for it
            seq=self.seq,
            entry=self._tables.entries[number],
            positions=self._tables.first[number],
            kept_rows=none,
            kept_slots=none,
            kept_places=none,
        )

    def group_rope(self, ratio: int, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Step.group_rope`, made once."""
        key = (ratio, id(freqs))
        if key not in self._group_ropes:
            made = self.rope(freqs) if ratio == 1 else rope_table(self.groups(ratio).positions, freqs)
            self._group_ropes[key] = made
        return self._group_ropes[key]

    def join_groups(
        self, tail: int, ratio: int, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Step.join_groups`; every row is a group."""
        tails = self.memory.tails[:, tail, :, : ratio - 1]
        return join_tails(kv, gate, tails, self.slots, self._tables.places[self._ratios.index(ratio)])
