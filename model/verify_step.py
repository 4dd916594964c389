"""Several tokens of a sequence in one step, of which only a beginning may stay (spec §9).

A rejected row must leave nothing behind that a later one could read. Window rings would lose rows that are
still needed (position i overwrites i-W), and tails those of an open group. So a `VerifyStep` puts its window
keys behind the rings, where its own rows find them, and keeps what groups are made of; `commit` moves what
belongs to the rows that stay. Entries of global keys go to their pages at once, since later rows of the same
step read them: those of rejected groups lie beyond what any row may see, and the tokens that come instead
write them anew.

Nothing here depends on values, only on shapes, so that a step may be captured in a CUDA graph and replayed:
every row is taken to complete a group (its entry is -1 where it does not), and a sequence with fewer rows
than others repeats its last one.

Letters: S sequences, N rows, W window, B bytes of a window row, m a source's ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from cedar.kernels.decode_tables import DECODER_START, ENCODER_START, POSITION, SLOT, WRITE_FROM, WRITES
from cedar.kernels.move_rows import move_rows
from cedar.model.config import ModelConfig
from cedar.model.decode_step import DecodeInputs, EveryRow
from cedar.model.draft import DraftRings
from cedar.model.errors import InputError
from cedar.model.state import KVMemory
from cedar.model.step import GroupPlan, Step, WindowPlan


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Which rows a step of several rows a sequence has; all int64, on the memory's device."""

    ids: torch.Tensor  # [N]
    seq: torch.Tensor  # [N]
    place: torch.Tensor  # [N], how far behind its sequence's first row
    real: torch.Tensor  # bool [N]; others repeat a row and write nothing
    first: torch.Tensor  # [S], each sequence's first row

    @classmethod
    def tight(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> BlockRows:
        """As many rows of each sequence as it has tokens."""
        counts = torch.tensor([len(some) for some in tokens])
        seq = torch.repeat_interleave(torch.arange(len(tokens)), counts)
        first = counts.cumsum(0) - counts
        ids = torch.tensor([token for some in tokens for token in some])
        place = torch.arange(len(ids)) - first[seq]
        real = torch.ones(len(ids), dtype=torch.bool)
        return cls(*(part.to(device) for part in (ids, seq, place, real, first)))

    @classmethod
    def padded(cls, ids: torch.Tensor, counts: torch.Tensor) -> BlockRows:
        """`ids` [S, R]: the first `counts` [S], at least one, are a sequence's; the last is repeated."""
        count, block = ids.shape
        number = torch.arange(count * block, device=ids.device)
        seq, place = torch.div(number, block, rounding_mode="floor"), number % block
        real, last = place < counts[seq], counts[seq] - 1
        place = torch.minimum(place, last)
        return cls(ids.flatten()[seq * block + place], seq, place, real, number[::block])


class VerifyStep(Step):
    """A step whose ring and tail writes wait for `commit`. `tokens` bounds every position, on the host."""

    def __init__(
        self, memory: KVMemory, config: ModelConfig, inputs: DecodeInputs, rows: BlockRows, tokens: int
    ) -> None:
        self.memory = memory
        self.spans = ()
        self.device = memory.pages.device
        self.direct = False
        self.rows = rows.ids.shape[0]
        self._fields = inputs.fields
        self._page_table = inputs.page_table
        self._block = rows
        self._tokens = tokens
        self._window = config.window
        self._groups: dict[int, GroupPlan] = {}
        self._window_rows: dict[bool, torch.Tensor] = {}
        self._ropes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._group_ropes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._visible: dict[int, torch.Tensor] = {}
        self._tails: dict[int, tuple[int, torch.Tensor]] = {}
        room = (memory.ring_storage.shape[0] - memory.rings.shape[0]) * config.window
        if room < self.rows:
            raise InputError(
                "proposed", self.rows, f"at most {room} rows in one step, as this memory has room"
            )

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [N]."""
        return self._block.ids

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [N]."""
        return self._of_rows(POSITION) + self._block.place

    @cached_property
    def seq(self) -> torch.Tensor:
        """int64 [N], index into the step's sequences."""
        return self._block.seq

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [S]."""
        return self._fields[SLOT]

    @cached_property
    def page_table(self) -> torch.Tensor:
        """int32 [S, pages]."""
        return self._page_table

    @cached_property
    def image_mask(self) -> torch.Tensor | None:
        """None: a decoded token is never inside an image."""
        return None

    def visible(self, ratio: int) -> torch.Tensor:
        """int64 [N], as `Step.visible`."""
        if ratio not in self._visible:
            self._visible[ratio] = torch.div(self.positions + 1, ratio, rounding_mode="floor")
        return self._visible[ratio]

    def most_visible(self, ratio: int) -> int:
        """The most entries that a row may see at `tokens` tokens."""
        return self._tokens // ratio

    @property
    def may_expand(self) -> bool:
        """False: made by shapes alone, for a graph."""
        return False

    def open_window(self, layer: int) -> WindowPlan:
        """As `Step.open_window`: the step's rows go behind the rings."""
        return WindowPlan(self.memory.ring_storage.flatten(0, 2)[layer * self._window :], self._own_places)

    def write_tails(self, tail: int, ratio: int, kv: torch.Tensor, gate: torch.Tensor) -> None:
        """Keep what a source's groups are made of, fp32 [N, D] each."""
        self._tails[tail] = (ratio, torch.stack((kv, gate), 1))

    def group_rope(self, ratio: int, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Step.group_rope`, made once."""
        key = (ratio, id(freqs))
        if key not in self._group_ropes:
            self._group_ropes[key] = self.rope(freqs) if ratio == 1 else super().group_rope(ratio, freqs)
        return self._group_ropes[key]

    def commit(self, kept: torch.Tensor) -> None:
        """Write rings and tails as if only the first `kept` int64 [S] rows of each sequence had run."""
        stays, slots = self.staying(kept, self._window), self.slots[self.seq]
        rows = self.memory.ring_storage.flatten(0, 2)
        layer = torch.arange(self.memory.rings.shape[1], device=self.device).unsqueeze(1) * self._window
        places = slots * self._slot_stride + self.positions % self._window
        goal = torch.where(stays, layer + places, -1)
        move_rows(rows, (layer + self._own_places).flatten(), rows, goal.flatten())
        self._commit_tails(kept, slots)

    def staying(self, kept: torch.Tensor, most: int) -> torch.Tensor:
        """bool [N]: the last rows, at most `most`, of the first `kept` of each sequence."""
        count, place = kept[self.seq], self._block.place
        return self._writes & (place < count) & (place >= count - most)

    def _commit_tails(self, kept: torch.Tensor, slots: torch.Tensor) -> None:
        tails = self.memory.tails
        _, sources, halves, depth, width = tails.shape
        half = torch.arange(halves, device=self.device)
        number = torch.arange(self.rows, device=self.device).unsqueeze(1)
        end = self._fields[POSITION] + kept
        for tail, (ratio, values) in self._tails.items():
            stays = self.staying(kept, self.rows) & (self.positions >= (end - end % ratio)[self.seq])
            places = ((slots * sources + tail).unsqueeze(1) * halves + half) * depth
            places = places + (self.positions % ratio).unsqueeze(1)
            move_rows(
                values.view(torch.uint8).view(-1, 4 * width),
                (number * halves + half).flatten(),
                tails.view(torch.uint8).view(-1, 4 * width),
                torch.where(stays.unsqueeze(1), places, -1).flatten(),
            )

    def _of_rows(self, field: int) -> torch.Tensor:
        return self._fields[field][self.seq]

    @cached_property
    def _writes(self) -> torch.Tensor:
        return self._block.real & (self._of_rows(WRITES) > 0)

    @cached_property
    def _own_places(self) -> torch.Tensor:
        """int64 [N], ring rows of layer 0 where the step's own keys are."""
        return self._place_of(torch.arange(self.rows, device=self.device))

    def _place_of(self, row: torch.Tensor) -> torch.Tensor:
        slot = self.memory.rings.shape[0] + torch.div(row, self._window, rounding_mode="floor")
        return slot * self._slot_stride + row % self._window

    def _plan_window(self, decoder: bool) -> torch.Tensor:
        window, begin = self._window, self._of_rows(POSITION).unsqueeze(1)
        lower = self._of_rows(DECODER_START if decoder else ENCODER_START).clamp_min(0).unsqueeze(1)
        read = self.positions.unsqueeze(1) + torch.arange(1 - window, 1, device=self.device)
        own = self._place_of((self._block.first[self.seq].unsqueeze(1) + read - begin).clamp_min(0))
        ring = (self.slots[self.seq] * self._slot_stride).unsqueeze(1) + read % window
        return torch.where(read >= lower, torch.where(read >= begin, own, ring), -1)

    def _plan_groups(self, ratio: int) -> GroupPlan:
        begin, first = self._of_rows(POSITION).unsqueeze(1), self._block.first[self.seq].unsqueeze(1)
        end = self.positions + 1
        closes = (end % ratio == 0) & (end > self._of_rows(WRITE_FROM)) & self._writes
        member = self.positions.unsqueeze(1) + torch.arange(1 - ratio, 1, device=self.device)
        kept = ratio - 1  # tokens that a tail holds
        in_tail = self.seq.unsqueeze(1) * kept + (member % ratio).clamp_max(max(0, kept - 1))
        in_chunk = self.slots.shape[0] * kept + first + member - begin
        none = self.positions[:0]
        return EveryRow(
            members=torch.where(member >= begin, in_chunk, in_tail),
            seq=self.seq,
            entry=torch.where(closes, torch.div(self.positions, ratio, rounding_mode="floor"), -1),
            positions=(end - ratio).clamp_min(0),
            kept_rows=none,
            kept_slots=none,
            kept_places=none,
        )


def commit_rows(
    step: VerifyStep, taps: Sequence[torch.Tensor], rings: DraftRings | None, kept: torch.Tensor
) -> None:
    """`VerifyStep.commit`, and the same for the draft rings, of the taps that the step left."""
    step.commit(kept)
    if rings is not None:
        stays = step.staying(kept, rings.window)
        rings.write(step.memory, taps, step.slots[step.seq], step.positions, stays)
