"""How the next token is chosen (spec §9).

A choice is a pure function of one row of logits, the parameters and the token's position: each draw is a
hash of (seed, position), so a stream that is resumed elsewhere goes on as it would have, whatever else is in
the batch. `kernels.sampling` makes it, exactly alike on every device.

Order: temperature; min-p against the likeliest token; top-k; top-p over what is left; ties always to the
lower id. Log-probabilities are those of the untempered, unfiltered distribution.

Letters: B rows of a step, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cedar.kernels.sampling import ONE, draw_tokens, uniform
from cedar.model.prompt_errors import LogitsError
from cedar.model.sampling_params import SamplingParams
from torch import Tensor

__all__ = ["SampledToken", "SamplingParams", "sample", "sample_batch", "uniform"]


@dataclass(frozen=True)
class SampledToken:
    """A chosen token, its log-probability, and the likeliest alternatives (id, log-probability), likeliest
    first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, params: SamplingParams, position: int) -> SampledToken:
    """The token at `position` (counted from the prompt's first token) from fp32 logits `[V]`. Raises
    `LogitsError`.
    """
    return sample_batch(logits[None], [params], [position])[0]


def sample_batch(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[SampledToken]:
    """One token for each row of fp32 logits `[B, V]`. A row's token does not depend on the other rows.

    Raises `LogitsError`, naming the rows, when any logit is NaN or infinite; no row is then sampled.
    """
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows, {len(params)} params, {len(positions)} positions")
    draws = draw_tokens(logits, *_rules(params, positions, logits.device)).packed.cpu().numpy()
    if (draws[0] < 0).any():
        raise LogitsError(tuple((draws[0] < 0).nonzero()[0].tolist()))
    chosen, greatest, mass = draws[1:].view(np.float64)
    below = [math.log(m / ONE) for m in mass]
    logprobs = (chosen - greatest - below).astype(np.float32)
    tops = [
        _alternatives(logits[row], p.logprobs, greatest[row] + below[row]) if p.logprobs else ()
        for row, p in enumerate(params)
    ]
    return [SampledToken(*token) for token in zip(draws[0].tolist(), logprobs.tolist(), tops, strict=True)]


def _rules(
    params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """seeds, positions, temperatures, top_k, top_p, min_p [B] on `device`, moved in one piece."""
    rules = np.empty((6, len(params)), np.int64)
    fractions = rules.view(np.float64)
    rules[0] = np.array([p.seed for p in params], np.uint64).view(np.int64)
    rules[1] = positions
    rules[3] = [p.top_k for p in params]
    fractions[2] = [p.temperature for p in params]
    fractions[4] = [p.top_p for p in params]
    fractions[5] = [p.min_p for p in params]
    moved = torch.from_numpy(rules).to(device)
    real = moved.view(torch.float64)
    return moved[0], moved[1], real[2], moved[3], real[4], real[5]


def _alternatives(row: Tensor, count: int, whole: float) -> tuple[tuple[int, float], ...]:
    """The likeliest `count` ids of logits fp32 [V] with their log-probabilities; exp(whole) is all their
    mass."""
    kept = min(count, row.shape[0])
    ids = (row >= row.topk(kept).values[-1]).nonzero()[:, 0]
    ranked, order = row[ids].sort(descending=True, stable=True)
    values = (ranked[:kept].double() - whole).float()
    return tuple(zip(ids[order][:kept].tolist(), values.tolist(), strict=True))
