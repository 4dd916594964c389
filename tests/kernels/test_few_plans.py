"""How the kernels of few tokens cut a shape: every channel, expert and output has a program, all programs run
at once.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cedar.kernels import grouped_output_hopper, mhc_few_hopper, router_one_hopper
from cedar.kernels.cluster_hopper import area_bytes
from cedar.kernels.experts_token_hopper import fits
from cedar.kernels.mhc import Pending, mhc_settle

MULTIPROCESSORS = 132


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9, 32])
@pytest.mark.parametrize("width", [64, 192, 256, 512, 5120, 8192])
def test_a_boundary(tokens: int, width: int) -> None:
    warps, splits, together = mhc_few_hopper.cut(tokens, width)
    assert splits * 32 * warps >= width > (splits - 1) * 32 * warps
    assert splits <= 64  # arrivals at a counter
    assert together in (1, 2, 4)
    assert together == 1 or splits > 1


@pytest.mark.parametrize(("experts", "width"), [(16, 256), (30, 512), (384, 5120), (384, 7168), (500, 1280)])
def test_a_router_of_one_token(experts: int, width: int) -> None:
    plan = router_one_hopper.cut(experts, width)
    assert plan is not None
    assert plan.rows * plan.programs >= experts
    lanes = 32 if plan.programs == 1 else 128
    assert plan.values * plan.chunks * lanes >= width
    held = plan.rows * plan.values * plan.chunks // (4 if plan.programs == 1 else 1)
    assert held <= router_one_hopper.HELD
    assert plan.programs <= 2 * 64  # those that meet: two a multiprocessor of the smallest part of a card


@pytest.mark.parametrize(("experts", "width"), [(16, 100), (1000, 5120), (384, 16_384)])
def test_a_router_that_does_not_fit(experts: int, width: int) -> None:
    assert router_one_hopper.cut(experts, width) is None


@pytest.mark.parametrize(("outputs", "columns"), [(256, 512), (512, 4096), (8192, 4096), (128, 192)])
def test_a_grouped_output(outputs: int, columns: int) -> None:
    n, (splits, stages, unit) = grouped_output_hopper.FEW, grouped_output_hopper.few_cut(outputs, columns)
    blocks = columns // 64
    assert blocks % (splits * unit) == 0
    assert 1 <= stages <= blocks // (splits * unit)
    assert outputs // 64 * splits <= MULTIPROCESSORS
    shared = stages * unit * (64 + n) * 128
    area = area_bytes(splits * n * 272) if splits > 1 else 0
    assert shared + area <= 227 * 1024
    assert not area or shared > 48 * 1024 or shared + area <= 47 * 1024  # else it would not be granted


def test_experts_of_one_token_are_whole_blocks() -> None:
    assert fits(5120, 2304)
    assert not fits(256, 128)


def test_mixes_that_are_there_are_settled() -> None:
    mixes = (torch.ones(1, 4), torch.ones(1, 4), torch.ones(1, 4, 4))
    assert mhc_settle(mixes) is mixes
    assert not isinstance(mixes, Pending)
