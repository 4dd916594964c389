"""Measures the store: ``python -m cedar.ops.bench.store [--only NAME] [--json FILE] [--markdown FILE]``.

Every figure is a ratio to a yardstick measured beside it in the same run, a median over repetitions, next to
what was predicted and to its limit. Exit status 1 when a limit is missed. Nothing else should run meanwhile:
the report says how much of the processors others took, and the quartiles how far to trust a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .store_measure import Figure

Suite = Callable[[Path], list[Figure]]


def suites() -> dict[str, Suite]:
    """What can be measured, by name."""
    from .store_cold_reads import cold_reads
    from .store_disk import durable_puts, warm_reads
    from .store_node_puts import node_puts
    from .store_peers import peers
    from .store_rpc import loopback
    from .store_soak import soak

    return {
        "cold": cold_reads,
        "warm": warm_reads,
        "put": durable_puts,
        "node-put": node_puts,
        "loopback": loopback,
        "peers": peers,
        "soak": soak,
    }


def machine() -> str:
    """What it was measured on."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(": ")[2]
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    python = platform.python_version()
    return f"{os.cpu_count()} x {model}, {memory_gib:.0f} GiB, Linux {platform.release()}, Python {python}"


def processor_seconds() -> tuple[float, float]:
    """Seconds of processor time that the machine has spent since its start, and this process with its own."""
    used = [int(text) for text in Path("/proc/stat").read_text().split()[1:9]]
    idle, waiting = used[3:5]
    seconds = (sum(used) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return seconds, sum(usage.ru_utime + usage.ru_stime for usage in own)


def markdown(figures: Sequence[Figure], about: str) -> str:
    """The report as a table."""
    head = "| figure | predicted | measured (quartiles) | limit | met | beside |"
    lines = [about, "", head, "|---|---|---|---|---|---|"]
    for row in figures:
        sign = "at least" if row.at_least else "at most"
        limit = "-" if row.limit is None else f"{sign} {row.limit:g}"
        met = "-" if row.limit is None else "yes" if row.met else "**no**"
        beside = ", ".join(f"{name.replace('_', ' ')} {value:,.1f}" for name, value in row.details.items())
        quartiles = f"{row.ratio:.2f} ({row.spread[0]:.2f} to {row.spread[1]:.2f}; {row.repeats})"
        name = row.name + (f" ({row.note})" if row.note else "")
        lines.append(f"| {name} | {row.predicted:g} | {quartiles} | {limit} | {met} | {beside} |")
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module docstring."""
    known = suites()
    parser = argparse.ArgumentParser(prog="python -m cedar.ops.bench.store", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(known), help="may be repeated (default: all)")
    parser.add_argument("--directory", type=Path, help="where files are made (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    arguments = parser.parse_args(argv)
    figures: list[Figure] = []
    started_s = time.monotonic()
    all_before_s, own_before_s = processor_seconds()
    for name in arguments.only or known:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="cedar-bench-", dir=arguments.directory) as directory:
            found = known[name](Path(directory))
        for row in found:
            mark = "     " if row.limit is None else "met  " if row.met else "MISS "
            quartiles = f"({row.spread[0]:.3f} to {row.spread[1]:.3f})"
            print(f"  {mark}{row.ratio:8.3f}  {quartiles}  {row.name}", flush=True)
        figures += found
    all_s, own_s = processor_seconds()
    others = (all_s - all_before_s - own_s + own_before_s) / (time.monotonic() - started_s)
    about = f"{machine()}; {time.strftime('%Y-%m-%d')}; others used {max(others, 0.0):.2f} processors"
    print(about)
    if arguments.json:
        record = {"about": about, "figures": [row.record() for row in figures]}
        arguments.json.write_text(json.dumps(record, indent=1), "utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(figures, about), "utf-8")
    return 0 if all(row.met for row in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
