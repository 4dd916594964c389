"""``cedar model``: look into a checkpoint, and prove that this machine computes it right."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
examples:
  cedar model inspect tests/golden/v41-tiny
  cedar model inspect flash                  a model preset: sizes and plan from its configuration alone
  cedar model inspect s3://bucket/flash --json
  cedar model verify tests/golden/v41-tiny --expected tests/golden/v41-tiny/expected.safetensors
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "model",
        help="inspect a checkpoint, or verify it against saved tensors",
        description="Look into a checkpoint, and prove that this machine computes it right.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    inspect = actions.add_parser(
        "inspect",
        help="plan of layers, modes, sources, bytes per token, sizes",
        description="Read config.json and tensor headers (no weights) and show what the network is.",
    )
    inspect.add_argument("path", help="a folder, an fsspec URL, or the name of a model preset")
    inspect.add_argument("--page-tokens", type=int, metavar="N", help="page size (default: the model's own)")
    inspect.add_argument("--json", action="store_true", help="one JSON object")
    inspect.set_defaults(run=run_inspect)
    verify = actions.add_parser(
        "verify",
        help="compare a checkpoint's forward with saved tensors",
        description="Run the checkpoint on the inputs in FILE and print the error of each saved tensor. "
        "Exit 1 if any is over its tolerance.",
    )
    verify.add_argument("path", help="a folder or an fsspec URL")
    verify.add_argument("--expected", required=True, type=Path, metavar="FILE", help="safetensors file")
    verify.add_argument("--device", default="cpu", help="default: cpu")
    verify.add_argument(
        "--tolerance", type=float, metavar="X", help="relative L2 error (default: each tensor's own)"
    )
    verify.add_argument("--json", action="store_true", help="one JSON object")
    verify.set_defaults(run=run_verify)


def run_inspect(arguments: argparse.Namespace) -> Exit:
    """Show a checkpoint's plan."""
    from ..model_inspect import inspect

    return inspect(arguments.path, page_tokens=arguments.page_tokens, as_json=arguments.json)


def run_verify(arguments: argparse.Namespace) -> Exit:
    """Compare a forward with saved tensors."""
    from ..model_verify import verify

    return verify(
        arguments.path,
        arguments.expected,
        device=arguments.device,
        tolerance=arguments.tolerance,
        as_json=arguments.json,
    )
