"""How the next token is chosen (spec §9).

A choice is a pure function of one row of logits, the parameters and the token's position: each draw is a
hash of (seed, position), so a stream that is resumed elsewhere goes on as it would have, whatever else is in
the batch.

Order: temperature; min-p against the likeliest token; top-k; top-p over what is left; ties always to the
lower id. Log-probabilities are those of the untempered, unfiltered distribution.

Letters: B rows of a step, V vocabulary, K ranked candidates.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from cedar.model.prompt_errors import LogitsError
from cedar.model.sampling_params import SamplingParams
from torch import Tensor

__all__ = ["SampledToken", "SamplingParams", "sample", "sample_batch", "uniform"]

_DRAW_DOMAIN: Final = b"cedar.sampling.v1"
_RANKED: Final = 1024  # candidates that are ranked before a whole row is


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
    finite = logits.isfinite().all(-1)
    if not finite.all():
        raise LogitsError(tuple((~finite).nonzero().flatten().tolist()))
    shifted = logits.double()
    shifted = shifted - shifted.amax(-1, keepdim=True)
    choice = _lowest_id(shifted == 0)
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    if drawn:
        choice[drawn] = _draw(
            shifted[drawn],
            [params[row] for row in drawn],
            [uniform(params[row].seed, positions[row]) for row in drawn],
        )
    # A running sum has one order whatever the batch; a reduction may not.
    logprobs = shifted - shifted.exp().cumsum(-1)[:, -1:].log()
    chosen = logprobs.gather(-1, choice[:, None])[:, 0].float().tolist()
    tops = _alternatives(logprobs, [p.logprobs for p in params])
    return [SampledToken(*token) for token in zip(choice.tolist(), chosen, tops, strict=True)]


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) of 53 random bits: the same for the same arguments everywhere, independent across
    them.

    `stream` separates several draws at one position.
    """
    digest = hashlib.sha256(_DRAW_DOMAIN + struct.pack("<QQQ", seed, position, stream)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)


def _draw(shifted: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> Tensor:
    """Ids `[B]` drawn from float64 `[B, V]` logits whose maximum is 0."""
    like = shifted.new_tensor
    weights = (shifted / like([p.temperature for p in params])[:, None]).exp()
    weights = weights.where(weights >= like([p.min_p for p in params])[:, None], 0.0)
    u = like(draws)
    choice = torch.empty(len(params), dtype=torch.int64, device=shifted.device)
    plain = [row for row, p in enumerate(params) if p.top_k == 0 and p.top_p == 1]
    if plain:
        choice[plain] = _invert(weights[plain].cumsum(-1), u[plain])
    filtered = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1]
    if filtered:
        vocab = shifted.shape[-1]
        top_k = torch.tensor([min(params[row].top_k or vocab, vocab) for row in filtered]).to(shifted.device)
        top_p = like([params[row].top_p for row in filtered])
        choice[filtered] = _draw_ranked(weights[filtered], top_k, top_p, u[filtered], min(_RANKED, vocab))
    return choice


def _draw_ranked(weights: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor, width: int) -> Tensor:
    """Ids `[B]` drawn among the first `top_k` by weight, of those the fewest whose mass reaches `top_p` of
    theirs.

    Ranks `width` candidates; rows whose filters reach past them are ranked whole.
    """
    vocab = weights.shape[-1]
    ranked, ids = _rank(weights, width)
    mass = ranked.cumsum(-1)
    within = mass.gather(-1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    total = torch.where(top_k <= width, within, weights.cumsum(-1)[:, -1])
    wanted = total * top_p
    kept = torch.minimum((mass < wanted[:, None]).sum(-1) + 1, top_k)
    # Which of those that tie with the last candidate are present is arbitrary: none of them may be needed.
    certain = (ranked > ranked[:, -1:]).sum(-1)
    short = (kept > certain) if width < vocab else torch.zeros_like(kept, dtype=torch.bool)
    kept = kept.clamp(max=width)
    mass = mass.minimum(mass.gather(-1, kept[:, None] - 1))
    choice = ids.gather(-1, _invert(mass, u)[:, None])[:, 0]
    if short.any():
        choice[short] = _draw_ranked(weights[short], top_k[short], top_p[short], u[short], vocab)
    return choice


def _rank(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of `[B, V]`, largest first, equal ones by id, with their ids: both `[B, K]`."""
    ids = values.topk(width, sorted=False).indices.sort(-1).values
    ranked, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ranked, ids.gather(-1, order)


def _invert(mass: Tensor, u: Tensor) -> Tensor:
    """First index `[B]` at which the running sum `[B, K]` exceeds the fraction u of its last value."""
    total = mass[:, -1]
    target = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(mass, target[:, None], right=True)[:, 0]


def _lowest_id(mask: Tensor) -> Tensor:
    """The first true index `[B]` of each row of a mask `[B, V]`."""
    vocab = mask.shape[-1]
    return torch.where(mask, torch.arange(vocab, device=mask.device), vocab).amin(-1)


def _alternatives(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """For each row of `[B, V]` its `counts[row]` likeliest ids with their log-probabilities."""
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    for row, count in enumerate(counts):
        if count:
            values = logprobs[row]
            kept = min(count, values.shape[0])
            ids = (values >= values.topk(kept).values[-1]).nonzero()[:, 0]
            ranked, order = values[ids].sort(descending=True, stable=True)
            tops[row] = tuple(zip(ids[order][:kept].tolist(), ranked[:kept].float().tolist(), strict=True))
    return tops
