"""The kernel benchmark's rows come as they are measured; a family that dies or hangs costs only its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cedar.ops.bench import kernels


def child(family: str) -> list[str]:
    """A process that measures nothing: a row, and then what its name says."""
    row = json.dumps({"operation": family, "shape": "a row"})
    end = {"dies": "sys.exit(3)", "hangs": "time.sleep(60)"}.get(family, "")
    return [sys.executable, "-c", f"import sys, time\nprint({row!r}, flush=True)\n{end}"]


def test_rows_come_before_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FAMILY_TIMEOUT_S", 600)
    rows = kernels.collect(["hangs", "well"], tmp_path / "log", child)
    assert next(rows)["shape"] == "a row"
    rows.close()  # type: ignore[attr-defined]  # ends the child: pytest's timeout is below its sleep


def test_a_family_that_dies_or_hangs_ends_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FAMILY_TIMEOUT_S", 2)
    rows = list(kernels.collect(["dies", "hangs", "well"], tmp_path / "log", child))
    assert [row["operation"] for row in rows] == ["dies", "dies", "hangs", "hangs", "well"]
    assert ["ended with 3" in rows[1]["note"], "ended with -9" in rows[3]["note"]] == [True, True]
