"""``cedar model verify``: a checkpoint's forward on this machine against saved tensors, error by error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .exits import CommandError, Exit
from .screen import console, emit_json, table

if TYPE_CHECKING:
    from cedar.model.comparison import TensorResult

TOLERANCE = 1e-3
# Whole numbers: selections, tokens, hashes. They are right or wrong.
EXACT = ("topk", "tokens", "next", "token_types", "grid", "engram_hash")


def verify(path: str, expected: Path, *, device: str, tolerance: float | None, as_json: bool) -> Exit:
    """Print the error of every saved tensor; exit 1 when one that was compared is over its tolerance."""
    if tolerance is not None and not tolerance >= 0:
        raise CommandError(f"--tolerance: {tolerance} is below 0")
    if not expected.is_file():
        raise CommandError(f"--expected: {expected}: no such file")
    from cedar.model.verify import verify as compare

    print(f"running {path} on {device} against {expected.name} ...", file=sys.stderr, flush=True)
    results = compare(path, expected, device)
    limit = TOLERANCE if tolerance is None else tolerance
    if as_json:
        tensors = [{**asdict(result), "passed": passed(result, limit)} for result in results]
        emit_json({"tolerance": limit, "tensors": tensors}, sys.stdout)
    else:
        show(results, limit)
    if not any(result.compared for result in results):
        raise CommandError(f"{expected}: holds no tensor that this network gives", Exit.FAILED)
    return Exit.OK if all(passed(result, limit) is not False for result in results) else Exit.FAILED


def allowed(name: str, limit: float) -> float:
    """Largest relative L2 error of a tensor."""
    leaf = name.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
    return 0.0 if leaf in EXACT else limit


def passed(result: TensorResult, limit: float) -> bool | None:
    """Whether a tensor is within its tolerance; None when it was not compared."""
    if not result.compared:
        return None
    if result.relative_l2 is None or (result.note and not result.exact):
        return False
    return bool(result.exact) or 0 < result.relative_l2 <= allowed(result.name, limit)


def show(results: Sequence[TensorResult], limit: float) -> None:
    """One row a tensor, then the sum."""
    words = {True: "ok", False: "OVER", None: "-"}
    rows = []
    for result in results:
        verdict = "exact" if result.exact else words[passed(result, limit)]
        equal = "" if result.equal_fraction is None else f"{result.equal_fraction:.4%}"
        shape = "x".join(map(str, result.shape))
        rows.append(
            (
                result.name,
                shape,
                number(result.relative_l2),
                number(result.max_abs),
                equal,
                verdict,
                result.note,
            )
        )
    columns = ("tensor", "shape", "relative L2", "max abs", "equal", "", "")
    console().print(table("saved tensors against this machine", columns, rows, "lrrrrll"))
    compared = [result for result in results if result.compared]
    exact = sum(bool(result.exact) for result in compared)
    over = sum(passed(result, limit) is False for result in compared)
    print(
        f"{len(compared)} tensors compared, {exact} of them equal bit for bit, {over} over tolerance "
        f"({limit:g}; whole numbers exact); {len(results) - len(compared)} not compared"
    )


def number(value: float | None) -> str:
    """An error as people read it."""
    return "" if value is None else "0" if value == 0 else f"{value:.2e}"
