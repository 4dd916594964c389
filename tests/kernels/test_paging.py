"""Rows in pages: random tables, other bytes left alone, and nothing read or written outside."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.contract import ContractError
from cedar.kernels.paging import PageRangeError, Plane, gather_rows, scatter_rows

PAGES, PAGE_BYTES, PLANE = 11, 200, Plane(24, 7, 5)


def tables(g: torch.Generator) -> torch.Tensor:
    """int32 [3, 4]: three sequences of 4, 2 and 0 pages, in no order, the rest of each row invalid."""
    shuffled = torch.randperm(PAGES, generator=g).to(torch.int32)
    table = torch.full((3, 4), -1, dtype=torch.int32)
    table[0], table[1, :2] = shuffled[:4], shuffled[4:6]
    return table


@pytest.mark.parametrize("seed", range(5))
def test_gather_reads_what_scatter_wrote_and_scatter_touches_nothing_else(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (PAGES, PAGE_BYTES), generator=g, dtype=torch.uint8)
    before, table = pages.clone(), tables(g)
    where = torch.cat((torch.randperm(20, generator=g)[:9], torch.randperm(10, generator=g)[:6]))
    seq = torch.tensor([0] * 9 + [1] * 6, dtype=torch.int32)
    rows = torch.randint(0, 256, (15, 7), generator=g, dtype=torch.uint8)
    scatter_rows(pages, PLANE, table, seq, where.to(torch.int32), rows)
    for s, e, row in zip(seq.tolist(), where.tolist(), rows, strict=True):
        start = PLANE.offset + e % 5 * 7
        before[table[s, e // 5], start : start + 7] = row
    assert torch.equal(pages, before)
    assert torch.equal(gather_rows(pages, PLANE, table, seq, where), rows)


def test_gather_of_many_entries_and_pads() -> None:
    g = torch.Generator().manual_seed(9)
    pages = torch.randint(0, 256, (PAGES, PAGE_BYTES), generator=g, dtype=torch.uint8)
    table = tables(g)
    entry = torch.tensor([[3, -1, 19], [9, 0, -1], [-1, -1, -1]], dtype=torch.int32)
    got = gather_rows(pages, PLANE, table, torch.tensor([0, 1, 2]), entry)
    for s in range(3):
        for n, e in enumerate(entry[s].tolist()):
            start = PLANE.offset + e % 5 * 7
            wanted = (
                pages[table[s, e // 5], start : start + 7] if e >= 0 else torch.zeros(7, dtype=torch.uint8)
            )
            assert torch.equal(got[s, n], wanted)
    assert torch.equal(
        gather_rows(pages, PLANE, table, torch.tensor([0, 1, 2]), entry.view(3, 3, 1)), got.view(3, 3, 1, 7)
    )


def test_strided_pages_are_written_in_place() -> None:
    memory = torch.zeros(2, PAGES, PAGE_BYTES, dtype=torch.uint8)
    row = torch.full((1, 7), 9, dtype=torch.uint8)
    scatter_rows(memory[1], PLANE, torch.tensor([[3]]), torch.tensor([0]), torch.tensor([4]), row)
    assert memory.sum() == 63
    assert memory[1, 3, 24 + 28 : 24 + 35].tolist() == [9] * 7


def test_no_pages_and_no_entries() -> None:
    none = torch.zeros(0, PAGE_BYTES, dtype=torch.uint8)
    table = torch.zeros(1, 0, dtype=torch.int32)
    pads = torch.full((1, 3), -1)
    assert gather_rows(none, PLANE, table, torch.tensor([0]), pads).tolist() == [[[0] * 7] * 3]
    scatter_rows(
        none,
        PLANE,
        table,
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, 7, dtype=torch.uint8),
    )
    with pytest.raises(PageRangeError, match="entry holds 0"):
        gather_rows(none, PLANE, table, torch.tensor([0]), torch.tensor([[0]]))


@pytest.mark.parametrize(
    ("message", "seq", "entry"),
    [
        ("entry holds 20", 0, 20),
        ("page_table .* holds -1", 1, 10),
        ("page_table .* holds 99", 2, 0),
        ("seq holds 3", 3, 0),
        ("seq holds -1", -1, 0),
    ],
)
def test_what_lies_outside_is_refused(message: str, seq: int, entry: int) -> None:
    pages = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    table = tables(torch.Generator().manual_seed(1))
    table[2, 0] = 99
    where = (torch.tensor([seq], dtype=torch.int32), torch.tensor([entry], dtype=torch.int32))
    with pytest.raises(PageRangeError, match=message):
        gather_rows(pages, PLANE, table, *where)
    with pytest.raises(PageRangeError, match=message):
        scatter_rows(pages, PLANE, table, *where, torch.ones(1, 7, dtype=torch.uint8))
    assert pages.sum() == 0


def test_scatter_refuses_pads_and_planes_must_fit() -> None:
    pages = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    table, seq, entry = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0]), torch.tensor([-1])
    with pytest.raises(PageRangeError, match="entry holds -1"):
        scatter_rows(pages, PLANE, table, seq, entry, torch.ones(1, 7, dtype=torch.uint8))
    with pytest.raises(ContractError, match="plane ends at byte 224 of pages of 200"):
        gather_rows(pages, Plane(24, 40, 5), table, seq, entry)
    with pytest.raises(ContractError, match="plane has rows of 7 bytes, not 8"):
        scatter_rows(pages, PLANE, table, seq, entry, torch.ones(1, 8, dtype=torch.uint8))
