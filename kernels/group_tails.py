"""Groups of tokens that are still open from step to step: what a source keeps until a group completes (spec
§3).
"""

from __future__ import annotations

import torch
from cedar.kernels import group_tails_ref
from cedar.kernels.contract import Contract
from cedar.kernels.paging_ref import check_range


def join_tails(
    kv: torch.Tensor, gate: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv and gate fp32 [B, m, D]: the m - 1 kept tokens of each row's slot, then its own, fp32 [B, D] each.

    tails fp32 [S, 2, m - 1, D], any strides but the last; slots int64 [B]. Then row b is kept: its kv and
    gate go to tails[slots[b], :, places[b]], in place, unless places[b] int64 is negative. No slot may be
    written twice. Raises PageRangeError (CPU; on a GPU with CEDAR_CHECK_INDICES=1, else clamped) naming slots
    or places.
    """
    c = Contract("join_tails")
    c.expect("kv", kv, "B D", torch.float32)
    c.expect("gate", gate, "B D", torch.float32)
    c.expect("tails", tails, "S 2 depth D", torch.float32)
    c.expect("slots", slots, "B", torch.int64)
    c.expect("places", places, "B", torch.int64)
    c.require("tails", tails.stride(-1) == 1, "must have neighbouring channels side by side")
    check_range("slots", slots, 0, tails.shape[0])
    check_range("places", places, -(1 << 31), tails.shape[2])
    if kv.is_cuda:
        from cedar.kernels import group_tails_triton

        return group_tails_triton.join_tails(kv, gate, tails, slots, places)
    return group_tails_ref.join_tails(kv, gate, tails, slots, places)
