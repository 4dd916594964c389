"""The ``cedar`` command: finds the verb, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from .commands import cache, config, demo, eval, generate, model, serve, status, stop
from .exits import Exit, explain

COMMANDS = (serve, generate, status, stop, cache, model, config, eval, demo)

EPILOG = """\
a first session:
  cedar serve                                     start a cluster here; Ctrl-C stops it
  cedar generate "What is this?" --image cat.png  in another terminal: ask it
  cedar status --watch                            see its workers work

exit codes: 0 done, 1 failed, 2 caller's mistake, 3 no cluster there, 4 full, 5 deadline, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each verb adds its own part."""
    parser = argparse.ArgumentParser(
        prog="cedar",
        description="Serve DeepSeek-V4.1-class models in three pools: encoder, prefill, decode.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cedar {installed_version()}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks, also of user errors")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for verb in COMMANDS:
        verb.add(verbs)
    return parser


def installed_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("cedar-epd")
    except PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        # Whoever read our output has left, as with `cedar status | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except BaseException as error:
        explained = explain(error)
        if explained is None or arguments.debug:
            raise
        message, code = explained
        print(f"cedar: {message}", file=sys.stderr)
        return code


def command() -> NoReturn:
    """The process's own entry: run the command line and leave with its code."""
    code = main()
    if code == Exit.INTERRUPTED and "ray" in sys.modules:
        # Everything is cleaned up, but a Ray that was stopped halfway through its start can still crash in
        # its destructors. Only the whole process may leave like this, never a caller of main().
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
