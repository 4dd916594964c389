"""The tables of a decode step: restated in plain Python, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.decode_tables import DecodeTables, decode_tables

# id, position, slot, encoder start, decoder start, write from, writes
ROWS = [
    (5, 0, 0, 0, 0, 0, 1),
    (6, 7, 3, 0, 4, 0, 1),
    (7, 8, 1, 5, 0, 0, 1),
    (8, 8, 1, 5, 0, 9, 1),
    (9, 8, 1, 5, 0, 0, 0),
    (1, 1_000_001, 2, 0, 999_999, 0, 1),
]
FIELDS = torch.tensor(ROWS).T.contiguous()


def test_tables_say_where_rows_are() -> None:
    window, stride, ratios = 5, 40, (1, 3)
    got = decode_tables(FIELDS, window, stride, ratios)
    for row, (_, position, slot, *starts, write_from, writes) in enumerate(ROWS):
        own = slot * stride + position % window
        assert got.ring_places[row] == (own if writes else -1)
        for half, start in enumerate(starts):
            want = [
                slot * stride + j % window if j >= start else -1
                for j in range(position - window + 1, position + 1)
            ]
            assert got.window_rows[half, row].tolist() == want
        for i, ratio in enumerate(ratios):
            ends = (position + 1) % ratio == 0 and position + 1 > write_from and writes
            assert got.visible[i, row] == (position + 1) // ratio
            assert got.entries[i, row] == (position // ratio if ends else -1)
            assert got.first[i, row] == max(0, position + 1 - ratio)
            kept = (position + 1) % ratio and writes
            assert got.places[i, row] == (position % ratio if kept else -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("ratios", [(), (2,), (1, 2, 4)])
def test_the_kernel_is_the_reference(ratios: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from cedar.kernels import decode_tables_triton

    want = decode_tables(FIELDS, 5, 40, ratios)
    got = DecodeTables(*decode_tables_triton.tables(FIELDS, 5, 40, ratios))
    for name, a, b in zip(DecodeTables._fields, got, want, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
