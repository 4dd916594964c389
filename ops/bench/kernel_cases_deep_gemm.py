"""Benchmark cases: index scores by DeepGEMM's Hopper kernels beside ours, of the same queries and keys.

Equal: 32 heads of 128 channels, relu, one weight a head, fp32 scores, the rows of memory that are read. Not
equal: DeepGEMM's keys are rows of 132 bytes (E4M3 and one fp32 scale) and its queries E4M3, ours 68 bytes
(FP4); its prefill reads keys that lie in order, ours goes through the page table. Its plan of a decode step
is made before the timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from cedar.kernels import fp4_ref, paging_ref
from cedar.kernels.index_scores_triton import scores as score_kernel
from cedar.ops.bench.kernel_cases_attention import (
    INDEX,
    random_pages,
    score_args,
    score_difference,
    score_error,
)
from cedar.ops.bench.kernel_cases_deep_gemm_linear import linear_cases
from cedar.ops.bench.kernel_timing import Case

BLOCK, WIDTH = 64, 128  # keys of a block, channels of a key
FLOPS = 8192.0  # of one query and key


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [..., C] and one fp32 scale [...] of x [..., C]."""
    scale = x.float().abs().amax(-1).clamp_min(1e-4) / 448.0
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def fused(keys: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A paged cache uint8 [blocks, BLOCK, 1, 132]: in each block the keys, then their scales."""
    payload = keys.view(torch.uint8).view(-1, BLOCK * WIDTH)
    return torch.cat((payload, scale.view(-1, BLOCK).view(torch.uint8)), 1).view(-1, BLOCK, 1, WIDTH + 4)


def unpacked(pages: torch.Tensor) -> torch.Tensor:
    """Index keys bf16 [pages · rows, 128], in the order of memory."""
    payload, scales = (paging_ref.rows_view(pages, plane).flatten(0, 1) for plane in INDEX)
    return fp4_ref.unpack_e8m0(payload, scales)


def truth(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [n, N] of q E4M3 [n, 32, 128], weights [n, 32], keys E4M3 [N, 128] with scales [N]."""
    logits = q.double() @ keys.double().T
    return torch.einsum("nhk,nh->nk", logits.relu(), weights.double()) * scale.double()


def query(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(q E4M3 [n, 32, 128], weights fp32 [n, 32] times its scales) of `score_args`."""
    q, scale = to_fp8(fp4_ref.unpack_e8m0(args[0], args[1]))
    return q, args[2] * scale


class Decode:
    """One query a sequence over pages: `run` is what is timed, `error` its check."""

    def __init__(
        self, peer: ModuleType, args: tuple[Any, ...], held: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> None:
        (self.q, self.weights), table, visible, context = query(args), args[5], args[7], args[8]
        a_page = INDEX[0].rows // BLOCK
        inside = torch.arange(a_page, device=table.device, dtype=torch.int32)
        self.table = (table[..., None] * a_page + inside).flatten(1).contiguous()
        (self.keys, self.scale, cache), self.context = held, context
        lengths = visible.to(torch.int32).unsqueeze(1)
        plan = peer.get_paged_mqa_logits_metadata(lengths, BLOCK, peer.get_num_sms())
        self.run = partial(
            peer.fp8_paged_mqa_logits,
            self.q[:, None], cache, self.weights, lengths, self.table, plan, context,
        )  # fmt: skip

    def error(self) -> float:
        """Greatest difference from float64 on the first queries, relative to the scores' spread."""
        out, worst, inside = self.run(), 0.0, torch.arange(BLOCK, device=self.table.device)
        for i in range(min(3, self.q.shape[0])):
            rows = (self.table[i, :, None] * BLOCK + inside).flatten()[: self.context]
            right = truth(self.q[i : i + 1], self.weights[i : i + 1], self.keys[rows], self.scale[rows])
            worst = max(worst, score_difference(out[i : i + 1, : self.context], right))
        return worst


def prefill_error(run: partial[torch.Tensor], picks: torch.Tensor) -> float:
    """As `Decode.error`, of some queries of one prefill chunk, each up to its last visible key."""
    q, (keys, scale), weights, _, ends = run.args
    out, worst = run(), 0.0
    for i in picks.tolist():
        end = int(ends[i])
        right = truth(q[i : i + 1], weights[i : i + 1], keys[:end], scale[:end])
        worst = max(worst, score_difference(out[i : i + 1, :end], right))
    return worst


def cases(peer: ModuleType) -> Iterator[Case]:
    """Index scores, then dense linears."""
    yield from score_cases(peer)
    yield from linear_cases(peer)


def score_cases(peer: ModuleType) -> Iterator[Case]:
    """Ours, then DeepGEMM's, for decode at several lengths and batches, and prefill chunks."""
    pages = random_pages(4096 + 8)
    keys, scale = to_fp8(unpacked(pages))
    cache = fused(keys, scale)
    for tokens, context in ((1, 8_192), (1, 65_536), (1, 262_144), (1, 1_048_576), (16, 131_072)):
        copies = [score_args(tokens, 1, context, pages) for _ in range(4)]
        shape = f"{tokens} queries, N={context}"
        yield Case(
            operation="index scores, decode",
            shape=shape,
            runs=[partial(score_kernel, *args) for args in copies],
            bytes=tokens * context * 72.0,
            flops=tokens * context * FLOPS,
            check=partial(score_error, copies[0], torch.arange(min(tokens, 3), device="cuda")),
            tolerance=1e-5,
        )
        decodes = [Decode(peer, args, (keys, scale, cache)) for args in copies]
        yield Case(
            operation="DeepGEMM scores, decode",
            shape=shape,
            runs=[decode.run for decode in decodes],
            bytes=tokens * context * 136.0,
            flops=tokens * context * FLOPS,
            check=decodes[0].error,
            tolerance=1e-2,
        )
    for context, tokens in ((16_384, 4096), (131_072, 4096)):
        visible = context - tokens + torch.arange(tokens, device="cuda", dtype=torch.int32) + 1
        args = score_args(tokens, tokens, context, pages, visible)
        picks = torch.tensor([0, 1, tokens // 2, tokens - 1], device="cuda")
        shape, flops = f"{tokens} queries, N={context}", FLOPS * float(visible.double().sum())
        yield Case(
            operation="index scores, prefill",
            shape=shape,
            runs=[partial(score_kernel, *args)],
            bytes=context * 68 + tokens * context * 4.0,
            flops=flops,
            check=partial(score_error, args, picks),
            tolerance=1e-5,
        )
        q, weights = query(args)
        held = keys[:context].contiguous(), scale[:context].contiguous()
        run = partial(peer.fp8_mqa_logits, q, held, weights, torch.zeros_like(visible), visible)
        yield Case(
            operation="DeepGEMM scores, prefill",
            shape=shape,
            runs=[run],
            bytes=context * 132 + tokens * context * 4.0,
            flops=flops,
            check=partial(prefill_error, run, picks),
            tolerance=1e-2,
        )
