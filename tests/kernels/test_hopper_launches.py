"""What a layer of Flash's widths launches on a Hopper card, counted without one (`walk_hopper`).

That the launches give what they should is shown by tests/gpu; here every path of the host is walked, and
every launch binds the arguments that its kernel has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu counts what is launched")


@cache
def walked() -> dict[tuple[str, int], tuple[list[str], list[bool]]]:
    """The kernels of each case, in order, and whether each may begin before the one before has ended."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.walk_hopper"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["case"], line["size"]): (line["launched"], line["early"]) for line in lines}


def launched() -> dict[tuple[str, int], list[str]]:
    """The kernels of each case, in order."""
    return {case: names for case, (names, _) in walked().items()}


@pytest.mark.parametrize("batch", [1, 3, 8, 12, 16, 40, 64, 65, 80, 100, 128])
def test_a_reuse_layer_in_decode(batch: int) -> None:
    assert len(launched()["decode", batch]) == 11


@pytest.mark.parametrize("tokens", [200, 300, 512, 1000, 4096])
def test_a_reuse_layer_in_prefill(tokens: int) -> None:
    assert len(launched()["prefill", tokens]) == 15


def test_a_chunk_of_many_prompts_can_be_launched() -> None:
    """600 windows are 76,800 rows to copy: CUDA starts no grid whose second number is above 65,535."""
    assert "_latents" in launched()["prompts", 600]


def test_keys_are_expanded_for_chunks_alone() -> None:
    """By the layer before, of those who share a source: a Reuse layer finds entries expanded."""
    second = {case: names for case, names in launched().items() if case[0] != "prompts"}
    assert all("expand" not in names for names in second.values())
    for (case, size), names in second.items():
        assert ("attend_expanded" in names) == (case == "prefill" and size >= 256)


def test_a_small_chunk_runs_a_steps_launches() -> None:
    assert len(launched()["prefill", 128]) == 11


def test_a_step_of_few_sequences_calls_no_library() -> None:
    for batch in (1, 3, 8, 40, 64, 80, 100, 128):
        assert not {"mm", "bmm"} & set(launched()["decode", batch])


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_index_keys_are_written_well_before_they_are_scored(batch: int) -> None:
    """Scores read keys, page table and `seq` before the launch before them has ended. So between the launches
    that write those and the scores stands one that begins when all before it have ended.
    """
    names, early = walked()["select", batch]
    scores = names.index("score_one")
    assert early[scores]
    last = max(names.index("entries"), names.index("_tables"))
    assert not all(early[last + 1 : scores])
