"""Options of the evaluation, apart from it: reading them needs neither torch nor a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


class OptionError(ValueError):
    """An option's value that cannot be: names option, value and what is allowed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which questions, which ways, where."""
    parser.add_argument(
        "path", nargs="?", type=Path, help="a checkpoint folder (default: the built-in model)"
    )
    parser.add_argument(
        "--recall", nargs="*", default=["512:16", "2048:16"], metavar="LENGTH:COUNT", help="recall cases"
    )
    parser.add_argument("--tasks", type=int, default=16, metavar="COUNT", help="cases of every other task")
    parser.add_argument(
        "--ways", nargs="*", metavar="TEXT", help="only ways of serving whose name holds one of these"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="answers decoded together (8)")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON lines there, too")


def counts(items: Sequence[str]) -> dict[int, int]:
    """`LENGTH:COUNT` as numbers. Raises OptionError."""
    result = {}
    for item in items:
        length, _, count = item.partition(":")
        if not (length.isdecimal() and count.isdecimal() and int(length) > 100 and int(count) > 0):
            raise OptionError(
                f"--recall {item}: LENGTH:COUNT is needed, with LENGTH above 100 and COUNT above 0"
            )
        result[int(length)] = int(count)
    return result
