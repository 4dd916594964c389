"""What the host of the attention on expanded keys refuses, and what needs no launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from cedar.kernels.sparse_attention_wide_hopper import attend_wide


def arguments(heads: int = 64, rows: int = 0, half_rope: int = 32) -> list[torch.Tensor | None]:
    """Of three queries without entries, and out full of ones."""
    angles = torch.zeros(3, half_rope)
    return [
        torch.zeros(3, heads, 512, dtype=torch.bfloat16), angles, angles, None, None, None,
        torch.zeros(5, 512, dtype=torch.float16), torch.full((3, rows), -1), torch.zeros(heads),
        torch.ones(3, heads, 512, dtype=torch.bfloat16),
    ]  # fmt: skip


def test_nothing_to_read() -> None:
    assert (attend_wide(*arguments()) == 0).all()
    few = [part[:0] if part is not None else None for part in arguments(rows=2)]
    assert attend_wide(*few).shape == (0, 64, 512)


def test_refused() -> None:
    for args in (arguments(heads=32), arguments(half_rope=40)):
        with pytest.raises(ValueError, match="64 heads of 512"):
            attend_wide(*args)
    args = arguments()
    args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="not contiguous"):
        attend_wide(*args)
