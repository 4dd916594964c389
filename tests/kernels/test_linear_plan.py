"""How FP8 products are cut on Hopper: every cut covers the channels and fits a multiprocessor."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

SHAPES = ((1792, 5120), (32768, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (256, 256), (64, 384),
          (128, 16384), (2048, 9216), (192, 640), (3840, 65536), (3072, 7168), (6144, 3584), (32768, 7168),
          (512, 1536), (5120, 16384), (768, 2304), (1024, 3328))  # fmt: skip


TOKENS = (1, 2, 8, 9, 16, 17, 64, 65, 128, 1000)


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_cut_covers_the_channels_and_fits(tokens: int, outputs: int, columns: int) -> None:
    covers_and_fits(tokens, outputs, columns)


@pytest.mark.parametrize("tokens", TOKENS)
def test_so_do_the_cuts_of_widths_that_no_model_has_yet(tokens: int) -> None:
    for outputs in (64, 192, 512, 1024, 1728, 3072, 4608, 6144, 9088, 16960, 32768):
        for columns in range(128, 16384 + 1, 128):
            covers_and_fits(tokens, outputs, columns)


def covers_and_fits(tokens: int, outputs: int, columns: int) -> None:
    from cedar.kernels import cluster_hopper, linear_hopper
    from cedar.kernels.codes_hopper import power_of_two
    from cedar.kernels.linear_few_hopper import brought, rows_each
    from cedar.kernels.linear_many_hopper import area_of
    from cedar.kernels.linear_trades_hopper import area_each

    cut = linear_hopper.plan(tokens, outputs, columns)
    assert cut is not None
    blocks = columns // 128
    if isinstance(cut, linear_hopper.Bulk):
        assert tokens > 128
        assert outputs % 128 == 0
        cut = linear_hopper.plan(tokens, outputs, columns, bulk=False)
        assert cut is not None
    assert cut.stages >= 1
    # a program that holds activations asks for the blocks of all its tiles, and for none beyond them
    assert cut.stages <= cut.blocks or (isinstance(cut, linear_hopper.Trades) and cut.hold)
    if isinstance(cut, linear_hopper.Few):
        assert tokens <= 16
        share = -(-blocks // cut.shares)
        assert blocks % share == 0  # what a tile's rows beyond the last share would read is not the weight's
        assert cut.splits == -(-share // cut.blocks)
        assert cut.splits == 1 or cut.shares == 1
        assert cut.blocks.bit_count() <= 4
        # a block is waited for while those before hold their stages
        assert cut.ahead < cut.stages or cut.blocks == 1
        assert 1 <= cut.asked <= cut.stages
        assert outputs % (16 * cut.warps // cut.shares) == 0
        area = cut.splits * cut.columns * (4 * rows_each(16 * cut.warps, cut.splits) + 16) + 16
        area = area if cut.splits > 1 else 0
        shared = 2048 * cut.warps * cut.stages + 8 * cut.stages
        shared += cut.columns * (128 * brought(cut.blocks) + 4 * cut.blocks)
        shared += 4 * cut.warps * (1 << (cut.blocks - 1).bit_length())
    elif isinstance(cut, linear_hopper.Many):
        assert tokens > 16
        assert cut.splits == -(-blocks // cut.blocks)
        assert outputs % cut.rows == 0
        area = area_of(cut.tokens, cut.rows, cut.splits) if cut.splits > 1 else 0
        shared = 128 * (cut.rows + cut.tokens) * cut.stages + 8 * cut.stages
        shared += (cut.rows // 8 + 4 * cut.tokens) * power_of_two(cut.blocks)
    else:
        assert tokens > 64
        assert outputs % cut.rows == 0
        assert cut.splits == -(-blocks // cut.blocks) <= 64
        assert cut.each == 1 or cut.hold
        assert cut.splits == 1 or not cut.hold
        assert not cut.cluster or 1 < cut.splits <= 8
        area = 0
        shared = 128 * (cut.rows * cut.stages + 128 * (blocks if cut.hold else cut.stages)) + 4352
        shared += 512 * power_of_two(blocks if cut.hold else cut.blocks)
        shared += cut.rows // 4 * power_of_two(cut.blocks * cut.each)
        end = 2 * area_each(cut.rows, cut.splits, cut.cluster)
        assert shared > 48 * 1024 or end + shared <= 48 * 1024  # else CUDA would not be asked for it
        shared += end
    area = cluster_hopper.area_bytes(area) if area else 0
    assert not area or cut.splits <= 8
    assert area <= cluster_hopper.AREA_BYTES
    assert area + shared + 1024 <= 227 * 1024
    if not isinstance(cut, linear_hopper.Few):  # else CUDA would not be asked for it
        assert not area or shared > 48 * 1024 or area + shared <= 48 * 1024


def test_the_next_launch_is_let_go_late_where_both_find_room() -> None:
    """Of its weights three fifths are on their way before its own activations."""
    from cedar.kernels import linear_hopper

    cuts = [linear_hopper.plan(16, *shape) for shape in ((1792, 5120), (5120, 2304), (4608, 5120))]
    seen = [(cut.stages, cut.asked, cut.early) for cut in cuts if isinstance(cut, linear_hopper.Few)]
    assert seen == [(7, 5, False), (4, 3, False), (4, 3, True)]


def test_activations_stay_where_rows_are_many_and_channels_fit() -> None:
    from cedar.kernels import linear_hopper

    cuts = [linear_hopper.plan(128, 32768, columns) for columns in (128, 1280, 1408)]
    assert [isinstance(cut, linear_hopper.Trades) and cut.hold for cut in cuts] == [True, True, False]


def test_channels_are_shared_out_over_clusters_that_all_run_at_once() -> None:
    """Forty clusters of three do not; and with few blocks a program fewer programs share out a tile."""
    from cedar.kernels import linear_hopper

    many, all_run, wait = (
        linear_hopper.plan(128, *shape) for shape in ((5120, 2304), (4608, 5120), (5120, 8192))
    )
    assert isinstance(many, linear_hopper.Many)
    assert (many.tokens, many.splits) == (64, 2)
    assert isinstance(all_run, linear_hopper.Trades)
    assert isinstance(wait, linear_hopper.Trades)
    assert (all_run.splits, all_run.cluster, wait.splits, wait.cluster) == (3, True, 3, False)


def test_who_quantises() -> None:
    import torch
    from cedar.kernels import linear

    assert linear.order_for(64, torch.empty(64, 128, dtype=torch.float8_e4m3fn)) is None  # a CPU


def test_what_does_not_fit_is_refused() -> None:
    from cedar.kernels import linear_hopper

    assert linear_hopper.plan(0, 256, 256) is None
    assert linear_hopper.plan(1025, 192, 256) is None
    assert linear_hopper.plan(1, 256, 192) is None
    assert linear_hopper.plan(1, 96, 256) is None


def test_a_chunk_of_512_goes_in_bulk_where_that_fills_the_chip_less_often() -> None:
    from cedar.kernels import linear_hopper

    def goes(tokens: int, outputs: int, columns: int) -> bool:
        return isinstance(linear_hopper.plan(tokens, outputs, columns), linear_hopper.Bulk)

    assert [goes(512, *shape) for shape in SHAPES[:5]] == [False, True, True, True, True]
    assert [goes(384, *shape) for shape in SHAPES[:5]] == [False] * 5
    assert not any(goes(128, *shape) for shape in SHAPES)


@pytest.mark.parametrize(("outputs", "columns"), SHAPES[:5])
def test_more_goes_in_bulk(outputs: int, columns: int) -> None:
    """Nothing of it is expanded in memory, and what is on its way fits a multiprocessor."""
    from cedar.kernels import linear_bulk_hopper, linear_hopper

    for tokens in (1025, 4096, 8192):
        assert isinstance(linear_hopper.plan(tokens, outputs, columns), linear_hopper.Bulk)
    stages, ahead = linear_bulk_hopper.STAGES, linear_bulk_hopper.AHEAD
    assert 128 * (linear_bulk_hopper.ROWS * stages + linear_bulk_hopper.TOKENS * ahead) + 8192 <= 227 * 1024


def test_attention_may_read_what_is_older_than_its_queries() -> None:
    """Up to 16 tokens and from 45 on wq_b waits before it lets attention start (`settled`)."""
    from cedar.kernels.linear_hopper import plan, waits_first

    for columns in (1280, 1536):
        assert all(waits_first(plan(tokens, 32768, columns)) for tokens in (*range(1, 17), *range(45, 1025)))
