"""Times every kernel against its floor: ``python -m cedar.ops.bench.kernels [--only FAMILY] [--out FOLDER]``;
with ``--peers`` others' kernels beside ours (`kernel_peers`).

Prints one table (time, bytes, operations, share of the floor, a reference's time) and writes
``kernels.json`` and a plot, ``kernels.svg``, row by row as they are measured. Every family runs in a
process of its own: a kernel that fails or hangs costs its own rows only.
Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

from cedar.ops.bench.kernel_peers import PEERS, PeerMissing, left_out, missing_peers, usable

FAMILIES = {
    "attention": "cedar.ops.bench.kernel_cases_attention:attention_cases",
    "index": "cedar.ops.bench.kernel_cases_attention:index_cases",
    "select": "cedar.ops.bench.kernel_cases_attention:select_cases",
    "experts": "cedar.ops.bench.kernel_cases_layers:expert_cases",
    "linear": "cedar.ops.bench.kernel_cases_layers:linear_cases",
    "cache": "cedar.ops.bench.kernel_cases_layers:cache_cases",
    "small": "cedar.ops.bench.kernel_cases_layers:small_cases",
}
FAMILY_TIMEOUT_S = 240


def cases_of(family: str) -> Callable[[], Iterable[Any]]:
    """The function that yields a family's or a peer's cases. Raises PeerMissing."""
    module, name = (PEERS[family].cases if family in PEERS else FAMILIES[family]).split(":")
    if family not in PEERS:
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    import torch

    peer = usable(family, torch.cuda.get_device_capability()[0])
    return partial(getattr(import_module(module), name), peer)


def run_family(family: str) -> None:
    """Measures one family in this process; every row goes to standard output as a line of JSON."""
    import torch
    from cedar.ops.bench.kernel_timing import measure

    torch.manual_seed(20_26)
    try:
        iterator = iter(cases_of(family)())
    except PeerMissing as why:
        print(json.dumps(left_out(family, why)), flush=True)
        return
    while True:
        try:
            case = next(iterator)
        except StopIteration:
            return
        try:
            line = asdict(measure(case))
        except Exception as error:
            traceback.print_exc()
            line = {"operation": case.operation, "shape": case.shape, "note": f"failed: {str(error)[:300]}"}
            if "CUDA error" in str(error) or "illegal" in str(error):
                print(json.dumps(line), flush=True)
                raise
        print(json.dumps(line), flush=True)
        torch.cuda.empty_cache()


def child_of(family: str) -> list[str]:
    """The command that measures one family."""
    return [sys.executable, "-m", "cedar.ops.bench.kernels", "--family", family]


def collect(
    families: Iterable[str], errors: Path, command: Callable[[str], list[str]] = child_of
) -> Iterator[dict[str, Any]]:
    """Runs families one after another, each in a child process, and yields rows as they come: what was
    measured before somebody stops the run is not lost. A child that fails or hangs ends in a row of its own.
    """
    with errors.open("w") as log:
        for family in families:
            child = subprocess.Popen(command(family), stdout=subprocess.PIPE, stderr=log, text=True)
            assert child.stdout is not None
            timer = Timer(FAMILY_TIMEOUT_S, child.kill)
            timer.start()
            try:
                for line in child.stdout:
                    if line.startswith("{"):
                        yield json.loads(line)
                ending = child.wait()
            finally:
                timer.cancel()
                child.kill()
                child.wait()
                child.stdout.close()
            if ending:
                yield {"operation": family, "shape": "", "note": f"the family's process ended with {ending}"}


def table(rows: list[dict[str, Any]]) -> str:
    """The table as text."""
    head = ("operation", "shape", "us", "MB", "GFLOP", "floor us", "share", "reference", "target", "error")
    lines = [head]
    for row in rows:
        if "time_us" not in row:
            lines.append((row["operation"], row["shape"], row.get("note", ""), *[""] * 7))
            continue
        reference = f"{row['reference_us']:.1f} {row['reference_name']}" if row["reference_us"] else ""
        verdict = "" if row["error"] is None else f"{row['error']:.1e}" + ("" if row["passed"] else " FAILED")
        lines.append((
            row["operation"], row["shape"], f"{row['time_us']:.1f}", f"{row['bytes'] / 1e6:.2f}",
            f"{row['flops'] / 1e9:.2f}",
            f"{row['floor_us']:.2f}", f"{row['share']:.0%}", reference, row["target"], verdict,
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def plot(rows: list[dict[str, Any]]) -> str:
    """An SVG of horizontal bars: each row's share of its floor."""
    drawn = [row for row in rows if "time_us" in row]
    height = 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height * (len(drawn) + 2)}" '
        'font-family="sans-serif" font-size="11">',
        '<text x="4" y="13">share of the floor, max(bytes / 4.3 TB/s, operations / 790 TFLOP/s)</text>',
    ]
    for i, row in enumerate(drawn):
        y = height * (i + 1)
        label = f"{row['operation']}, {row['shape']}".replace("&", "&amp;").replace("<", "&lt;")
        parts.append(f'<text x="4" y="{y + 13}">{label}</text>')
        parts.append(
            f'<rect x="400" y="{y + 3}" width="{min(row["share"], 1.2) * 380:.0f}" height="12" fill="#3a7"/>'
        )
        parts.append(
            f'<text x="{404 + min(row["share"], 1.2) * 380:.0f}" y="{y + 13}">{row["share"]:.0%}</text>'
        )
    parts.append(
        f'<line x1="780" y1="{height}" x2="780" y2="{height * (len(drawn) + 1)}" stroke="#999"/></svg>'
    )
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Entry point; 0 when every check passed, or there was nothing to run on."""
    parser = argparse.ArgumentParser(prog="python -m cedar.ops.bench.kernels", description=__doc__)
    parser.add_argument("--only", help="families, comma-separated: " + ", ".join(FAMILIES))
    parser.add_argument(
        "--peers", action="store_true", help="others' kernels beside ours: " + ", ".join(PEERS)
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder for kernels.json and kernels.svg")
    parser.add_argument("--family", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to time")
        if arguments.peers:
            print(table(missing_peers()))
        return 0
    if arguments.family:
        run_family(arguments.family)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    families = arguments.only.split(",") if arguments.only else list(PEERS if arguments.peers else FAMILIES)
    rows: list[dict[str, Any]] = []
    record = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    for row in collect(families, arguments.out / "kernels.log"):
        rows.append(row)
        print(f"{len(rows)}: {row['operation']}, {row['shape']}", file=sys.stderr, flush=True)
        (arguments.out / "kernels.json").write_text(json.dumps(record, indent=1))
        (arguments.out / "kernels.svg").write_text(plot(rows))
    print(table(rows))
    measured = [row for row in rows if "left_out" not in row]
    return 0 if all(row.get("passed", True) is not False and "time_us" in row for row in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
