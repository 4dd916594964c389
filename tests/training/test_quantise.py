"""Rounding in training is the rounding of the stored formats, and its gradient passes unchanged."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import fp4_ref, fp8_ref
from cedar.training.quantise import fp4_entry, fp4_index, fp8_activation, fp8_weight, mxfp4_weight
from cedar.training.sinkhorn import backward, forward, sinkhorn


@pytest.fixture(params=[1e-6, 1e-2, 1.0, 300.0])
def x(request: pytest.FixtureRequest) -> torch.Tensor:
    torch.manual_seed(1)
    values = (torch.randn(40, 128) * request.param).to(torch.bfloat16)
    values[3] = 0
    return values


def test_activations_and_window_keys(x: torch.Tensor) -> None:
    assert torch.equal(fp8_activation(x), fp8_ref.dequantize(*fp8_ref.quantize(x)))


def test_entries_and_index_keys(x: torch.Tensor) -> None:
    assert torch.equal(fp4_entry(x), fp4_ref.unpack_e4m3(*fp4_ref.pack_e4m3(x)))
    assert torch.equal(fp4_index(x), fp4_ref.unpack_e8m0(*fp4_ref.pack_e8m0(x)))
    assert torch.equal(mxfp4_weight(x.float()), fp4_ref.unpack_e8m0(*fp4_ref.pack_e8m0(x)))


def test_gradients_pass_straight_through() -> None:
    weight = torch.randn(64, 96, requires_grad=True)
    grad = torch.randn(64, 96).to(torch.bfloat16)
    fp8_weight(weight).backward(grad)
    assert torch.equal(weight.grad, grad.float())  # type: ignore[arg-type]


def test_sinkhorn_gradient_is_that_of_its_rounds() -> None:
    torch.manual_seed(2)
    logits = torch.randn(50, 4, 4, dtype=torch.float64, requires_grad=True)
    c = torch.softmax(logits, -1) + 1e-6
    c = c / (c.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(-1, keepdim=True) + 1e-6)
        c = c / (c.sum(-2, keepdim=True) + 1e-6)
    grad = torch.randn(50, 4, 4, dtype=torch.float64)
    c.backward(grad)
    mine = backward(forward(logits.detach(), 1e-6, 20), grad, 20)
    assert (mine - logits.grad).norm() < 0.01 * logits.grad.norm()  # type: ignore[operator, union-attr]
    assert torch.allclose(sinkhorn(logits.detach(), 1e-6, 20), c.detach())
