"""The choice of the next token: temperature, min-p, top-k, top-p and a seeded draw, one launch on a GPU (spec
§9).

The choice is exact: weights are integers made by fp32 operations in one stated order, their sums are
integers, and the draw is an integer hash. So one row, seed and position give one token, on every device,
whatever else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import sampling_ref
from cedar.kernels.contract import Contract
from cedar.kernels.sampling_ref import ONE, uniform

__all__ = ["MAX_VOCABULARY", "ONE", "Draws", "draw_tokens", "uniform"]

MAX_VOCABULARY = 1 << 18  # so that the sum of the greatest weights stays in int64


class Draws(NamedTuple):
    """What was drawn for B rows, as one tensor, so that one copy brings it to the host.

    The id's log-probability is chosen - greatest - ln(mass / `ONE`).
    """

    packed: torch.Tensor  # int64 [4, B]: ids, then the bits of the three below

    @property
    def ids(self) -> torch.Tensor:
        """int64 [B], -1 where a logit of the row is not finite."""
        return self.packed[0]

    @property
    def chosen(self) -> torch.Tensor:
        """float64 [B], the id's logit."""
        return self.packed[1].view(torch.float64)

    @property
    def greatest(self) -> torch.Tensor:
        """float64 [B], the row's greatest logit."""
        return self.packed[2].view(torch.float64)

    @property
    def mass(self) -> torch.Tensor:
        """float64 [B], sum of exp(logit - greatest) in units of 1/`ONE`."""
        return self.packed[3].view(torch.float64)


def draw_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    stream: int = 0,
) -> Draws:
    """One token for each row of logits fp32 [B, V].

    seeds (64 bits), positions, top_k (0: all) int64 [B]; temperatures (0: the likeliest, ties to the lower
    id), top_p (1: all), min_p float64 [B]. An id's weight is 2^44·exp((logit - greatest)/temperature),
    rounded down; ids whose weight is below min_p of the greatest's have none. Ranked by logit, ties to the
    lower id, the first top_k stay, and of those the fewest whose weights reach top_p of theirs. The draw
    takes the first id at which the running sum exceeds uniform(seed, position, stream) times the sum: by id
    where neither top_k nor top_p filters, else by rank.
    """
    c = Contract("draw_tokens")
    c.expect("logits", logits, "B V", torch.float32)
    for name, values in (("seeds", seeds), ("positions", positions), ("top_k", top_k)):
        c.expect(name, values, "B", torch.int64)
    for name, values in (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p)):
        c.expect(name, values, "B", torch.float64)
    c.require("logits", 0 < c.dims["V"] <= MAX_VOCABULARY, f"must have 1 to {MAX_VOCABULARY} columns")
    rules = (seeds, positions, temperatures, top_k, top_p, min_p)
    if logits.is_cuda:
        from cedar.kernels import sampling_triton

        return Draws(sampling_triton.draw_tokens(logits, *rules, stream))
    return Draws(sampling_ref.draw_tokens(logits, *rules, stream))
