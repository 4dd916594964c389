"""Several tokens of a sequence in one step, of which only a beginning may stay (spec §9).

A rejected row must leave nothing behind that a later one could read. Window rings would lose rows that are
still needed (position i overwrites i-W), and tails those of an open group, so a `VerifyStep` keeps what it
would write and `Verification.commit` writes it for the rows that stay. Entries of global keys go to their
pages at once, since later rows of the same step read them: those of rejected groups lie beyond what any row
may see, and the tokens that come instead write them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from cedar.kernels.latents import Staging
from cedar.model.config import ModelConfig
from cedar.model.draft import DraftRings
from cedar.model.errors import InputError
from cedar.model.state import KVMemory
from cedar.model.step import Span, Step, WindowPlan
from cedar.model.step_rows import last, rows_of


class VerifyStep(Step):
    """A step whose ring and tail writes wait for `commit`."""

    def __init__(self, memory: KVMemory, config: ModelConfig, spans: Sequence[Span]) -> None:
        super().__init__(memory, config, spans)
        self.direct = False  # also with one row a sequence: nothing may be written before its time
        self._rings: dict[int, torch.Tensor] = {}
        self._tails: dict[int, tuple[int, torch.Tensor]] = {}

    def open_window(self, layer: int) -> WindowPlan:
        """As `Step.open_window`, with rings that are only read."""
        buffer, places, staging = super().open_window(layer)
        assert staging is not None
        rings, sources = staging.rings, self._every_source
        return WindowPlan(buffer, places, Staging(rings, sources, torch.full_like(places, -1), self._saved))

    @cached_property
    def _every_source(self) -> torch.Tensor:
        first = (self.slots * self._slot_stride).unsqueeze(1)
        return (first + torch.arange(self._window, device=self.device)).flatten()

    def close_window(self, layer: int, buffer: torch.Tensor) -> None:
        """Keep the layer's window rows uint8 [N, B]."""
        self._rings[layer] = buffer[-self.rows :]

    def write_tails(self, tail: int, ratio: int, kv: torch.Tensor, gate: torch.Tensor) -> None:
        """Keep what a source's groups are made of, fp32 [N, D] each."""
        self._tails[tail] = (ratio, torch.stack((kv, gate), 1))

    def commit(self, kept: Sequence[int]) -> None:
        """Write rings and tails as if only the first `kept` rows of each sequence had run."""
        rows, slots, places = rows_of(self, last(kept, self._window))
        layers = torch.tensor(sorted(self._rings), device=self.device)
        written = torch.stack([self._rings[layer][rows] for layer in sorted(self._rings)], 1)
        self.memory.rings[slots.unsqueeze(1), layers, (places % self._window).unsqueeze(1)] = written
        for tail, (ratio, values) in self._tails.items():
            open_rows = []
            for (_, begin, _), count in zip(self.spans, kept, strict=True):
                group = (begin + count) // ratio * ratio
                open_rows.append(range(max(0, group - begin), count))
            rows, slots, places = rows_of(self, open_rows)
            self.memory.tails[slots, tail, :, places % ratio] = values[rows]


@dataclass(frozen=True, eq=False)
class Verification:
    """What the backbone says of proposals. Nothing of the sequences has changed until `commit`."""

    logits: torch.Tensor  # fp32 [N, V], rows of the sequences one after the other
    rows: tuple[range, ...]  # of each sequence: that of its last token, then those of its proposals
    step: VerifyStep
    taps: list[torch.Tensor]
    rings: DraftRings | None

    def commit(self, kept: Sequence[int]) -> None:
        """Let the first `kept` rows of each sequence have run, at least one of each; lengths grow by it.

        Raises InputError.
        """
        for number, (count, rows) in enumerate(zip(kept, self.rows, strict=True)):
            if not 1 <= count <= len(rows):
                raise InputError(f"kept[{number}]", count, f"from 1 to {len(rows)}")
        self.step.commit(kept)
        if self.rings is not None:
            some = rows_of(self.step, last(kept, self.rings.window))
            self.rings.write(self.step.memory, self.taps, *some)
        for (seq, _, _), count in zip(self.step.spans, kept, strict=True):
            seq.length += count
            seq.tail = None


def rows_kept(proposed: Sequence[int], said: Sequence[int]) -> int:
    """How many rows stay when the backbone's own choices are `said`: the proposals that it agrees with in a
    row, and the row of the token before them.

    `said[i]` is what it chose after row i; it may be shorter than the rows when the sequence ends early.
    """
    agreed = 0
    while agreed + 1 < len(said) and agreed < len(proposed) and said[agreed] == proposed[agreed]:
        agreed += 1
    return agreed + 1
