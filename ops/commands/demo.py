"""``cedar demo``: a cluster on this machine, a picture, a long text and a second turn, a table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
Starts one Encoder, one Prefill, two Decode workers and one store node with the built-in model, asks over gRPC
about a picture and about a long text, prints the answers as they stream and whether they are right, asks a
second question about the text, and ends with a table. Then everything is shut down; nothing is left behind.
Ctrl-C does the same early.
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "demo",
        help="the whole path once, on this machine, in about a minute",
        description="See a picture and a prompt go through three pools and come back as a stream of tokens.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--image", type=Path, metavar="FILE", help="your own picture (default: one is drawn)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens a turn (default: 64)")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="other questions (default: 7)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Exit:
    """Run the verb."""
    from ..demo import run_demo

    return run_demo(image=arguments.image, max_tokens=arguments.max_tokens, seed=arguments.seed)
