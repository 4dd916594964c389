"""Benchmark cases: sparse attention by FlashMLA's Hopper kernels beside ours, over the same keys and choices.

Equal: 64 heads of 512 channels, 512 chosen keys and 128 of a window, the sink, the queries, which rows are
read. Not equal: a row of FlashMLA's cache takes 584 bytes (448 channels in E4M3 with a power of two for each
64, the other 64 channels in bf16), ours 288 (FP4) and 528 (window); ours turns q before and o after in the
same launch, FlashMLA is given q turned and leaves o as it is. Its plan of a shape is made before the timing,
as it is made once for all layers of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from cedar.kernels import fp4_ref, fp8_ref, paging_ref, rope_ref
from cedar.kernels.sparse_attention_ref import attend
from cedar.ops.bench.kernel_cases_attention import (
    ATTENTION_SHAPES,
    MAIN,
    attention_bytes,
    attention_case,
    random_pages,
    wide_case,
)
from cedar.ops.bench.kernel_timing import Case, relative_error

BLOCK = 64  # rows of a block; their scales follow them
WIDTH, NARROW, GROUP = 512, 448, 64  # channels of a key, those in E4M3, those that share a scale
GROUPS = NARROW // GROUP
ROW, SCALES = NARROW + 2 * (WIDTH - NARROW), 8  # bytes; the last scale byte is unused
STRIDE = -(-BLOCK * (ROW + SCALES) // 576) * 576  # bytes between blocks, as its bulk copies want them


def empty_cache(rows: int, device: str | torch.device) -> torch.Tensor:
    """A cache uint8 [blocks, BLOCK, 1, 584] of at least `rows` rows, its blocks STRIDE bytes apart."""
    blocks, size = -(-rows // BLOCK), ROW + SCALES
    flat = torch.zeros(blocks, STRIDE, dtype=torch.uint8, device=device)
    return flat.as_strided((blocks, BLOCK, 1, size), (STRIDE, size, size, 1))


def _parts(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a cache: rows uint8 [blocks, BLOCK, 576] and scale bytes [blocks, BLOCK, 8]."""
    blocks = cache.shape[0]
    return (
        cache.as_strided((blocks, BLOCK, ROW), (STRIDE, ROW, 1)),
        cache.as_strided((blocks, BLOCK, SCALES), (STRIDE, SCALES, 1), BLOCK * ROW),
    )


