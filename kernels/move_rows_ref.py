"""Truth for moving rows."""

from __future__ import annotations

import torch


def move_rows(source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
    """target[places[i]] = source[rows[i]] where places[i] is not negative."""
    moved = places >= 0
    target[places[moved].to(torch.int64)] = source[rows[moved].to(torch.int64)]
