"""``cedar cache stats`` and ``explain``: what the store did, and what it has of a prompt."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict

from ..exits import Exit
from ..screen import console, count, emit_json, size, table
from .cache_nodes import Target
from .cache_top import age

SUMMED = (
    ("pages held", "store_pages", count),
    ("bytes of pages", "store_page_bytes", size),
    ("disk taken", "store_disk_bytes", size),
    ("disk allowed", "store_capacity_bytes", size),
    ("window records", "store_window_records", count),
    ("window memory", "store_window_bytes", size),
    ("window memory allowed", "store_window_budget_bytes", size),
    ("pages served", "store_pages_read", count),
    ("bytes served", "store_read_bytes", size),
    ("pages stored", "store_puts_stored", count),
    ("pages refused", "store_puts_refused", count),
    ("pages dropped, past their time", "store_pages_evicted_expired", count),
    ("pages dropped, for room", "store_pages_evicted_capacity", count),
    ("pages damaged", "store_values_corrupt", count),
)


def run_stats(arguments: argparse.Namespace) -> Exit:
    """Show every node's figures and their sum."""
    target = Target.find(arguments)
    nodes = target.ask(lambda admin: admin.stats())
    prompts = prompt_sources(target)
    if arguments.json:
        emit_json({"nodes": nodes, "prompts": prompts}, sys.stdout)
        return Exit.OK
    names = list(nodes)
    columns = ["", *names, *(["all"] if len(names) > 1 else [])]
    rows = [
        [title, *(form(value) for value in _with_sum([nodes[n].get(stat, 0.0) for n in names]))]
        for title, stat, form in SUMMED
    ]
    rate = [_ratio(nodes[n], "store_match_pages", "store_match_keys") for n in names]
    if len(names) > 1:
        looked = ("store_match_pages", "store_match_keys")
        sums = {key: sum(nodes[n].get(key, 0.0) for n in names) for key in looked}
        rate.append(_ratio(sums, "store_match_pages", "store_match_keys"))
    rows.append(["pages found of those looked for", *rate])
    screen = console()
    screen.print(table("store", columns, rows, right="l" + "r" * len(columns)))
    if prompts:
        total = prompts["prompt_tokens"]
        served = total - prompts["computed_tokens"]
        parts = ", ".join(f"{count(v)} {SOURCES[k]}" for k, v in prompts.items() if k in SOURCES)
        share = f"{served / total:.1%}" if total else "no prompt yet"
        screen.print(f"hit rate: {share} of {count(total)} prompt tokens came from a cache ({parts})")
    return Exit.OK


# A gateway's counter to the `source` label under which the metrics count the same tokens.
SOURCES = {
    "hit_local_tokens": "local",
    "hit_store_tokens": "store",
    "state_tokens": "state",
    "computed_tokens": "computed",
}


def prompt_sources(target: Target) -> dict[str, float]:
    """Sums of what requests reported, from the cluster's gateway; empty when only nodes are named."""
    if target.state is None:
        return {}
    from cedar.cluster.remote import status

    for worker in status(target.state).workers:
        if worker.entry.stage == "gateway" and worker.status is not None:
            names = ("prompt_tokens", *SOURCES, "replayed_tokens")
            return {name: worker.status.counters.get(name, 0.0) for name in names}
    return {}


def run_explain(arguments: argparse.Namespace) -> Exit:
    """Show, page by page, what the store has of a prompt."""
    from ..cache_explain import explain

    target = Target.find(arguments)
    found = asyncio.run(explain(target, arguments))
    if arguments.json:
        emit_json(asdict(found), sys.stdout)
        return Exit.OK
    screen = console()
    if not found.pages:
        screen.print(found.summary)
        return Exit.OK
    rows = [
        [
            page.page,
            f"{page.first_token}-{page.last_token}",
            page.outcome,
            page.tier or "-",
            ", ".join(page.nodes) or "-",
            age(page.age_s),
            age(page.idle_s),
            age(page.ttl_left_s),
            page.tenant[:12] or "-",
        ]
        for page in found.pages
    ]
    columns = ["page", "tokens", "outcome", "tier", "node", "age", "last use", "left", "tenant"]
    screen.print(table(f"prompt of {found.prompt_tokens} tokens", columns, rows, right="rrlllrrrl"))
    screen.print(found.summary)
    return Exit.OK


def _with_sum(values: list[float]) -> list[float]:
    return [*values, sum(values)] if len(values) > 1 else values


def _ratio(stats: Mapping[str, float], part: str, whole: str) -> str:
    return f"{stats[part] / stats[whole]:.1%}" if stats.get(whole) else "-"
