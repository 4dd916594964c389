"""The ladder of captured decode steps: pure arithmetic, and who asks for it."""

from __future__ import annotations

import pytest
from cedar.model.decode_graph import ladder, rung


@pytest.mark.parametrize("most_pages", [1, 16, 40, 4096])
def test_the_ladder_holds_every_step_and_no_other(most_pages: int) -> None:
    batches, pages = range(1, 10), range(1, min(most_pages, 80) + 1)
    taken = {rung(batch, page, most_pages) for batch in batches for page in pages}
    rungs = ladder(batches[-1], pages[-1], most_pages)
    assert set(rungs) == taken
    assert len(set(rungs)) == len(rungs)
    assert all(rows >= batch for rows, batch in ((rung(b, 1, most_pages)[0], b) for b in batches))
    assert all(width <= most_pages for _, width in rungs)


def test_a_rung_holds_what_it_is_for() -> None:
    for batch in range(1, 70):
        for pages in (1, 15, 16, 17, 63, 64, 65, 300):
            rows, width = rung(batch, pages, 1000)
            assert batch <= rows < 2 * batch
            assert width >= pages
