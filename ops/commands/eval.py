"""``cedar eval``: ask a checkpoint questions whose answers are right or wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
examples:
  cedar eval                                     the built-in small model, every task
  cedar eval FOLDER --recall 8192:4 --tasks 0    four recalls in 8,192 tokens, every way of serving
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "eval",
        help="accuracy of a small model by task, length and way of serving",
        description="Ask generated questions (recall, lists, sums, pictures) in this process and count right "
        "answers: cold, after prefix hits with and without window record, with and without replay and pool.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", nargs="?", type=Path, help="a checkpoint folder (default: the built-in model)"
    )
    parser.add_argument(
        "--recall", nargs="*", default=["512:16", "2048:16"], metavar="LENGTH:COUNT", help="recall cases"
    )
    parser.add_argument("--tasks", type=int, default=16, metavar="COUNT", help="cases of every other task")
    parser.add_argument("--ways", type=int, metavar="COUNT", help="only the first ways of serving")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Exit:
    """Print a line for every task and way."""
    from cedar.training.evaluate import evaluate
    from cedar.training.serving import WAYS, built_in_model

    lengths = {int(length): int(count) for length, count in (item.split(":") for item in arguments.recall)}
    folder = arguments.path or built_in_model()
    ways = WAYS[: arguments.ways]
    for task, way, right, asked in evaluate(folder, lengths, arguments.tasks, ways, arguments.device):
        if arguments.json:
            print(json.dumps({"task": task, "way": way, "right": right, "asked": asked}), flush=True)
        else:
            print(f"{task:24} {way:36} {right:4} / {asked:<4} {100 * right / asked:6.1f} %", flush=True)
    return Exit.OK
