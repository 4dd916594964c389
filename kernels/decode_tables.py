"""Where each row of a decode step reads and writes, from what its sequence says of itself (spec §3, §5).

One token a sequence; everything stays on the device, so that a captured step may be replayed with other
values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import decode_tables_ref
from cedar.kernels.contract import Contract
from cedar.kernels.decode_tables_ref import (
    DECODER_START,
    ENCODER_START,
    FIELDS,
    ID,
    POSITION,
    SLOT,
    WRITE_FROM,
    WRITES,
)

__all__ = [
    "DECODER_START", "ENCODER_START", "FIELDS", "ID", "MOST_RATIOS", "POSITION", "SLOT", "WRITES",
    "WRITE_FROM",
    "DecodeTables", "decode_tables",
]  # fmt: skip

MOST_RATIOS = 4


class DecodeTables(NamedTuple):
    """For B rows, a window of W and M ratios."""

    ring_places: torch.Tensor  # int64 [B], ring row of the row's own window key; -1: not written
    window_rows: (
        torch.Tensor
    )  # int32 [2, B, W], ring rows of positions p-W+1 to p, for layers below the decoder
    # and in it; -1: not readable
    visible: torch.Tensor  # int32 [M, B], entries that the row may read
    entries: torch.Tensor  # int64 [M, B], the entry that the row completes; -1: none to be written
    first: torch.Tensor  # int64 [M, B], position of the first token of a group that would end here
    places: torch.Tensor  # int64 [M, B], the row's place in a tail of ratio - 1 tokens; -1: it is not kept


def decode_tables(
    fields: torch.Tensor, window: int, slot_stride: int, ratios: tuple[int, ...]
) -> DecodeTables:
    """Tables of the rows of fields int64 [FIELDS, B]; ring rows of slot s begin at s·`slot_stride`."""
    c = Contract("decode_tables")
    c.expect("fields", fields, f"{FIELDS} B", torch.int64)
    c.require("window", window > 0, f"must be positive, got {window}")
    c.require("ratios", len(ratios) <= MOST_RATIOS and min(ratios, default=1) > 0, f"are {ratios}")
    if fields.is_cuda:
        from cedar.kernels import decode_tables_triton

        return DecodeTables(*decode_tables_triton.tables(fields, window, slot_stride, ratios))
    return DecodeTables(*decode_tables_ref.tables(fields, window, slot_stride, ratios))
