"""Some rows of each sequence of a step, by their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cedar.model.step import Step


def rows_of(step: Step, each: Sequence[range]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, slots and positions int64 [n], on the step's device, of rows `each` of its sequences, counted
    from the first of the sequence.
    """
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    offset = 0
    for (seq, begin, end), rows in zip(step.spans, each, strict=True):
        columns[0].extend(offset + row for row in rows)
        columns[1].extend([seq.slot] * len(rows))
        columns[2].extend(begin + row for row in rows)
        offset += end - begin
    rows, slots, positions = torch.tensor(columns, dtype=torch.int64).to(step.device)
    return rows, slots, positions


def last(counts: Sequence[int], most: int) -> list[range]:
    """The last rows, at most `most`, of the first `counts` of each sequence."""
    return [range(max(0, count - most), count) for count in counts]
