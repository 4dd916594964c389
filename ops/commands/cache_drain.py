"""``cedar cache drain``: take a node out of the store without losing what it holds."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from ..exits import CommandError, Exit
from ..screen import emit_json
from .cache_nodes import Target
from .cache_progress import StepProgress

if TYPE_CHECKING:
    from cedar.v1 import admin_pb2


def run_drain(arguments: argparse.Namespace) -> Exit:
    """Let the other nodes take over what a node holds, and take it off their list."""
    if not arguments.timeout > 0:
        raise CommandError(f"--timeout: {arguments.timeout} is not above 0 seconds")
    target = Target.find(arguments)

    async def drain(progress: StepProgress) -> tuple[str, admin_pb2.DrainProgress | None]:
        one = await target.node(arguments.name)
        last: admin_pb2.DrainProgress | None = None
        async with one.admin() as admin:
            async for last in admin.drain(arguments.timeout):
                progress.at(f"{last.nodes_unsettled} nodes and {last.copies_waiting} runs are waited for")
        return one.addresses[0], last

    with StepProgress(f"drain {arguments.name}", quiet=arguments.json) as progress:
        address, last = asyncio.run(drain(progress))
    handed_over = last is not None and last.handed_over
    node_id = "" if last is None else last.node_id
    if arguments.json:
        emit_json({"node": address, "node_id": node_id, "handed_over": handed_over}, sys.stdout)
    elif handed_over:
        print(f"{node_id} at {address}: the others hold what it held, and it is off their list. Stop it now.")
    else:
        print(
            f"{node_id} at {address}: not everything was handed over in {arguments.timeout:g} s. It takes no "
            "writes and goes on handing over: run this again to wait longer, or restart it to take it back",
            file=sys.stderr,
        )
    return Exit.OK if handed_over else Exit.FAILED
