"""Truth for the choice of the next token.

All that is not integer arithmetic is an fp32 (weights) or float64 (three products a row) operation that
IEEE 754 rounds in one way, in the order written here: no fused multiply-add, no library function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

ONE: Final = 1 << 44  # the weight of the likeliest id
LOG2_E: Final = 1.4426950408889634
# 2^f for f in [-1/2, 1/2], lowest power first: ln(2)^k / k!
POWERS: Final = (
    1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477,
    0.0013333558146428443, 0.00015403530393381609, 1.525273380405984e-05,
)  # fmt: skip
STREAM_TAG: Final = 0x43454452  # the last word of the hash's counter, beside `stream`

_MASK: Final = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds: four words of 32 bits."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ low, second & _MASK, (first >> 32) ^ d ^ high, first & _MASK
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return a, b, c, d


def bits(seed: int, position: int, stream: int = 0) -> int:
    """53 random bits of these arguments, each of 64, 64 and 32 bits."""
    counter = (position & _MASK, position >> 32 & _MASK, stream & _MASK, STREAM_TAG)
    first, second, _, _ = philox(counter, (seed & _MASK, seed >> 32 & _MASK))
    return (second << 32 | first) >> 11


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) of 53 random bits: the same for the same arguments everywhere, independent
    across them.

    `stream` separates several draws at one position.
    """
    return bits(seed, position, stream) / (1 << 53)


def weigh(below: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int64 2^44·2^(below·scale), rounded down, of fp32 `below` at most 0 and `scale` =
    log2(e)/temperature.
    """
    z = (below * scale).clamp_min(-100.0)
    whole = torch.floor(z + 0.5)
    f = z - whole
    p = torch.full_like(f, POWERS[-1])
    for coefficient in reversed(POWERS[:-1]):
        p = p * f + coefficient
    fixed = (p * 16_777_216.0).to(torch.int64) << 20
    return fixed >> (-whole).to(torch.int64).clamp_max(63)


def draw_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    stream: int,
) -> torch.Tensor:
    """int64 [4, B]: ids, then the bits of float64: the id's logit, the greatest logit, the mass."""
    rows = logits + 0.0  # no negative zeros
    finite = rows.isfinite().all(1)
    rows = rows.where(finite[:, None], 0.0)
    greatest = rows.amax(1, keepdim=True)
    below = rows - greatest
    mass = weigh(below, torch.tensor(LOG2_E, dtype=torch.float32)).sum(1)
    place = torch.arange(rows.shape[1], device=rows.device)
    ids = torch.where(below == 0, place, rows.shape[1]).amin(1)
    drawn = torch.nonzero(finite & (temperatures > 0)).squeeze(1)
    if drawn.numel():
        scales = (LOG2_E / temperatures[drawn]).to(torch.float32)[:, None]
        weights = weigh(below[drawn], scales)
        least = torch.ceil(min_p[drawn] * ONE).to(torch.int64)[:, None]
        weights = weights.where(weights >= least, 0)
        numbers = zip(seeds[drawn].tolist(), positions[drawn].tolist(), strict=True)
        random = torch.tensor([uniform(*number, stream) for number in numbers], dtype=torch.float64)
        ids[drawn] = _choose(rows[drawn], weights, random.to(rows.device), top_k[drawn], top_p[drawn])
    chosen = rows.gather(1, ids[:, None]).squeeze(1)
    told = torch.stack((chosen.double(), greatest.squeeze(1).double(), mass.double()))
    told = told.where(finite, 0.0)
    return torch.cat((ids.where(finite, -1)[None], told.view(torch.int64)))


def _choose(
    rows: torch.Tensor, weights: torch.Tensor, random: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The ids int64 [B] drawn among those of weights int64 [B, V]."""
    vocabulary = rows.shape[1]
    order = torch.arange(vocabulary, device=rows.device).expand_as(rows)
    kept = torch.full_like(top_k, vocabulary)
    ranked = torch.nonzero((top_k > 0) | (top_p < 1)).squeeze(1)
    if ranked.numel():
        order = order.clone()
        order[ranked] = rows[ranked].sort(dim=1, descending=True, stable=True).indices
    mass = weights.gather(1, order).cumsum(1)
    if ranked.numel():
        running, k = mass[ranked], top_k[ranked]
        some = torch.where(k > 0, k, vocabulary).clamp_max(vocabulary)
        total = running.gather(1, some[:, None] - 1).squeeze(1)
        wanted = _part(total, top_p[ranked], torch.ceil, 0)
        kept[ranked] = torch.minimum(some, (running < wanted[:, None]).sum(1) + 1)
    total = mass.gather(1, kept[:, None] - 1).squeeze(1)
    target = _part(total, random, torch.floor, 1)
    return order.gather(1, (mass <= target[:, None]).sum(1, keepdim=True)).squeeze(1)


def _part(
    mass: torch.Tensor,
    fraction: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor],
    short: int,
) -> torch.Tensor:
    """int64: `fraction` of a mass by the float64 product, made whole, and at least `short` less than all
    of it.
    """
    return torch.minimum(rounded(mass.to(torch.float64) * fraction).to(torch.int64), mass - short)
