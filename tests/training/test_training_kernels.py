"""The training kernels give the plain operations' values and gradients, on a GPU or in Triton's interpreter.

The interpreter cuts bf16 results off instead of rounding them: tolerances are two units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cedar.training import fused
from torch import Tensor

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16


def compare(
    plain: Callable[..., Any], kernel: Callable[..., Any], inputs: Sequence[Any], learnt: Sequence[int]
) -> None:
    """Values, and gradients with respect to the inputs numbered in `learnt`."""
    results = []
    for function, device in ((plain, torch.device("cpu")), (kernel, DEVICE)):
        torch.manual_seed(3)
        mine = [value.to(device) if isinstance(value, Tensor) else value for value in inputs]
        for number in learnt:
            mine[number] = mine[number].detach().clone().requires_grad_()
        out = function(*mine)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
        loss = torch.stack([(o.float() * torch.randn(o.shape).to(device)).sum() for o in outs]).sum()
        loss.backward()
        results.append([*outs, *(mine[number].grad for number in learnt)])
    for want, got in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got.cpu().float() - want.float()).norm() <= 0.01 * want.float().norm()


@pytest.mark.parametrize("entries", [0, 24, 40])
def test_masked_softmax(entries: int) -> None:
    from cedar.training.attention_triton import MaskedSoftmax

    torch.manual_seed(1)
    rows, blocks, heads, width = 2, 3, 2, 16
    low = torch.randn(rows, blocks, heads, width, 2 * width).to(BF16)
    near = torch.rand(rows, blocks, width, 2 * width) < 0.5
    high = torch.randn(rows, blocks, heads, width, entries).to(BF16) if entries else None
    far = (torch.rand(1, blocks * width, entries) < 0.5).expand(rows, -1, -1) if entries == 24 else None
    if entries == 40:
        far = torch.rand(rows, blocks * width, entries) < 0.5
    far = None if far is None else far.view(rows, blocks, width, entries)
    learnt = [0, 1, 4] if entries else [0, 4]
    inputs = [low, high, near, far, torch.randn(heads), 0.3]
    compare(fused.masked_softmax, MaskedSoftmax.apply, inputs, learnt)


@pytest.mark.parametrize("shape", [(6, 3, 32), (6, 48)])
def test_rotate(shape: tuple[int, ...]) -> None:
    from cedar.training.attention_triton import Rotate

    torch.manual_seed(1)
    inputs = [torch.randn(shape).to(BF16), torch.randn(6, 8), torch.randn(6, 8)]
    compare(fused.rotate, Rotate.apply, inputs, [0])


def test_weighted_swiglu() -> None:
    from cedar.training.swiglu_triton import WeightedSwiglu

    torch.manual_seed(1)
    gate, up = (torch.randn(5, 3, 24).mul(6).to(BF16) for _ in range(2))  # beyond the limit of 10
    compare(fused.swiglu_weighted, WeightedSwiglu.apply, [gate, up, torch.rand(5, 3), 10.0], [0, 1, 2])


def test_mix() -> None:
    from cedar.training.mix_triton import Mix

    torch.manual_seed(1)
    inputs = [torch.randn(70, 4, 40).to(BF16), torch.randn(24, 160), 1e-20]
    compare(fused.mix, Mix.apply, inputs, [0, 1])
