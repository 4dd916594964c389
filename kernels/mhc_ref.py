"""Truth for the mHC streams: the mix (z in float64, then all fp32), collapse and expand (spec §3, §6).

Sums over the streams run from first to last, so that no result depends on how a reduction is vectorised.
"""

from __future__ import annotations

from functools import cache

import torch

VECTORS = 64  # elements: a multiple of every CPU's unrolled vector
SERIAL = 16384  # elements: few enough that torch does not share them out over threads


def ordered_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along `dim`, kept as 1, from first to last, one addition at a time."""
    total, *rest = x.unbind(dim)
    for part in rest:
        total = total + part
    return total.unsqueeze(dim)


def few_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same for at most four values."""
    return x.sum(dim, keepdim=True)


@cache
def part_of_column(hc: int, device: torch.device) -> torch.Tensor:
    """int64 [(2+hc)·hc]: 0, 1 or 2 for columns of z that belong to pre, post or comb."""
    return torch.tensor([0] * hc + [1] * hc + [2] * hc * hc, device=device)


@cache
def constant(value: float, device: torch.device) -> torch.Tensor:
    """A fp32 scalar on the device: adding it costs half of what adding a Python number does."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch.sigmoid of fp32 x, every element by the vector path.

    On CPUs torch computes what is left over after whole vectors, at the end of each thread's share, by
    another formula, an ulp apart: a token's result would depend on how many tokens follow it.
    """
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[0] % VECTORS))
    parts = [torch.sigmoid(part) for part in torch.split(padded, SERIAL)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: flat.shape[0]].view(x.shape)


def mix(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    hc_eps: float,
    rounds: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [N, hc], post [N, hc], comb [N, hc, hc] fp32 of streams x bf16 [N, hc, d]."""
    hc = x.shape[1]
    flat = x.flatten(1).to(torch.float64)
    rms = torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)
    z = ((flat @ fn.to(torch.float64).T) * rms).to(torch.float32)
    z = z * scale[part_of_column(hc, x.device)] + base
    gates = sigmoid(z[:, : 2 * hc])
    comb = sinkhorn(z[:, 2 * hc :].view(z.shape[0], hc, hc), hc_eps, rounds)
    return gates[:, :hc] + hc_eps, gates[:, hc:] * 2, comb


def sinkhorn(logits: torch.Tensor, hc_eps: float, rounds: int) -> torch.Tensor:
    """Softmax over the last axis, + hc_eps, columns normalised; then rows and columns `rounds`-1 times.

    Up to four values torch's own sum adds first to last in every layout (a test holds it to that), in one
    call.
    """
    total = few_sum if logits.shape[-1] <= 4 else ordered_sum
    eps = constant(hc_eps, logits.device)
    c = torch.exp(logits - logits.amax(-1, keepdim=True))
    c.div_(total(c, -1)).add_(eps)
    c.div_(total(c, -2).add_(eps))
    for _ in range(rounds - 1):
        c.div_(total(c, -1).add_(eps))
        c.div_(total(c, -2).add_(eps))
    return c


def collapse(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """bf16 [N, d]: ((pre0·X0 + pre1·X1) + pre2·X2) + pre3·X3."""
    return ordered_sum(x.to(torch.float32) * pre.unsqueeze(-1), 1).squeeze(1).to(x.dtype)


def expand(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """bf16 [N, hc, d]: X[t] = ((c0·X0 + c1·X1) + c2·X2) + c3·X3 + post[t]·y, with c_s = comb[s, t]."""
    terms = comb.unsqueeze(-1) * x.to(torch.float32).unsqueeze(2)  # [N, s, t, d]
    mixed = ordered_sum(terms, 1).squeeze(1)
    return (mixed + post.unsqueeze(-1) * y.to(torch.float32).unsqueeze(1)).to(x.dtype)
