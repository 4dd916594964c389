"""``cedar cache top``: who holds how much of the store, and what it reads and writes now."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..exits import CommandError, Exit
from ..screen import console, count, emit_json, redraw, size, table
from .cache_nodes import Target

if TYPE_CHECKING:
    from cedar.kvstore.admin_client import AdminClient
    from cedar.v1 import admin_pb2
    from rich.table import Table

Stats = Mapping[str, Mapping[str, float]]


@dataclass
class TenantLine:
    """A tenant over all nodes. ``tenant``: its domain in hex; replicas count each."""

    tenant: str
    pages: int = 0
    bytes: int = 0
    used_lately: int = 0
    quota_bytes: float = 0.0
    oldest_s: float = 0.0
    idle_s: float = float("inf")
    ttl_s: float = 0.0

    def add(self, use: admin_pb2.TenantUse) -> None:
        """Take in what one node holds."""
        self.pages += use.pages
        self.bytes += use.bytes
        self.used_lately += use.used_lately
        self.quota_bytes += use.quota_bytes
        self.oldest_s = max(self.oldest_s, use.oldest_s)
        self.idle_s = min(self.idle_s, use.idle_s)
        self.ttl_s = max(self.ttl_s, use.ttl_s)


def run_top(arguments: argparse.Namespace) -> Exit:
    """Show tenants by bytes, once or again and again."""
    target = Target.find(arguments)

    async def both(
        admin: AdminClient,
    ) -> tuple[dict[str, admin_pb2.TopResponse], dict[str, dict[str, float]]]:
        return await admin.top(), await admin.stats()

    if arguments.watch is None:
        nodes, stats = target.ask(both)
        if arguments.json:
            emit_json({"tenants": [asdict(line) for line in tenant_lines(nodes)]}, sys.stdout)
        else:
            console().print(top_table(nodes, stats))
        return Exit.OK
    if arguments.json:
        raise CommandError("--watch and --json: one of them")
    before: Stats = {}

    def view() -> Table:
        nonlocal before
        nodes, stats = target.ask(both)
        seen, before = before, stats
        return top_table(nodes, stats, seen, arguments.watch)

    return redraw(view, arguments.watch)


def tenant_lines(nodes: Mapping[str, admin_pb2.TopResponse]) -> list[TenantLine]:
    """Tenants, most bytes first."""
    lines: dict[bytes, TenantLine] = {}
    for answer in nodes.values():
        for use in answer.tenants:
            lines.setdefault(use.tenant, TenantLine(use.tenant.hex())).add(use)
    return sorted(lines.values(), key=lambda line: -line.bytes)


def top_table(
    nodes: Mapping[str, admin_pb2.TopResponse],
    stats: Stats,
    before: Stats | None = None,
    seconds: float = 1.0,
) -> Table:
    """One line a tenant; the title says what is read and written now, if it is known what was before."""
    title = f"{len(nodes)} store node{'s' if len(nodes) > 1 else ''}"
    if before:
        reads, writes = (
            sum(stats[node].get(name, 0.0) - before[node].get(name, 0.0) for node in stats if node in before)
            for name in ("store_read_bytes", "store_put_bytes")
        )
        title += f": reads {size(reads / seconds)}/s, writes {size(writes / seconds)}/s"
    rows = [
        [
            line.tenant[:12] or "unknown",
            count(line.pages),
            size(line.bytes),
            size(line.quota_bytes) if line.quota_bytes else "-",
            count(line.used_lately),
            age(line.oldest_s),
            age(line.idle_s),
            age(line.ttl_s),
        ]
        for line in tenant_lines(nodes)
    ]
    columns = ["tenant", "pages", "bytes", "quota", "used in 1 h", "oldest", "last use", "kept for"]
    return table(title, columns, rows, right="lrrrrrrr")


def age(seconds: float | None) -> str:
    """A time span as people read it: ``42 s``, ``3.5 h``."""
    if seconds is None:
        return "-"
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
