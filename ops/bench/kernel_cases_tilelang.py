"""Benchmark cases: sparse attention by the kernel that SGLang publishes in TileLang, beside ours.

Equal: 64 heads of 512 channels, the queries, which 640 keys each reads. Not equal: its keys are rows of 1024
bytes (bf16), those of the window among the others; it knows no sink; it is given q turned, and leaves o so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from cedar.ops.bench.kernel_cases_attention import (
    ATTENTION_SHAPES,
    attention_bytes,
    attention_case,
    random_pages,
)
from cedar.ops.bench.kernel_cases_flash_mla import WIDTH, every_key, inputs, truth
from cedar.ops.bench.kernel_timing import Case, relative_error


class Sparse:
    """The peer's kernel on one set of arguments: `run` is what is timed, `error` its check."""

    def __init__(self, peer: ModuleType, args: tuple[Any, ...], keys: torch.Tensor) -> None:
        self.q, at, near = inputs(args)
        self.keys = torch.cat((keys, near))
        self.at = torch.cat((at, args[7] + keys.shape[0]), 1)
        self.run = partial(
            peer.tilelang_sparse_fwd, self.q, self.keys[:, None], self.at[:, None], WIDTH**-0.5, WIDTH
        )

    def error(self, picks: torch.Tensor) -> float:
        """Relative L2 error of some queries against float64."""
        at = self.at[picks]
        sink = torch.full((64,), -torch.inf, device=at.device)
        right = truth(self.q[picks], self.keys[at.clamp_min(0).long()], at >= 0, sink)
        return relative_error(self.run().flatten(0, -3)[picks], right)


def cases(peer: ModuleType) -> Iterator[Case]:
    """Ours, then the peer's, at each batch and for one prefill chunk."""
    pages = random_pages(2048)
    keys = every_key(pages)
    for tokens, queries in ATTENTION_SHAPES:
        copies, picks, own = attention_case(tokens, queries, pages)
        yield replace(own, reference=None)
        others = [Sparse(peer, args, keys) for args in copies]
        yield Case(
            operation="TileLang sparse attention, keys in bf16",
            shape=own.shape,
            runs=[other.run for other in others[1:]],
            bytes=attention_bytes(tokens, queries, 2 * WIDTH, 2 * WIDTH),
            flops=own.flops,
            check=partial(others[0].error, picks),
            tolerance=5e-3,
        )