def fill(cache: torch.Tensor, first: int, keys: torch.Tensor) -> None:
    """Packs keys bf16 [R, 512] into the cache's rows from `first` on; both must be multiples of BLOCK."""
    if first % BLOCK or keys.shape[0] % BLOCK:
        raise ValueError(f"first={first} and {keys.shape[0]} keys: must be multiples of {BLOCK}")
    rows, scales = (part[first // BLOCK :][: keys.shape[0] // BLOCK] for part in _parts(cache))
    groups = keys[:, :NARROW].float().view(-1, GROUPS, GROUP)
    scale = fp8_ref.power_above(groups.abs().amax(-1).clamp_min(1e-4 * fp8_ref.E4M3_MAX) / fp8_ref.E4M3_MAX)
    coded = (groups / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    rows[..., :NARROW] = coded.view(-1, BLOCK, NARROW)
    rows[..., NARROW:] = keys[:, NARROW:].contiguous().view(torch.uint8).view(-1, BLOCK, ROW - NARROW)
    scales[..., :GROUPS] = fp8_ref.exponent_code(scale).view(-1, BLOCK, GROUPS)


def read(cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Keys bf16 [..., 512] of rows int [...] of a cache; whatever row 0 holds where negative."""
    index = index.clamp_min(0).long()
    rows, scales = (part[index // BLOCK, index % BLOCK] for part in _parts(cache))
    narrow = rows[..., :NARROW].view(torch.float8_e4m3fn).float().view(*index.shape, GROUPS, GROUP)
    scaled = narrow * fp8_ref.exponent_value(scales[..., :GROUPS].contiguous())[..., None]
    wide = rows[..., NARROW:].contiguous().view(torch.bfloat16)
    return torch.cat((scaled.flatten(-2).to(torch.bfloat16), wide), -1)


def unpacked(pages: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Main keys bf16 [count · rows, 512] of pages first …."""
    part = (paging_ref.rows_view(pages, plane)[first : first + count].flatten(0, 1) for plane in MAIN)
    return fp4_ref.unpack_e4m3(*part)


def every_key(pages: torch.Tensor) -> torch.Tensor:
    """`unpacked` of all pages."""
    return torch.cat([unpacked(pages, first, 128) for first in range(0, pages.shape[0], 128)])


def repacked(pages: torch.Tensor) -> torch.Tensor:
    """FlashMLA's cache of the main keys of pages; row p · 256 + r is row r of page p."""
    cache = empty_cache(pages.shape[0] * MAIN[0].rows, pages.device)
    for first in range(0, pages.shape[0], 128):
        fill(cache, first * MAIN[0].rows, unpacked(pages, first, min(128, pages.shape[0] - first)))
    return cache


def inputs(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q after RoPE, rows of `repacked` or -1, window keys bf16 [R, 512]) of `attention_args`."""
    q, pages, planes, table, seq, entries, window, _, _, rope = args
    page, row = paging_ref.locate(pages, planes[0].rows, table, seq[:, None], entries, "entries")
    at = (page * planes[0].rows + row).masked_fill(entries < 0, -1).to(torch.int32)
    return rope_ref.turn(q, *rope), at, fp8_ref.unpack_rows(window, WIDTH)


def truth(q: torch.Tensor, keys: torch.Tensor, present: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """float64 [N, 64, 512] of q [N, 64, 512] over keys bf16 [N, 640, 512], present bool [N, 640]."""
    held = keys.double().masked_fill(~present[..., None], 0.0)
    return attend(q.double(), held, ~present, sink.double())


def for_hopper(function: Callable[..., Any]) -> dict[str, bool]:
    """The option that reaches the kernels for this card, in releases that keep them apart."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(function).parameters else {}


class Decode:
    """FlashMLA's sparse decode of one set of arguments: `run` is what is timed, `error` its check."""

    def __init__(
        self, peer: ModuleType, args: tuple[Any, ...], cache: torch.Tensor, queries: int, plan: object
    ) -> None:
        self.q, self.at, near = inputs(args)
        self.rows, self.sink = args[7], args[8]
        self.cache, self.window = cache, empty_cache(near.shape[0], near.device)
        fill(self.window, 0, near)

        def batched(x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, queries, *x.shape[1:])

        self.run = partial(
            peer.flash_mla_with_kvcache,
            batched(self.q), self.window, None, None, WIDTH, plan, None, WIDTH**-0.5, False, True,
            indices=batched(self.rows), extra_k_cache=cache, extra_indices_in_kvcache=batched(self.at),
            attn_sink=self.sink, **for_hopper(peer.flash_mla_with_kvcache),
        )  # fmt: skip

    def error(self, picks: torch.Tensor) -> float:
        """Relative L2 error of some queries against float64 on the cache's own values."""
        at, rows = self.at[picks], self.rows[picks]
        keys = torch.cat((read(self.cache, at), read(self.window, rows)), 1)
        right = truth(self.q[picks], keys, torch.cat((at, rows), 1) >= 0, self.sink)
        return relative_error(self.run()[0].flatten(0, 1)[picks], right)


class Prefill:
    """FlashMLA's sparse prefill: keys in bf16, those of the pages and then those of the window."""

    def __init__(self, peer: ModuleType, args: tuple[Any, ...], keys: torch.Tensor) -> None:
        self.q, at, near = inputs(args)
        self.keys, self.sink = torch.cat((keys, near)), args[8]
        self.at = torch.cat((at, args[7] + keys.shape[0]), 1)
        self.run = partial(
            peer.flash_mla_sparse_fwd,
            self.q, self.keys[:, None], self.at[:, None], WIDTH**-0.5, attn_sink=self.sink,
            **for_hopper(peer.flash_mla_sparse_fwd),
        )  # fmt: skip

    def error(self, picks: torch.Tensor) -> float:
        """As `Decode.error`."""
        at = self.at[picks]
        right = truth(self.q[picks], self.keys[at.clamp_min(0).long()], at >= 0, self.sink)
        return relative_error(self.run()[0][picks], right)


def cases(peer: ModuleType) -> Iterator[Case]:
    """Ours, then FlashMLA's, at each batch; then one prefill chunk, also by ours on expanded keys and by its
    prefill kernel.
    """
    pages = random_pages(2048)
    cache = repacked(pages)
    for tokens, queries in ATTENTION_SHAPES:
        copies, picks, own = attention_case(tokens, queries, pages)
        yield replace(own, reference=None)
        plan, together = peer.get_mla_metadata()[0], queries if queries < 4096 else 1
        decodes = [Decode(peer, args, cache, together, plan) for args in copies]
        yield Case(
            operation="FlashMLA decode",
            shape=own.shape,
            runs=[decode.run for decode in decodes[1:]],
            bytes=attention_bytes(tokens, queries, ROW + SCALES, ROW + SCALES),
            flops=own.flops,
            check=partial(decodes[0].error, picks),
            tolerance=5e-3,
        )
    del decodes, cache
    yield wide_case(tokens, pages)
    prefills = [Prefill(peer, args, every_key(pages)) for args in copies]
    yield Case(
        operation="FlashMLA prefill, keys in bf16",
        shape=own.shape,
        runs=[prefill.run for prefill in prefills[1:]],
        bytes=attention_bytes(tokens, queries, 2 * WIDTH, 2 * WIDTH),
        flops=own.flops,
        check=partial(prefills[0].error, picks),
        tolerance=5e-3,
    )
