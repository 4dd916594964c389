"""Benchmark cases: the top 512 of each row by flashinfer beside ours, on the same scores.

Ours gives int32 positions in ascending order, ties to the lower one. flashinfer's `top_k` gives values and
int64 positions in no order, ties to any; with its tie-break it chooses the set that ours does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch
from cedar.kernels.select_triton import top_k
from cedar.ops.bench.kernel_timing import Case

K = 512
ALGORITHM = "FLASHINFER_TOPK_ALGO"
SHAPES = tuple((rows, count) for count in (16_384, 131_072, 1_048_576) for rows in (1, 64))
Select = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]  # scores, k: values, positions


def wrong_choices(scores: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> float:
    """How many of the positions chosen [N, k] are not among the k greatest of their row of scores [N, M].

    Ties may go to any; values must be those at the positions, and no position may come twice.
    """
    right = torch.topk(scores, positions.shape[1], dim=1).values
    inside = (positions >= 0) & (positions < scores.shape[1])
    at = scores.gather(1, positions.long().clamp(0, scores.shape[1] - 1))
    ordered = positions.sort(1).values
    return float(
        (~inside).sum()
        + (at.sort(1, descending=True).values != right).sum()
        + (values != at).sum()
        + (ordered[:, 1:] == ordered[:, :-1]).sum()
    )


def wrong_set(scores: torch.Tensor, positions: torch.Tensor) -> float:
    """How many positions differ from ours once sorted: ties to the lower position."""
    return float((positions.sort(1).values != top_k(scores, positions.shape[1])).sum())


def check(select: Select, scores: torch.Tensor, exact: bool) -> float:
    """Errors on scores [N, M] as they are and with many ties."""
    wrong = 0.0
    for some in (scores[:4], (scores[:4] * 4).round()):
        values, positions = select(some.contiguous(), K)
        wrong += wrong_choices(some, values, positions) + (wrong_set(some, positions) if exact else 0.0)
    return wrong


def radix(peer: ModuleType, scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` by flashinfer's own radix kernels, where by itself it would take those of CUB."""
    os.environ[ALGORITHM] = "default"
    try:
        return peer.top_k(scores, k)  # type: ignore[no-any-return]
    finally:
        del os.environ[ALGORITHM]


def cases(peer: ModuleType) -> Iterator[Case]:
    """Ours and flashinfer three ways (as it comes, choosing our set, radix), for each length and batch."""
    ways: tuple[tuple[str, Select, bool], ...] = (
        ("flashinfer top 512", peer.top_k, False),
        ("flashinfer top 512, lower position first", partial(peer.top_k, tie_break=1), True),
        ("flashinfer top 512, radix", partial(radix, peer), False),
    )
    for rows, count in SHAPES:
        copies = [torch.randn(rows, count, device="cuda") for _ in range(1 if rows * count > 2**24 else 8)]
        shape, moved = f"{rows} × {count}", rows * count * 4.0 + rows * 2048
        runs = [partial(top_k, scores, K) for scores in copies]
        yield Case(operation="top 512", shape=shape, runs=runs, bytes=moved)
        for operation, select, exact in ways:
            yield Case(
                operation=operation,
                shape=shape,
                runs=[partial(select, scores, K) for scores in copies],
                bytes=moved,
                check=partial(check, select, copies[0], exact),
            )
