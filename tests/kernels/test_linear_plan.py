"""How FP8 products are cut on Hopper: every cut covers the channels and fits a multiprocessor."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

SHAPES = ((1792, 5120), (32768, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (256, 256), (64, 384),
          (128, 16384), (2048, 9216))  # fmt: skip


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 64, 65, 128, 1000])
def test_a_cut_covers_the_channels_and_fits(tokens: int, outputs: int, columns: int) -> None:
    from cedar.kernels import linear_hopper

    cut = linear_hopper.plan(tokens, outputs, columns)
    assert cut is not None
    blocks = columns // 128
    share = -(-blocks // cut.shares)
    splits = -(-share // cut.blocks)
    assert blocks % share == 0  # what a tile's rows beyond the last share would read is not the weight's
    assert 1 <= splits <= 64  # programs that meet
    assert splits == 1 or cut.shares == 1
    assert outputs % (16 * cut.warps // cut.shares) == 0
    activations = cut.blocks if cut.fused else cut.stages
    shared = 2048 * cut.warps * cut.stages + 256 * cut.columns * activations
    assert shared + 1024 <= 227 * 1024
    assert cut.stages <= cut.blocks


def test_what_does_not_fit_is_refused() -> None:
    from cedar.kernels import linear_hopper

    assert linear_hopper.plan(0, 256, 256) is None
    assert linear_hopper.plan(1025, 256, 256) is None
    assert linear_hopper.plan(1, 256, 192) is None
    assert linear_hopper.plan(1, 96, 256) is None
