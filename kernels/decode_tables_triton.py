# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The tables of a decode step on a GPU, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _group(
    position, write_from, writes, cell, visible_ptr, entry_ptr, first_ptr, kept_ptr, RATIO: tl.constexpr
):
    """What a row is to a source of this ratio."""
    end = position + 1
    tl.store(visible_ptr + cell, (end // RATIO).to(tl.int32))
    closes = (end % RATIO == 0) & (end > write_from) & writes
    tl.store(entry_ptr + cell, tl.where(closes, position // RATIO, -1))
    tl.store(first_ptr + cell, tl.maximum(end - RATIO, 0))
    tl.store(kept_ptr + cell, tl.where((end % RATIO > 0) & writes, position % RATIO, -1))


@triton.jit(do_not_specialize=["rows"])
def _tables(
    fields_ptr, place_ptr, window_ptr, visible_ptr, entry_ptr, first_ptr, kept_ptr, rows, window, slot_stride,
    W: tl.constexpr, M: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Fields: id, position, slot, encoder start, decoder start, write from, writes."""
    row = tl.program_id(0)
    position = tl.load(fields_ptr + rows + row)
    ring = tl.load(fields_ptr + 2 * rows + row) * slot_stride
    write_from = tl.load(fields_ptr + 5 * rows + row)
    writes = tl.load(fields_ptr + 6 * rows + row) > 0
    tl.store(place_ptr + row, tl.where(writes, ring + position % window, -1))
    lane = tl.arange(0, W)
    read = position - window + 1 + lane
    for half in tl.static_range(2):
        lower = tl.maximum(tl.load(fields_ptr + (3 + half) * rows + row), 0)
        found = tl.where(read >= lower, ring + tl.maximum(read, 0) % window, -1)
        tl.store(window_ptr + (half * rows + row) * window + lane, found.to(tl.int32), mask=lane < window)
    if M > 0:
        _group(position, write_from, writes, row, visible_ptr, entry_ptr, first_ptr, kept_ptr, R0)
    if M > 1:
        _group(position, write_from, writes, rows + row, visible_ptr, entry_ptr, first_ptr, kept_ptr, R1)
    if M > 2:
        _group(position, write_from, writes, 2 * rows + row, visible_ptr, entry_ptr, first_ptr, kept_ptr, R2)
    if M > 3:
        _group(position, write_from, writes, 3 * rows + row, visible_ptr, entry_ptr, first_ptr, kept_ptr, R3)


def tables(
    fields: torch.Tensor, window: int, slot_stride: int, ratios: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """As `DecodeTables`."""
    rows, count = fields.shape[1], len(ratios)
    places = fields.new_empty(rows)
    window_rows = torch.empty(2, rows, window, dtype=torch.int32, device=fields.device)
    visible = torch.empty(count, rows, dtype=torch.int32, device=fields.device)
    entries, first, kept = (fields.new_empty(count, rows) for _ in range(3))
    if rows:
        _tables[(rows,)](
            fields.contiguous(), places, window_rows, visible, entries, first, kept, rows, window,
            slot_stride,
            triton.next_power_of_2(window), count, *ratios, *[1] * (4 - count), num_warps=1,
        )  # fmt: skip
    return places, window_rows, visible, entries, first, kept
