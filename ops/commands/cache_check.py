"""``cedar cache verify``, ``scrub`` and ``purge``: is it sound, and away with it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..exits import CommandError, Exit
from ..screen import console, emit_json, size, table
from .cache_nodes import Target, open_cold
from .cache_progress import PageProgress

if TYPE_CHECKING:
    from cedar.kvstore.tenant_purge import PurgeReport
    from cedar.v1 import admin_pb2


def run_verify(arguments: argparse.Namespace) -> Exit:
    """Read pages and verify them, changing nothing."""
    return _check(arguments, scrub=False)


def run_scrub(arguments: argparse.Namespace) -> Exit:
    """Read every page; quarantine what is bad, so that a good copy takes its place."""
    return _check(arguments, scrub=True)


def _check(arguments: argparse.Namespace, *, scrub: bool) -> Exit:
    from cedar.v1 import admin_pb2

    target = Target.find(arguments)
    sample = getattr(arguments, "sample", None)
    if sample is not None and not 0 < sample <= 1:
        raise CommandError(f"--sample: {sample} is not a part above 0, at most 1")
    if arguments.rate_mib is not None and not arguments.rate_mib > 0:
        raise CommandError(f"--rate-mib: {arguments.rate_mib} is not above 0")
    request = admin_pb2.CheckRequest(
        scrub=scrub, sample=sample or 0.0, bytes_per_s=(arguments.rate_mib or 0.0) * (1 << 20)
    )

    async def follow(progress: PageProgress) -> tuple[dict[str, admin_pb2.CheckProgress], list[list[str]]]:
        request.tenant = await target.tenant(arguments)
        last: dict[str, admin_pb2.CheckProgress] = {}
        bad: list[list[str]] = []
        async with target.admin() as admin:
            async for address, told in admin.check(request):
                last[address] = told
                bad += [[address, page.page_key.hex(), page.reason] for page in told.bad]
                nodes = last.values()
                progress.at(
                    sum(n.pages for n in nodes), sum(n.total for n in nodes), sum(n.bytes for n in nodes)
                )
        return last, bad

    verb = "scrub" if scrub else "verify"
    with PageProgress(verb, quiet=arguments.json) as progress:
        last, bad = asyncio.run(follow(progress))
    if arguments.json:
        pages = [{"node": node, "page_key": key, "reason": reason} for node, key, reason in bad]
        record = {"pages": progress.pages, "bytes": progress.bytes, "bad": pages, "quarantined": scrub}
        emit_json(record, sys.stdout)
    else:
        screen = console()
        if bad:
            screen.print(table("damaged pages", ["node", "page key", "what differs"], bad))
        nodes = f"{len(last)} node{'s' if len(last) > 1 else ''}"
        took = f"{progress.pages} pages on {nodes}, {size(progress.bytes)} at {progress.rate}"
        outcome = f"{len(bad)} damaged{', now quarantined' if scrub else ''}" if bad else "all sound"
        screen.print(f"{took}: {outcome}")
    return Exit.FAILED if bad and not scrub else Exit.OK


def run_purge(arguments: argparse.Namespace) -> Exit:
    """Remove everything of a tenant, on every node and in the cold tier."""
    target = Target.find(arguments)
    domain = asyncio.run(target.tenant(arguments))
    name = arguments.tenant or f"{domain.hex()[:12]}..."
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise CommandError("purge removes a tenant's pages for good; say --yes when nobody can be asked")
        if input(f"Remove everything of tenant {name} for good? [y/N] ").strip().lower() not in ("y", "yes"):
            return Exit.USAGE

    async def purge() -> PurgeReport:
        from cedar.kvstore.members import fixed_list
        from cedar.kvstore.tenant_purge import purge_everywhere
        from cedar.kvstore.transport import GrpcTransport

        members = fixed_list(target.addresses).members
        return await purge_everywhere(
            members, domain, timeout_s=arguments.timeout, transport=GrpcTransport(target.tls)
        )

    report = asyncio.run(purge())
    packs = None
    if arguments.cold:
        packs = open_cold(arguments.cold).purge(domain)
    if arguments.json:
        emit_json({**asdict(report), "cold_packs": packs}, sys.stdout)
    else:
        text = f"removed {report.pages} pages ({size(report.bytes)}) and {report.windows} window records"
        print(text + (f", {packs} packs of the cold tier" if packs is not None else ""))
        if report.unreachable:
            print(f"not reached: {', '.join(report.unreachable)}; run it again", file=sys.stderr)
    return Exit.FAILED if report.unreachable else Exit.OK
