"""The table of faults names tests that exist, and every test of this folder that is about the store."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faults-store.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE.read_text())


def names_in(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}
    return {name for name in found if name.startswith("test_")}


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_named_test_exists(path: str) -> None:
    assert {name for named, name in NAMED if named == path} <= names_in(ROOT / path)


def test_every_row_names_a_test() -> None:
    rows = [line for line in TABLE.read_text().split("## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    assert [row for row in rows[1:] if "::" not in row] == []


def test_every_fault_test_is_in_the_table() -> None:
    here = Path(__file__).parent
    for path in sorted(here.glob("test_store_*.py")):
        if path == Path(__file__):
            continue
        named = {name for where, name in NAMED if where == f"tests/faults/{path.name}"}
        assert named, f"{path.name} shows no fault of the table"
