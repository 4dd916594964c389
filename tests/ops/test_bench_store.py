"""The store's benchmark: how figures are made, and that each suite runs, small."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from cedar.ops.bench import store, store_disk, store_measure, store_node_puts, store_rpc, store_soak
from cedar.ops.bench.store_measure import Figure, figure, interleaved, speed_ratios


def test_figures_say_whether_they_are_met() -> None:
    low = figure("a", [0.5, 0.9, 0.7], predicted=1.0, limit=0.6)
    assert (low.ratio, low.met) == (0.7, True)
    assert not figure("b", [0.5], predicted=1.0, limit=0.6).met
    assert figure("c", [1.1], predicted=1.0, limit=1.2, at_least=False).met
    assert not figure("d", [1.3], predicted=1.0, limit=1.2, at_least=False).met
    assert figure("e", [9.0], predicted=1.0).met


def test_ratios_are_taken_within_a_repetition() -> None:
    clock = iter([2.0, 4.0, 6.0, 12.0])
    results = interleaved({"own": lambda: next(clock)}, 2)
    results["base"] = [1.0, 4.0]
    assert speed_ratios(results, "own", "base") == [0.5, 1.0]


def test_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [figure("x / y", [0.5, 0.7], predicted=1.0, limit=0.9, details={"own_MB_s": 1234.5})]
    monkeypatch.setattr(store, "suites", lambda: {"cold": lambda directory: rows})
    report, table = tmp_path / "a.json", tmp_path / "a.md"
    assert store.main(["--json", str(report), "--markdown", str(table), "--directory", str(tmp_path)]) == 1
    assert json.loads(report.read_text())["figures"][0]["met"] is False
    assert (
        "| x / y | 1 | 0.60 (0.50 to 0.70; 2) | at least 0.9 | **no** | own MB s 1,234.5 |"
        in table.read_text()
    )
    assert "MISS" in capsys.readouterr().out


def expect_measured(figures: Sequence[Figure], *, limits: int) -> None:
    """Each has a name of its own and was measured, and so many are held to a limit."""
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.ratio > 0 for figure in figures)
    assert sum(figure.limit is not None for figure in figures) == limits


def test_disk_suites_run(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    expect_measured(store_disk.warm_reads(tmp_path / "warm", pages=16, repeats=1), limits=1)
    (tmp_path / "put").mkdir()
    expect_measured(store_disk.durable_puts(tmp_path / "put", batches=2), limits=4)


def test_node_suites_run(tmp_path: Path) -> None:
    expect_measured(store_rpc.loopback(tmp_path, pages=16, repeats=1), limits=4)
    (tmp_path / "put").mkdir()
    expect_measured(store_node_puts.node_puts(tmp_path / "put", repeats=1, pages=16), limits=1)


def test_soak_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_soak, "CAPACITY", 16 << 20)
    growth, disk = store_soak.soak(tmp_path, operations=40_000)
    assert growth.details["expired"] + growth.details["evicted"] > 0
    assert disk.met


def test_values_are_whole_pages() -> None:
    (key,) = store_measure.bench_keys(1)
    assert len(store_measure.bench_value(key)) == 56 * 4096 - 16 - 1424
