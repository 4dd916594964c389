"""Index scores of queries against packed index keys in pages: sum over heads of w·relu(q·k) (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, index_scores_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging import INDEX_TYPES, Plane, check_plane


def index_scores(
    q_payload: torch.Tensor,
    q_scales: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    payload_plane: Plane,
    scale_plane: Plane,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    visible: torch.Tensor,
    width: int | None = None,
) -> torch.Tensor:
    """Scores every visible entry: [N, width], -inf from visible[n] on; float64 (reference) or fp32 (kernels).

    q_payload uint8 [N, Hi, Di/2], q_scales uint8 E8M0 [N, Hi, Di/32]: pack_fp4_e8m0 of the rotated index
    queries; weights fp32 or float64 [N, Hi], scaled; pages uint8 [P, page_bytes] with the layer's own index
    planes; page_table int [S, maxp]; seq int [N]; visible int [N], entries of its sequence that token n may
    see. `width` (entries) defaults to the greatest `visible`; a smaller one is refused. Raises PageRangeError
    (CPU) when an entry to be read has no valid page. On a GPU keys, page_table and seq must be older than the
    launch before this call: between the launch that writes the newest key and this one stands another that
    waits for it (`pack_index_queries` does).
    """
    c = _check(
        "index_scores", q_payload, q_scales, weights, pages, payload_plane, scale_plane, page_table, seq
    )
    c.expect("visible", visible, "N", *INDEX_TYPES)
    if width is None or visible.device.type == "cpu":
        most = int(visible.max()) if visible.numel() else 0
        c.require("width", width is None or width >= most, f"is {width}, below the greatest visible, {most}")
        width = most if width is None else width
    if q_payload.is_cuda and _has_kernel(q_payload):
        from cedar.kernels import index_scores_triton

        planes = (payload_plane, scale_plane)
        return index_scores_triton.scores(
            q_payload, q_scales, weights, pages, planes, page_table, seq, visible, width
        )[0]
    q = fp4_ref.unpack_e8m0(q_payload, q_scales, torch.float64)
    planes = (payload_plane, scale_plane)
    return index_scores_ref.scores(
        q, weights.to(torch.float64), pages, planes, page_table, seq, visible, width
    )


def index_scores_gathered(
    q_payload: torch.Tensor,
    q_scales: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    payload_plane: Plane,
    scale_plane: Plane,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    candidates: torch.Tensor,
) -> torch.Tensor:
    """Scores a candidate pool and reads nothing else: [N, C], -inf where candidates int [N, C] is -1 (a pad).

    candidates are entry numbers of the token's sequence (`block_positions`); the rest as `index_scores`.
    """
    c = _check(
        "index_scores_gathered",
        q_payload,
        q_scales,
        weights,
        pages,
        payload_plane,
        scale_plane,
        page_table,
        seq,
    )
    c.expect("candidates", candidates, "N C", *INDEX_TYPES)
    if q_payload.is_cuda and _has_kernel(q_payload):
        from cedar.kernels import index_scores_triton

        planes = (payload_plane, scale_plane)
        return index_scores_triton.scores(
            q_payload, q_scales, weights, pages, planes, page_table, seq, seq, candidates.shape[1],
            entries=candidates,
        )[0]  # fmt: skip
    q = fp4_ref.unpack_e8m0(q_payload, q_scales, torch.float64)
    planes = (payload_plane, scale_plane)
    return index_scores_ref.scores_gathered(
        q, weights.to(torch.float64), pages, planes, page_table, seq, candidates
    )


def _has_kernel(q_payload: torch.Tensor) -> bool:
    """Whether the kernel takes these queries: heads of a power of two channels, 32 or more."""
    return q_payload.shape[-1] >= 16 and q_payload.shape[-1].bit_count() == 1


def _check(
    operation: str,
    q_payload: torch.Tensor,
    q_scales: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    payload_plane: Plane,
    scale_plane: Plane,
    page_table: torch.Tensor,
    seq: torch.Tensor,
) -> Contract:
    c = Contract(operation)
    c.expect("q_payload", q_payload, "N Hi Di/2", torch.uint8)
    c.expect("q_scales", q_scales, "N Hi Di/32", torch.uint8)
    c.expect("weights", weights, "N Hi", torch.float32, torch.float64)
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.expect("seq", seq, "N", *INDEX_TYPES)
    check_plane(c, "payload_plane", payload_plane, row_bytes=c.dims["Di"] // 2)
    check_plane(c, "scale_plane", scale_plane, row_bytes=c.dims["Di"] // 32, rows=payload_plane.rows)
    return c
