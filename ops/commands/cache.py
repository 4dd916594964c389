"""``cedar cache``: look into the store, prove that it is sound, and carry pages between stores."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import Exit
from .cache_nodes import add_target, add_tenant

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
a tour:
  cedar cache stats                          how full, how much was found, the hit rate
  cedar cache top --watch                    who holds how much, again every second
  cedar cache explain "What is this?"        page by page: is it there, where, since when
  cedar cache verify --sample 0.05           read a twentieth and check it, change nothing
  cedar cache scrub --rate-mib 50            read everything, slowly; quarantine what is damaged
  cedar cache export --tenant acme acme.pack          a tenant's pages in one file ...
  cedar cache import acme.pack --cluster new          ... and in a new cluster
  cedar cache export --cold s3://bucket/cold          archive everything, in packs
  cedar cache warm --cold s3://bucket/cold            and bring it back
  cedar cache warm --prompts system-prompts.txt       or compute prefixes before they are asked for
  cedar cache purge --tenant acme            forget a tenant, on every node
  cedar cache drain 10.0.0.7:7001            let the others take over from a node that is to go

A store is a cache: everything here may be done while it serves. Sizes are of stored values.
Exit code 1 when something was found damaged, refused or missing; 3 when no store is there.
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "cache",
        help="look into the store: stats, top, explain, verify, scrub, purge, drain, export, import, warm",
        description="Look into the store, prove that it is sound, and carry pages between stores.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_views(actions)
    _add_checks(actions)
    _add_drain(actions)
    _add_moves(actions)


def _action(
    actions: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], Exit],
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help, description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    add_target(parser)
    parser.set_defaults(run=run)
    return parser


def _add_views(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    _action(
        actions, "stats", _lazily("cache_view", "run_stats"),
        "how full the store is, what it served, the hit rate",
        "Figures of every node and their sum. The hit rate is tokens served from a cache over prompt tokens, "
        "as the requests reported them; it needs a cluster, nodes alone do not know it.",
    )  # fmt: skip
    top = _action(
        actions, "top", _lazily("cache_top", "run_top"),
        "tenants by bytes, and what is read and written now",
        "Who holds how much. Tenants are shown by the first digits of their domain, as metrics show them.",
    )  # fmt: skip
    top.add_argument(
        "--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help="repeat (default: every 1)"
    )
    explain = _action(
        actions, "explain", _lazily("cache_view", "run_explain"),
        "page by page, what the store has of a prompt",
        "Tokenize a prompt as the gateway would and show where each of its pages stands: hit or miss and "
        "why, tier, node, age, tenant. Looking is not a use: nothing is kept longer for it.",
    )  # fmt: skip
    explain.add_argument("prompt", help="the prompt's text")
    _add_prompt_form(explain)
    explain.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="repeatable")
    explain.add_argument("--system", metavar="TEXT", help="a system message before it")
    explain.add_argument("--conversation", type=Path, metavar="FILE", help="as of cedar generate")
    explain.add_argument("--thinking", action="store_true", help="as of cedar generate")
    add_tenant(explain)


def _add_checks(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = _action(
        actions, "verify", _lazily("cache_check", "run_verify"),
        "read stored pages and check them; changes nothing",
        "Read pages from disk and verify header, key and checksum of each. Exit code 1 if any is damaged.",
    )  # fmt: skip
    verify.add_argument(
        "--sample", type=float, metavar="PART", help="a random part, such as 0.05 (default: all)"
    )
    scrub = _action(
        actions, "scrub", _lazily("cache_check", "run_scrub"),
        "read every page and quarantine what is damaged",
        "Verify everything. A damaged page is set aside and counted; from then on it is read from its "
        "replica, or computed again.",
    )  # fmt: skip
    for parser in (verify, scrub):
        parser.add_argument("--rate-mib", type=float, metavar="N", help="read at most so many MiB a second")
        add_tenant(parser)
    purge = _action(
        actions, "purge", _lazily("cache_check", "run_purge"),
        "remove everything of a tenant, on every tier and node",
        "Remove a tenant's pages and window state from every node, replicas too, and from the cold tier.",
    )  # fmt: skip
    add_tenant(purge, required=True)
    purge.add_argument("--cold", metavar="URL", help="also from the cold tier there")
    purge.add_argument("--yes", action="store_true", help="do not ask")
    purge.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="a node's (default 60)")


def _add_drain(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    drain = _action(
        actions, "drain", _lazily("cache_drain", "run_drain"),
        "let the other nodes take over what a node holds",
        "The node takes no more writes, the others take what they now own, then it leaves their list and "
        "may be stopped. Reads hit all the while. Exit code 1 if that was not done in time.",
    )  # fmt: skip
    drain.add_argument("name", metavar="NODE", help="its address, or what it calls itself")
    drain.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="how long to wait (default 600)"
    )


def _add_moves(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    export = _action(
        actions, "export", _lazily("cache_move", "run_export"),
        "pages into one file, or into the cold tier",
        "Copy pages, each verified, into one file that `import` reads, or as packs into the cold tier. "
        "Without --tenant, --prompt or --segment: everything.",
    )  # fmt: skip
    export.add_argument("file", nargs="?", type=Path, metavar="FILE")
    export.add_argument("--cold", metavar="URL", help="a folder that fsspec opens: /path, memory://, s3://")
    export.add_argument("--prompt", metavar="TEXT", help="only what is held of this prompt")
    export.add_argument("--segment", type=int, metavar="N", help="only this segment of each node")
    export.add_argument("--force", action="store_true", help="replace FILE")
    _add_prompt_form(export)
    add_tenant(export)
    load = _action(
        actions, "import", _lazily("cache_move", "run_import"),
        "pages out of a file into the store",
        "Put the pages of an exported file into the store. Pages that are there already stay as they are, so "
        "it may be run again. Keys are bound to the tenant's secret: a new cluster needs the old one's.",
    )  # fmt: skip
    load.add_argument("file", type=_existing_file, metavar="FILE")
    warm = _action(
        actions, "warm", _lazily("cache_move", "run_warm"),
        "fill a store before it is asked: from the cold tier, or by running prompts",
        "Restore packs from the cold tier, or send each prompt of a file through the cluster once, so that "
        "its pages are there. FILE: one prompt a line, bare text or JSON with text, or user and system.",
    )  # fmt: skip
    warm.add_argument("--cold", metavar="URL", help="restore from the cold tier there")
    warm.add_argument("--prompts", type=_existing_file, metavar="FILE", help="run these prompts")
    warm.add_argument("--api-key-file", type=Path, metavar="FILE", help="for --prompts, as of cedar generate")
    add_tenant(warm)


def _add_prompt_form(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--raw", action="store_true", help="the bare text, without the chat format")


def _lazily(module: str, name: str) -> Callable[[argparse.Namespace], Exit]:
    """The function of that name, imported when it is run: help should not load gRPC."""

    def run(arguments: argparse.Namespace) -> Exit:
        from importlib import import_module

        found: Callable[[argparse.Namespace], Exit] = getattr(import_module(f"{__package__}.{module}"), name)
        return found(arguments)

    return run


def _existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return path
