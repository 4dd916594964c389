"""`python -m cedar.training.quality`: the quality table of a checkpoint, hundreds of questions a row.

The differentiable network answers, many prompts a forward, with the values that serving computes: on a CPU
bit for bit, on an accelerator but for sums in other orders. `cedar eval` asks the served network itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cedar.training.cases import recall_cases, task_cases
from cedar.training.restore import restored_network
from cedar.training.scoring import rows
from cedar.training.tokenization import WordEncoder
from cedar.training.ways import UNPACKED, WAYS
from tokenizers import Tokenizer


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cedar.training.quality", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint of the small model")
    lengths = ["512:512", "2048:512", "8192:256"]
    parser.add_argument("--recall", nargs="*", default=lengths, metavar="LENGTH:COUNT")
    parser.add_argument("--tasks", type=int, default=512, metavar="COUNT", help="of every other task")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the rows there, one JSON object a line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for every task and way."""
    arguments = build_parser().parse_args(argv)
    device = torch.device(arguments.device)
    network = restored_network(arguments.folder, device)
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    measure = WordEncoder(tokenizer).measure
    exact = next(way for way in WAYS if not way.replay)
    jobs = []
    for item in arguments.recall:
        length, count = map(int, item.split(":"))
        cases = list(recall_cases(length, count, measure))
        jobs.append((cases, [way for way in WAYS if not way.record] + [UNPACKED]))
    for opening in (0, 160) if arguments.tasks else ():
        jobs.append((list(task_cases(arguments.tasks, opening, measure)), [WAYS[0], exact, UNPACKED]))
    lines = []
    for cases, ways in jobs:
        begun = time.monotonic()
        for task, way, right, asked in rows(network, tokenizer, cases, ways, device):
            print(f"{task:40} {way:36} {right:5} / {asked:<5} {100 * right / asked:6.2f} %", flush=True)
            lines.append({"task": task, "way": way, "right": right, "asked": asked})
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
