"""Every hot kernel compiles for sm_90 on a machine without a GPU, and the matrix units are used where
meant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")

WGMMA = {
    "attend_hopper", "attend_trades", "attend_expanded", "decode_scores", "score_one", "score_many", "few",
    "many", "trades", "products", "one_slot", "one_token", "tiles_of_eight", "grouped_few",
    "grouped_codes", "entries", "sublayer_tiles", "sublayer_rounds", "bulk", "wide",
    "grouped_bulk", "logit_parts",
}  # fmt: skip
SHARED_LIMIT = 227 * 1024


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    halves = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compile_sm90", str(half), "2"],
            cwd=Path(__file__).parents[2], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for half in range(2)
    ]  # fmt: skip
    lines = []
    for half in halves:
        out, errors = half.communicate(timeout=280)
        assert half.returncode == 0, errors[-2000:]
        lines += [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 55
    for line in lines:
        assert line["cubin"] > 0
        assert line["shared"] <= SHARED_LIMIT, line
        assert line["held_once"], line
        assert line["descriptors"], line
        assert line["ring_first"], line
        assert line["wgmma"] or line["name"] not in WGMMA, line
