"""What commands print: consoles, tables, sizes, and text that comes from a model."""

from __future__ import annotations

import json
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from .exits import CommandError, Exit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """A console that keeps long cells whole when the output is not a terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> Table:
    """A plain table. ``right`` names, one letter a column (``l`` or ``r``), the alignment."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if right[index : index + 1] == "r" else "left")
    for row in rows:
        made.add_row(*[str(cell) for cell in row])
    return made


def size(count: float) -> str:
    """Bytes as people read them: ``222.5 KiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def count(number: float) -> str:
    """A large count as people read it: ``763.2 B`` for billions."""
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(number) >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number:,.0f}"


def seconds(value: float) -> str:
    """A duration: milliseconds below one second."""
    return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def redraw(view: Callable[[], RenderableType], every_s: float) -> Exit:
    """Show what ``view`` gives, again every so many seconds, until interrupted. CommandError: not above 0."""
    if not every_s > 0:
        raise CommandError(f"--watch: {every_s} is not above 0 seconds")
    from rich.live import Live

    try:
        with Live(console=console(), screen=sys.stdout.isatty(), auto_refresh=False) as live:
            while True:
                live.update(view(), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return Exit.OK


def printable(text: str) -> str:
    """Make model output safe for a terminal: control characters become visible escapes.

    A model can produce any bytes; escape sequences among them would reach the terminal.
    """
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else repr(character)[1:-1]
        for character in text
    )


def emit_json(record: object, stream: TextIO) -> None:
    """One JSON document on one line."""
    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    stream.flush()
