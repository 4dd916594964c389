"""Truth for selection: top k, candidate blocks, their positions. Ties go to the lower position (spec §3)."""

from __future__ import annotations

import torch


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [N, k]: ascending positions of the k greatest scores, -1 at the end; -inf is never chosen."""
    count = scores.shape[1]
    if count <= k:
        chosen = torch.arange(count, device=scores.device).expand(scores.shape)
        best = scores
    else:
        best, chosen = (t[:, :k] for t in torch.sort(scores, dim=1, descending=True, stable=True))
    chosen = chosen.masked_fill(best == -torch.inf, count)
    chosen = torch.sort(chosen, dim=1).values
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    out[:, : chosen.shape[1]] = chosen.masked_fill(chosen == count, -1)
    return out


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """int32 [N, keep]: ascending ids of the blocks kept, -1 at the end. A block scores its best position."""
    positions = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(positions >= visible.unsqueeze(-1), -torch.inf)
    blocks = -(-scores.shape[1] // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - scores.shape[1]), value=-torch.inf)
    best = torch.unflatten(padded, 1, (blocks, block)).amax(2)
    newest = (visible.unsqueeze(-1) - 1) // block  # -1 where nothing is visible
    best = best.masked_fill(torch.arange(blocks, device=scores.device) == newest, torch.inf)
    return top_k(best, keep)


def block_positions(blocks: torch.Tensor, block: int, visible: torch.Tensor) -> torch.Tensor:
    """int32 [N, keep·block]: the visible positions of the blocks, ascending, -1 at the end."""
    within = torch.arange(block, device=blocks.device, dtype=torch.int32)
    positions = (blocks.unsqueeze(-1) * block + within).flatten(1)
    present = (blocks >= 0).repeat_interleave(block, 1) & (positions < visible.unsqueeze(-1))
    return positions.masked_fill(~present, -1).to(torch.int32)


def take(candidates: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int32 [N, k]: candidates[n, columns[n]], -1 where the column is -1."""
    taken = candidates.gather(1, columns.clamp_min(0).to(torch.int64))
    return taken.masked_fill(columns < 0, -1).to(torch.int32)
