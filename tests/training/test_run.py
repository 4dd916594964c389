"""A smoke run on the CPU: every phase, drafts, export; and going on from a saved state."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cedar.model import load_network
from cedar.training.run import build_parser, main


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_smoke_run_exports_a_checkpoint_that_loads(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--workers", "0", "--device", "cpu"]
    assert main([*arguments, "--smoke", "3"]) == 0
    log = lines(tmp_path)
    assert [line["phase"] for line in log if "tokens" not in line and "phase" in line] == ["dense", "sparse"]
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]  # type: ignore[operator]
    assert any("draft_loss" in line for line in log)
    network = load_network(tmp_path / "checkpoint")
    with torch.no_grad():
        assert network.logits([0, 5, 40, 6]).isfinite().all()
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    assert before["step"] == 3
    assert main([*arguments, "--smoke", "4", "--resume"]) == 0
    after = torch.load(tmp_path / "state.pt", weights_only=True)
    assert after["step"] == 4
    assert len(lines(tmp_path)) > len(log)


def test_help_says_what_the_folder_gets() -> None:
    text = build_parser().format_help()
    assert "log.jsonl" in text
    assert "state.pt" in text
