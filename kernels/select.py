"""Selection among index scores: the top k, and the pool of blocks that later layers select from (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import select_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging import INDEX_TYPES
from cedar.kernels.paging_ref import check_range

SCORES = (torch.float32, torch.float64)


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k greatest scores [N, M]: int32 [N, k], ascending, -1 at the end.

    Ties go to the lower position; -inf (not visible, a pad) is never chosen, so rows may hold fewer than k.
    """
    c = Contract("top_k")
    c.expect("scores", scores, "N M", *SCORES)
    c.require("k", k > 0, f"must be positive, got {k}")
    if scores.is_cuda:
        from cedar.kernels import select_triton

        return select_triton.top_k(scores.to(torch.float32), k)
    return select_ref.top_k(scores, k)


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """Ids of the `keep` best blocks of `block` positions: int32 [N, keep], ascending, -1 at the end.

    scores [N, M]; visible int [N], at most M: positions from there on do not count. A block scores its
    greatest visible position; the block of the newest visible position is always among those kept; ties go to
    the lower block.
    """
    c = Contract("candidate_blocks")
    c.expect("scores", scores, "N M", *SCORES)
    c.expect("visible", visible, "N", *INDEX_TYPES)
    c.require("block", block > 0, f"must be positive, got {block}")
    c.require("keep", keep > 0, f"must be positive, got {keep}")
    check_range("candidate_blocks: visible", visible, 0, c.dims["M"] + 1)
    if scores.is_cuda:
        from cedar.kernels import select_triton

        return select_triton.candidate_blocks(scores.to(torch.float32), visible, block, keep)
    return select_ref.candidate_blocks(scores, visible, block, keep)


def block_positions(blocks: torch.Tensor, block: int, visible: torch.Tensor) -> torch.Tensor:
    """The pool: visible positions of blocks int32 [N, keep] (`candidate_blocks`), ascending, -1 at the end.

    int32 [N, keep*block]; visible int [N].
    """
    c = Contract("block_positions")
    c.expect("blocks", blocks, "N K", torch.int32)
    c.expect("visible", visible, "N", *INDEX_TYPES)
    c.require("block", block > 0, f"must be positive, got {block}")
    if blocks.is_cuda:
        from cedar.kernels import select_triton

        return select_triton.block_positions(blocks, block, visible)
    return select_ref.block_positions(blocks, block, visible)


def take_candidates(candidates: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Entry numbers int32 [N, k] that columns int32 [N, k] name in candidates int32 [N, C]; -1 stays -1.

    columns is `top_k` of the candidates' scores; ascending candidates give ascending entries.
    """
    c = Contract("take_candidates")
    c.expect("candidates", candidates, "N C", torch.int32)
    c.expect("columns", columns, "N K", torch.int32)
    if candidates.is_cuda:
        from cedar.kernels import select_triton

        return select_triton.take(candidates, columns)
    return select_ref.take(candidates, columns)
