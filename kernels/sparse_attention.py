"""Attention over selected global entries (FP4 in pages) and window keys (FP8 rows), with a sink (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import paging_ref, rope_ref, sparse_attention_ref
from cedar.kernels.contract import Contract
from cedar.kernels.fp8 import window_row_bytes
from cedar.kernels.paging import INDEX_TYPES, Plane, check_plane
from cedar.kernels.wide_keys import WideKeys


def sparse_attention(
    q: torch.Tensor,
    pages: torch.Tensor | None,
    payload_plane: Plane | None,
    scale_plane: Plane | None,
    page_table: torch.Tensor | None,
    seq: torch.Tensor | None,
    entries: torch.Tensor | None,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    sink: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: WideKeys | None = None,
    *,
    settled: bool = False,
) -> torch.Tensor:
    """o bf16 [N, H, D], rounded once, before the inverse RoPE. q bf16 [N, H, D], after RoPE.

    Global keys: pages uint8 [P, page_bytes] with the KV source's main planes; page_table int [S, maxp];
    seq int [N]; entries int32 [N, K], -1 for none. All six are None (or K is 0) in a layer without them.
    Window keys: window uint8 [R, D + D/32] (`pack_window_rows`); window_rows int [N, W], rows of it, -1 for
    none. sink fp32 [H] adds exp(sink) to the denominator and is not scaled. A query with no key at all gives
    zeros. With `rope` = (cos, sin) fp32 [N, R/2] (`rope_table`) q comes before its RoPE and o leaves after
    the inverse. `wide` holds the same keys expanded: entries [S, E, D], E beyond every one that is named, and
    window [R, D]. It is read where there is a kernel for it, and on the CPU. `settled` (a GPU): q comes from
    the launch before this one, a product that `settles`, and everything else is older; it is read then while
    that launch still runs. Raises PageRangeError (CPU; on a GPU with CEDAR_CHECK_INDICES=1, else clamped
    there) naming seq, entries, page_table or window_rows when one points outside.
    """
    c = Contract("sparse_attention")
    c.expect("q", q, "N H D", torch.bfloat16)
    c.divisible("q", "D", 32)
    c.dims["D_row"] = window_row_bytes(c.dims["D"])
    c.expect("window", window, "R D_row", torch.uint8)
    c.expect("window_rows", window_rows, "N W", *INDEX_TYPES)
    c.expect("sink", sink, "H", torch.float32)
    if rope is not None:
        c.expect("rope cos", rope[0], "N F", torch.float32)
        c.expect("rope sin", rope[1], "N F", torch.float32)
        c.require("rope cos", 2 * c.dims["F"] <= c.dims["D"], "turns more channels than q has")
    if wide is not None:
        c.expect("wide.window", wide.window, "R D", torch.float16)
        c.require("wide.window", wide.window.is_contiguous(), "must be contiguous")
    if entries is None or entries.shape[-1] == 0:
        wide = None if wide is None else wide._replace(entries=None)
        return _attend(q, None, (), None, None, None, window, window_rows, sink, rope, wide, settled)
    if pages is None or page_table is None or seq is None or payload_plane is None or scale_plane is None:
        raise c.refusal("entries", "needs pages, payload_plane, scale_plane, page_table and seq beside it")
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.expect("seq", seq, "N", *INDEX_TYPES)
    c.expect("entries", entries, "N K", torch.int32)
    check_plane(c, "payload_plane", payload_plane, row_bytes=c.dims["D"] // 2)
    check_plane(c, "scale_plane", scale_plane, row_bytes=c.dims["D"] // 16, rows=payload_plane.rows)
    if wide is not None:
        if wide.entries is None:
            raise c.refusal("wide.entries", "must be given where there are entries")
        c.expect("wide.entries", wide.entries, "S E D", torch.float16)
        c.require("wide.entries", wide.entries.is_contiguous(), "must be contiguous")
    planes = (payload_plane, scale_plane)
    return _attend(q, pages, planes, page_table, seq, entries, window, window_rows, sink, rope, wide, settled)


def _attend(
    q: torch.Tensor,
    pages: torch.Tensor | None,
    planes: tuple[Plane, ...],
    page_table: torch.Tensor | None,
    seq: torch.Tensor | None,
    entries: torch.Tensor | None,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    sink: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    wide: WideKeys | None,
    settled: bool,
) -> torch.Tensor:
    """The kernel on a GPU (head dims of a power of two, 32 or more), else the reference, checked already."""
    width = q.shape[2]
    if q.is_cuda and width >= 32 and width.bit_count() == 1:
        from cedar.kernels import sparse_attention_triton

        if paging_ref.checks_indices():
            paging_ref.check_range("window_rows", window_rows, -1, window.shape[0])
            if pages is not None and page_table is not None and seq is not None and entries is not None:
                paging_ref.check_range("seq", seq, 0, page_table.shape[0])
                room = page_table.shape[1] * planes[0].rows
                if wide is not None and wide.entries is not None:
                    room = wide.entries.shape[1]
                paging_ref.check_range("entries", entries, -1, room)
        return sparse_attention_triton.sparse_attention(
            q, pages, planes, page_table, seq, entries, window.contiguous(), window_rows, sink, rope, wide,
            settled=settled and window.is_contiguous(),
        )  # fmt: skip
    if rope is not None:
        q = rope_ref.turn(q, *rope)
    o = sparse_attention_ref.sparse_attention(
        q, pages, planes, page_table, seq, entries, window, window_rows, sink, wide
    )
    return o if rope is None else rope_ref.turn(o, rope[0], -rope[1])
