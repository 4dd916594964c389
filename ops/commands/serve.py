"""``cedar serve``: start a cluster in the foreground."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from cedar.cluster.launch import RunningCluster

DEFAULT_PRESET = "local-cpu"
EXAMPLES = """\
examples:
  cedar serve                               the preset local-cpu: the built-in model on this machine
  cedar serve -c my.yaml --name staging     your own file; start it with `cedar config show local-cpu`
  cedar serve -c one-node-8gpu --set model.path=/models/flash --set gateway.port=6000

Stays in the foreground until Ctrl-C, SIGTERM or `cedar stop`, then drains and leaves nothing running.
Everything listens on loopback unless the configuration says otherwise.
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "serve",
        help="start a cluster; Ctrl-C stops it",
        description="Start a cluster and serve until stopped.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser)
    parser.add_argument(
        "--name", default="default", help="what status, stop and generate call it (default: default)"
    )
    parser.add_argument("--quiet", action="store_true", help="do not print the effective configuration")
    parser.set_defaults(run=run)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``-c`` and ``--set``."""
    parser.add_argument(
        "-c",
        "--config",
        default=DEFAULT_PRESET,
        metavar="PRESET|FILE",
        help=f"a preset's name or a YAML file (default: {DEFAULT_PRESET})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting; may be repeated",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Run the verb."""
    from cedar.cluster.config_load import load_config
    from cedar.cluster.config_print import effective_yaml
    from cedar.cluster.launch import serve_forever

    from ..progress_view import StepView

    config = load_config(arguments.config, arguments.set)
    if not arguments.quiet:
        print(effective_yaml(config), file=sys.stderr)

    def ready(cluster: RunningCluster) -> None:
        view.close()
        name = "" if arguments.name == "default" else f" --cluster {arguments.name}"
        print(f"serving on {cluster.address}", flush=True)
        print(f'  cedar generate "Hello"{name}\n  cedar status{name}\n  cedar stop{name}', flush=True)

    view = StepView()
    with view:
        code = serve_forever(config, name=arguments.name, on_progress=view, on_ready=ready)
    return Exit(code)
