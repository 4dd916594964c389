"""Truth for index scores: sum_h w[h]·relu(q[h]·k), float64 (spec §3).

Products of packed FP4 values with power-of-two scales are exact in float64, so q·k does not depend on its
order of summation; the sum over heads runs in one fixed order. So equal keys score equally, wherever they
stand.

Letters: S sequences with T tokens each, Hi heads, Di channels, M entries.
"""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, paging_ref

BLOCK_ELEMENTS = 1 << 22  # float64 values held at a time


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over axis -2, halves added to halves: one order for every column, however many there are."""
    while (heads := x.shape[-2]) > 1:
        half = heads // 2
        low, high, odd = x[..., :half, :], x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = torch.cat((low + high, odd), -2) if heads % 2 else low + high
    return x.squeeze(-2)


def weigh(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores [S, T, M] of q [S, T, Hi, Di] against keys [S, M, Di] with head weights [S, T, Hi], float64."""
    products = (q.flatten(1, 2) @ keys.transpose(1, 2)).view(*q.shape[:3], keys.shape[1])
    return tree_sum(products.relu_().mul_(weights.unsqueeze(-1)))


def score_sequences(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    planes: paging_ref.Planes,
    page_table: torch.Tensor,
    visible: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """float64 [S, T, count]: q [S, T, Hi, Di] over sequences of page_table [S, maxp]; visible [S, T]."""
    sequences, tokens, heads, width = q.shape
    out = torch.empty(sequences, tokens, count, dtype=torch.float64, device=q.device)
    some = max(1, BLOCK_ELEMENTS // (count * max(width, tokens * heads)))  # sequences at a time
    part = max(1, BLOCK_ELEMENTS // (count * heads))  # tokens of each at a time
    for s in range(0, sequences, some):
        here = slice(s, s + some)
        rows = paging_ref.gather_prefix(pages, planes, page_table[here], visible[here].amax(1), count)
        keys = fp4_ref.unpack_e8m0(rows[0], rows[1], torch.float64)
        for t in range(0, tokens, part):
            out[here, t : t + part] = weigh(q[here, t : t + part], keys, weights[here, t : t + part])
    return out


def scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    planes: paging_ref.Planes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    visible: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """float64 [N, width], -inf where not visible; q float64 [N, Hi, Di]. Unpacks keys once a sequence."""
    paging_ref.check_range("seq", seq, 0, page_table.shape[0])
    out = torch.full((q.shape[0], width), -torch.inf, dtype=torch.float64, device=q.device)
    if width == 0 or q.shape[0] == 0:
        return out
    runs, lengths = (t.tolist() for t in torch.unique_consecutive(seq, return_counts=True))
    if len(set(lengths)) == 1:  # one sequence's chunk, or a step of as many tokens of each
        runs, lengths = [runs], lengths[:1]
    else:
        runs = [[run] for run in runs]
    start = 0
    for members, tokens in zip(runs, lengths, strict=True):
        here = slice(start, start + len(members) * tokens)
        start = here.stop
        shape = (len(members), tokens)
        seen = visible[here].view(shape)
        count = int(seen.max())
        if count > 0:
            args = (q[here].view(*shape, *q.shape[1:]), weights[here].view(*shape, -1), pages, planes)
            out[here, :count] = score_sequences(*args, page_table[members], seen, count).flatten(0, 1)
    columns = torch.arange(width, device=q.device)
    return out.masked_fill_(columns >= visible.unsqueeze(-1), -torch.inf)


def scores_gathered(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    planes: paging_ref.Planes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    candidates: torch.Tensor,
) -> torch.Tensor:
    """float64 [N, C], -inf at pads: only the candidates' keys are read."""
    out = torch.empty(candidates.shape, dtype=torch.float64, device=q.device)
    step = max(1, BLOCK_ELEMENTS // max(1, q.shape[2] * candidates.shape[1]))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        rows = paging_ref.gather(pages, planes, page_table, seq[part], candidates[part], "candidates")
        keys = fp4_ref.unpack_e8m0(rows[0], rows[1], torch.float64)
        out[part] = weigh(q[part].unsqueeze(1), keys, weights[part].unsqueeze(1)).squeeze(1)
    return out.masked_fill_(candidates < 0, -torch.inf)
