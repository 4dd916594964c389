"""What the references compute on a CPU does not depend on which CPU it is."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

PRODUCT = """
import hashlib
import cedar.kernels
import torch

torch.manual_seed(3)
a, b = torch.randn(101, 640, dtype=torch.float64), torch.randn(640, 320, dtype=torch.float64)
print(hashlib.sha256((a @ b).numpy().tobytes()).hexdigest())
"""


@cache
def digest(instructions: str = "") -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MKL_")}
    if instructions:
        environment["MKL_ENABLE_INSTRUCTIONS"] = instructions
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("instructions", ["SSE4_2", "AVX2", "AVX512"])
def test_a_product_has_the_same_bits_with_other_instructions(instructions: str) -> None:
    """MKL takes the instructions it is limited to; limits beyond the processor's own change nothing."""
    assert digest(instructions) == digest()
