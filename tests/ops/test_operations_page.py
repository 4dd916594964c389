"""docs/operations.md lists every setting as the configuration defines it."""

from __future__ import annotations

import pytest
from cedar.ops import knobs


def test_the_page_is_fresh() -> None:
    page = knobs.page_path().read_text("utf-8")
    assert page == knobs.renewed(page), "run make docs"


def test_a_stale_page_is_noticed_and_renewed() -> None:
    page = knobs.page_path().read_text("utf-8")
    stale = page.replace("| `gateway.port` |", "| `gateway.prot` |")
    assert stale != page
    assert knobs.renewed(stale) == page


def test_missing_marks_are_named() -> None:
    with pytest.raises(ValueError, match="marks"):
        knobs.renewed("# Operations\n")
