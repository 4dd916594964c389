"""What `cedar model inspect` prints: read off headers, no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cedar.model.config import parse_config
from cedar.model.plan import inspect_checkpoint, network_plan

from .test_config import flash


def test_flash_adds_up_to_the_published_sizes() -> None:
    plan = network_plan(parse_config(flash()))
    gigabytes = {part: round(size.nbytes / 1e9, 1) for part, size in plan.parts.items()}
    assert gigabytes == {
        "draft module": 7.9,
        "vision and aligner": 1.0,
        "embedding": 1.3,
        "head": 1.3,
        "routed experts": 288.8,
        "shared experts": 1.4,
        "engram tables": 202.8,
        "engram projections": 0.3,
        "attention": 5.2,
        "router and streams": 0.3,
    }
    assert round(plan.total.parameters / 1e9, 1) == 763.2
    assert (plan.total.tensors, plan.total.nbytes) == (96085, 510_286_023_000)
    assert plan.bytes_per_token == 890
    assert plan.window_bytes == 40 * 67_584 + 3 * 2 * 512 * 4
    assert plan.stages["encoder"].nbytes == plan.parts["vision and aligner"].nbytes
    assert plan.stages["prefill"] == plan.stages["decode"]


def test_a_checkpoint_is_inspected_without_its_weights(golden: Path) -> None:
    found = inspect_checkpoint(golden)
    assert (found.problems, found.unexpected) == ((), ())
    assert len(found.plan.layers) == 12
    assert found.file_bytes == (golden / "model-00001-of-00001.safetensors").stat().st_size
    assert found.fingerprint is not None


def test_problems_are_listed_not_raised(golden: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        shutil.copy(golden / name, tmp_path / name)
    config = json.loads((golden / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 96
    config["vision_config"]["num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_checkpoint(tmp_path)
    assert any("layers.0.attn.wq_a.weight shape" in problem for problem in found.problems)
    assert "vision.blocks.1.norm1.weight" in found.unexpected
    assert found.fingerprint is None


@pytest.mark.parametrize("page_tokens", [32, 64, 128])
def test_the_page_format_follows_page_tokens(golden: Path, page_tokens: int) -> None:
    found = inspect_checkpoint(golden, page_tokens)
    assert found.plan.layout.page_tokens == page_tokens
