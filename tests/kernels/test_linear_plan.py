"""How FP8 products are cut on Hopper: every cut covers the channels and fits a multiprocessor."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

SHAPES = ((1792, 5120), (32768, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (256, 256), (64, 384),
          (128, 16384), (2048, 9216), (192, 640))  # fmt: skip


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 64, 65, 128, 1000])
def test_a_cut_covers_the_channels_and_fits(tokens: int, outputs: int, columns: int) -> None:
    from cedar.kernels import cluster_hopper, linear_hopper
    from cedar.kernels.linear_few_hopper import rows_each
    from cedar.kernels.linear_many_hopper import area_of

    cut = linear_hopper.plan(tokens, outputs, columns)
    assert cut is not None
    blocks = columns // 128
    if isinstance(cut, linear_hopper.Hold):
        assert tokens > 64
        assert outputs % cut.rows == 0
        assert cut.each >= 1
        assert blocks >= cut.stages  # what it asks for first is of one tile
        assert 128 * (cut.rows * cut.stages + cut.tokens * blocks) + 8192 <= 227 * 1024
        return
    assert 1 <= cut.stages <= cut.blocks
    if isinstance(cut, linear_hopper.Few):
        assert tokens <= 16
        share = -(-blocks // cut.shares)
        assert blocks % share == 0  # what a tile's rows beyond the last share would read is not the weight's
        assert cut.splits == -(-share // cut.blocks)
        assert cut.splits == 1 or cut.shares == 1
        assert cut.blocks % cut.together == 0
        assert cut.together == 1 or cut.blocks * cut.splits == share
        assert cut.blocks.bit_count() <= 4
        assert outputs % (16 * cut.warps // cut.shares) == 0
        area = cut.splits * cut.columns * (4 * rows_each(16 * cut.warps, cut.splits) + 16)
        area = cluster_hopper.area_bytes(area) if cut.splits > 1 else 0
        shared = 2048 * cut.warps * cut.stages + 132 * cut.columns * cut.blocks + 8 * cut.stages
        shared += 4 * cut.warps * (1 << (cut.blocks - 1).bit_length())
        clustered = cut.splits > 1
    else:
        assert tokens > 16
        assert cut.splits == -(-blocks // cut.blocks)
        assert outputs % cut.rows == 0
        assert 1 <= cut.ahead <= cut.blocks
        area = cluster_hopper.area_bytes(area_of(cut.tokens, cut.rows, cut.splits)) if cut.cluster else 0
        shared = 128 * (cut.rows * cut.stages + cut.tokens * cut.ahead) + 8 * (cut.stages + cut.ahead)
        shared += cut.rows // 8 * (1 << (cut.blocks - 1).bit_length())
        clustered = cut.cluster
    assert cut.splits <= (8 if clustered else 64)
    assert area <= cluster_hopper.AREA_BYTES
    assert area + shared + 1024 <= 227 * 1024
    assert not area or shared > 48 * 1024 or area + shared <= 48 * 1024  # else CUDA would not be asked for it


def test_few_channels_of_wide_weights_are_the_library_s() -> None:
    from cedar.kernels import linear_hopper

    assert [linear_hopper.plan(128, 32768, columns) for columns in (128, 256)] == [None, None]
    assert isinstance(linear_hopper.plan(128, 32768, 384), linear_hopper.Hold)


def test_who_quantises() -> None:
    import torch
    from cedar.kernels import linear

    assert linear.order_for(64, torch.empty(64, 128, dtype=torch.float8_e4m3fn)) is None  # a CPU


def test_what_does_not_fit_is_refused() -> None:
    from cedar.kernels import linear_hopper

    assert linear_hopper.plan(0, 256, 256) is None
    assert linear_hopper.plan(1025, 256, 256) is None
    assert linear_hopper.plan(1, 256, 192) is None
    assert linear_hopper.plan(1, 96, 256) is None
