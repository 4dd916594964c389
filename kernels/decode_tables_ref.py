"""Truth for the tables of a decode step."""

from __future__ import annotations

import torch

ID, POSITION, SLOT, ENCODER_START, DECODER_START, WRITE_FROM, WRITES = range(7)  # rows of `fields`
FIELDS = 7


def tables(
    fields: torch.Tensor, window: int, slot_stride: int, ratios: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """As `DecodeTables`."""
    position, writes = fields[POSITION], fields[WRITES] > 0
    ring = fields[SLOT] * slot_stride
    places = torch.where(writes, ring + position % window, -1)
    read = position.unsqueeze(1) + torch.arange(1 - window, 1, device=fields.device)
    rows = ring.unsqueeze(1) + read % window
    lower = fields[ENCODER_START : DECODER_START + 1].clamp_min(0).unsqueeze(2)
    window_rows = torch.where(read >= lower, rows, -1).to(torch.int32)
    ratio = torch.tensor(ratios, dtype=torch.int64, device=fields.device).view(-1, 1)
    end = position + 1
    visible = torch.div(end, ratio, rounding_mode="floor").to(torch.int32)
    closes = (end % ratio == 0) & (end > fields[WRITE_FROM]) & writes
    entries = torch.where(closes, torch.div(position, ratio, rounding_mode="floor"), -1)
    kept = torch.where((end % ratio > 0) & writes, position % ratio, -1)
    return places, window_rows, visible, entries, (end - ratio).clamp_min(0), kept
