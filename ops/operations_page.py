"""Keeps the tables of ``docs/operations.md`` true: ``python -m cedar.ops.operations_page [--check]``.

Settings come from the configuration's classes, the store's counters from its own list.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def settings_table() -> str:
    """Every setting of a cluster."""
    from cedar.cluster.config_print import knobs_markdown

    return knobs_markdown()


def store_table() -> str:
    """Every counter of a store node."""
    from cedar.kvstore.stats import COUNTERS

    rows = [f"| `{name}` | {meaning} |" for name, meaning in COUNTERS.items()]
    return "\n".join(["| counter | meaning |", "|---|---|", *rows, ""])


def metrics() -> str:
    """Every Prometheus metric."""
    from cedar.kvstore.metrics import metrics_table

    return metrics_table()


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "store counters": store_table,
    "metrics": metrics,
}


def marks(name: str) -> tuple[str, str]:
    """The two lines that a generated table stands between."""
    return f"<!-- {name}: written by `make docs` -->\n", f"<!-- end of {name} -->\n"


def page_path() -> Path:
    """The page in a source checkout."""
    return Path(__file__).resolve().parent.parent / "docs" / "operations.md"


def renewed(page: str) -> str:
    """Return ``page`` with every generated table written anew."""
    for name, produce in TABLES.items():
        first, last = marks(name)
        before, begin, rest = page.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end:
            raise ValueError(f"docs/operations.md lacks the marks {first.strip()!r} and {last.strip()!r}")
        page = f"{before}{begin}\n{produce()}\n{end}{after}"
    return page


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m cedar.ops.operations_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    arguments = parser.parse_args(argv)
    path = page_path()
    page = path.read_text("utf-8")
    fresh = renewed(page)
    if arguments.check:
        if page != fresh:
            print("stale: docs/operations.md; run make docs")
        return int(page != fresh)
    path.write_text(fresh, "utf-8")
    print("wrote docs/operations.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
