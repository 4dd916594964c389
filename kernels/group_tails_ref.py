"""Truth for the tails of open groups."""

from __future__ import annotations

import torch


def join_tails(
    kv: torch.Tensor, gate: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv and gate fp32 [B, m, D]; rows with a place are kept."""
    before = tails[slots]
    together = tuple(torch.cat((before[:, i], new.unsqueeze(1)), 1) for i, new in enumerate((kv, gate)))
    kept = torch.nonzero(places >= 0).squeeze(1)
    tails[slots[kept], :, places[kept]] = torch.stack((kv[kept], gate[kept]), 1)
    return together[0], together[1]
