"""What the backbone says of proposed tokens, and keeping what it agrees with (spec §9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cedar.model.decode_step import DecodeInputs
from cedar.model.draft import DraftRings
from cedar.model.errors import InputError
from cedar.model.state import KVMemory, SequenceState
from cedar.model.text import TextNetwork
from cedar.model.verify_step import BlockRows, VerifyStep, commit_rows


@dataclass(frozen=True, eq=False)
class Verification:
    """What the backbone says of proposals. Nothing of the sequences has changed until `commit`."""

    logits: torch.Tensor  # fp32 [N, V], rows of the sequences one after the other
    rows: tuple[range, ...]  # of each sequence: that of its last token, then those of its proposals
    seqs: tuple[SequenceState, ...]
    write: Callable[[Sequence[int]], None]  # lets the first rows of each sequence have run

    def commit(self, kept: Sequence[int]) -> None:
        """Let the first `kept` rows of each sequence have run, at least one of each; lengths grow by it.

        Raises InputError.
        """
        for number, (count, rows) in enumerate(zip(kept, self.rows, strict=True)):
            if not 1 <= count <= len(rows):
                raise InputError(f"kept[{number}]", count, f"from 1 to {len(rows)}")
        self.write(kept)
        for seq, count in zip(self.seqs, kept, strict=True):
            seq.length += count
            seq.tail = None


def verify_rows(
    text: TextNetwork,
    memory: KVMemory,
    seqs: Sequence[SequenceState],
    tokens: Sequence[Sequence[int]],
    rings: DraftRings | None,
) -> Verification:
    """Run `tokens` of each sequence, which are its `ids` from `length` on, through every layer."""
    spans = [(seq, seq.length, seq.length + len(some)) for seq, some in zip(seqs, tokens, strict=True)]
    device, most = memory.pages.device, max(end for _, _, end in spans)
    rows, inputs = BlockRows.tight(tokens, device), DecodeInputs.of(memory, seqs)
    step = VerifyStep(memory, text.config, inputs, rows, most)
    taps: list[torch.Tensor] | None = None if rings is None else []
    streams, pre = text.embed(step, None)
    engram, layers = text.look_up_spans(spans), range(text.config.layers)
    streams, pre = text.run(streams, pre, step, layers, taps=taps, engram=engram)

    def write(kept: Sequence[int]) -> None:
        commit_rows(step, taps or [], rings, torch.tensor(kept).to(device))

    return Verification(text.logits(streams, pre), consecutive(tokens), tuple(seqs), write)


def consecutive(tokens: Sequence[Sequence[int]]) -> tuple[range, ...]:
    """Rows of each sequence where all of them lie one after the other."""
    firsts = [0, *itertools.accumulate(len(some) for some in tokens)]
    return tuple(range(a, b) for a, b in itertools.pairwise(firsts))


def rows_kept(proposed: Sequence[int], said: Sequence[int]) -> int:
    """How many rows stay when the backbone's own choices are `said`: the proposals that it agrees with in a
    row, and the row of the token before them.

    `said[i]` is what it chose after row i; it may be shorter than the rows when the sequence ends early.
    """
    agreed = 0
    while agreed + 1 < len(said) and agreed < len(proposed) and said[agreed] == proposed[agreed]:
        agreed += 1
    return agreed + 1
