"""``cedar config``: look at configurations without starting anything."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
examples:
  cedar config show                        the presets there are
  cedar config show local-cpu              one of them with every default filled in
  cedar config show local-cpu > my.yaml    a file to edit
  cedar config check my.yaml               is it valid? every mistake in one go
  cedar config schema --markdown           every setting, its type, default and meaning
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "config",
        help="show, check or explain configurations",
        description="Look at configurations without starting anything.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print a configuration with every default filled in")
    show.add_argument("source", nargs="?", metavar="PRESET|FILE", help="none: list the presets")
    show.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    show.set_defaults(run=run_show)
    check = actions.add_parser("check", help="exit 0 if it is valid, else say what is not")
    check.add_argument("source", metavar="PRESET|FILE")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    check.set_defaults(run=run_check)
    schema = actions.add_parser("schema", help="JSON schema, or a table, of every setting")
    schema.add_argument("--markdown", action="store_true", help="the table of docs/operations.md")
    schema.set_defaults(run=run_schema)


def run_show(arguments: argparse.Namespace) -> Exit:
    """Print the effective configuration, or the presets."""
    from cedar.cluster.config_load import load_config, presets
    from cedar.cluster.config_print import effective_yaml

    if arguments.source is None:
        print("\n".join(presets()))
    else:
        print(effective_yaml(load_config(arguments.source, arguments.set)), end="")
    return Exit.OK


def run_check(arguments: argparse.Namespace) -> Exit:
    """Validate; errors leave through ``ConfigError``. Says so when no checkpoint was there to be judged."""
    from cedar.cluster.config_load import load_config
    from cedar.cluster.model_check import check_model

    unread = check_model(load_config(arguments.source, arguments.set))
    print(f"{arguments.source}: valid" + (f", but {unread}" if unread else ""))
    return Exit.OK


def run_schema(arguments: argparse.Namespace) -> Exit:
    """Print the schema."""
    from cedar.cluster.config_print import json_schema, knobs_markdown

    if arguments.markdown:
        print(knobs_markdown(), end="")
    else:
        json.dump(json_schema(), sys.stdout, indent=2)
        print()
    return Exit.OK
