"""``cedar stop``: end a cluster that ``cedar serve`` started on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "stop",
        help="stop a cluster of this machine",
        description="Ask a cluster that was started here to drain and stop, and wait until it has.",
        epilog="examples:\n  cedar stop\n  cedar stop --cluster staging\n  cedar stop --all",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cluster", metavar="NAME", help="which one (default: the only one)")
    which.add_argument("--all", action="store_true", help="every cluster of this machine's user")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Exit:
    """Run the verb."""
    from cedar.cluster import remote
    from cedar.cluster.state_file import find, list_clusters

    states = list_clusters() if arguments.all else [find(arguments.cluster)]
    for state in states:
        print(f"stopping {state.name} ({state.address}) ...", flush=True)
        remote.stop(state, timeout_s=arguments.timeout)
        print(f"stopped {state.name}")
    if not states:
        print("no cluster runs here")
    return Exit.OK
