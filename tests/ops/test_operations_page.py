"""docs/operations.md lists every setting and every counter that the code has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from cedar.ops import operations_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_fresh() -> None:
    page = operations_page.page_path().read_text("utf-8")
    assert page == operations_page.renewed(page), "run make docs"


@pytest.mark.parametrize("line", ["| `gateway.port` |", "| `store_pages_read` | pages served |"])
def test_a_stale_page_is_noticed_and_renewed(line: str) -> None:
    page = operations_page.page_path().read_text("utf-8")
    stale = page.replace(line, "| something else |")
    assert stale != page
    assert operations_page.renewed(stale) == page


def test_missing_marks_are_named() -> None:
    with pytest.raises(ValueError, match="marks"):
        operations_page.renewed("# Operations\n")


def test_every_worker_counter_is_explained() -> None:
    page = operations_page.page_path().read_text("utf-8")
    names = {
        name
        for folder in ("actors", "cluster")
        for path in (ROOT / folder).glob("*.py")
        for name in counter_names(ast.parse(path.read_text("utf-8")))
    }
    assert len(names) > 20
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def counter_names(tree: ast.AST) -> set[str]:
    """Plain string subscripts of anything called counters, either arm of an ``if`` too."""
    found: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("counters"):
            arms = [node.slice.body, node.slice.orelse] if isinstance(node.slice, ast.IfExp) else [node.slice]
            found |= {arm.value for arm in arms if isinstance(arm, ast.Constant)}
    return {name for name in found if isinstance(name, str)}
