"""``cedar status``: what the workers of a cluster do right now."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ..exits import Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from cedar.cluster.remote import ClusterStatus
    from cedar.v1.stages_pb2 import WorkerStatus
    from google.protobuf.message import Message
    from rich.console import Group

EXAMPLES = """\
examples:
  cedar status
  cedar status --watch          again every second, until Ctrl-C
  cedar status --json | jq '.workers[] | select(.error != "")'

The store's counters are those that are not 0; --json has all, and docs/operations.md says what each means.
Exit code 3 when no cluster runs here, 1 when one of its workers does not answer.
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "status",
        help="workers, pages, slots and the store of a cluster",
        description="Ask every worker of a cluster on this machine how it is.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cluster", metavar="NAME", help="which one (default: the only one)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object with every counter")
    how.add_argument(
        "--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help="repeat (default: every 1)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Exit:
    """Run the verb."""
    from cedar.cluster.remote import status
    from cedar.cluster.state_file import find

    from ..screen import console, emit_json

    if arguments.watch is not None:
        return watch(arguments.cluster, arguments.watch)
    found = status(find(arguments.cluster))
    if arguments.json:
        emit_json(as_record(found), sys.stdout)
    else:
        console().print(as_tables(found))
    return Exit.FAILED if any(worker.error for worker in found.workers) else Exit.OK


def watch(cluster: str | None, every_s: float) -> Exit:
    """Redraw until interrupted, or until the cluster's owner is gone."""
    from cedar.cluster.remote import status
    from cedar.cluster.state_file import find

    from ..screen import redraw

    return redraw(lambda: as_tables(status(find(cluster))), every_s)


def as_record(found: ClusterStatus) -> dict[str, object]:
    """Everything, for programs."""
    from google.protobuf.json_format import MessageToDict

    def plain(message: Message | None) -> object:
        if message is None:
            return None
        return MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    return {
        "name": found.state.name,
        "address": found.state.address,
        "pid": found.state.pid,
        "up_s": time.time() - found.state.started_unix_s,
        "model": plain(found.model),
        "workers": [
            {
                "stage": worker.entry.stage,
                "address": worker.entry.address,
                "pid": worker.entry.pid,
                "incarnation": worker.entry.incarnation,
                "error": worker.error,
                "status": plain(worker.status),
                "store": worker.store,
            }
            for worker in found.workers
        ],
    }


def as_tables(found: ClusterStatus) -> Group:
    """Tables for people: the cluster, its workers, its store."""
    from rich.console import Group

    from ..screen import size, table

    up_s = time.time() - found.state.started_unix_s
    title = f"{found.state.name}: {found.state.address}, up {up_s:,.0f} s, owner process {found.state.pid}"
    if found.model is not None:
        model = found.model
        title += (
            f"\n{model.name}: context {model.context_tokens:,} tokens, page {model.page_tokens} tokens, "
            f"{size(model.page_bytes)}, {model.bytes_per_token:g} bytes a token"
        )
    rows = []
    for worker in found.workers:
        entry, status = worker.entry, worker.status
        row: list[object] = [entry.stage, entry.address, entry.pid]
        if status is None:
            row += ["", "", "", "", "", worker.error or "ok"]
        else:
            state = worker.error or ("draining" if status.draining else "ok")
            pages = (
                f"{status.pages_leased}+{status.pages_cached}/{status.pages_total}"
                if status.pages_total
                else ""
            )
            slots = f"{status.slots_leased}/{status.slots_total}" if status.slots_total else ""
            row += [status.active, status.queued, pages, slots, drafts(status), state]
        rows.append(row)
    columns = (
        "stage", "address", "pid", "active", "queued", "pages used+kept/all", "slots",
        "drafts accepted/all", "state",
    )  # fmt: skip
    parts = [table(title, columns, rows, "llrrrrrrl")]
    stores = [worker for worker in found.workers if worker.store]
    if stores:
        answers = [worker.store or {} for worker in stores]
        shown = [
            (
                name,
                *("" if (value := answer.get(name)) is None else _shown(name, value) for answer in answers),
            )
            for name in sorted({name for answer in answers for name, value in answer.items() if value})
        ]
        nodes = ("counter", *(worker.entry.address for worker in stores))
        parts.append(table("store", nodes, shown, "l" + "r" * len(stores)))
    return Group(*parts)


def drafts(status: WorkerStatus) -> str:
    """Proposed tokens that the backbone agreed with, of all; empty where nothing is drafted."""
    if "draft_proposed" not in status.counters:
        return ""
    return f"{status.counters['draft_accepted']:.0f}/{status.counters['draft_proposed']:.0f}"


def _shown(name: str, value: float) -> str:
    from ..screen import size

    return size(value) if name.endswith("bytes") else f"{value:,.6g}"
