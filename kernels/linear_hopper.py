# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 matrix products on Hopper: how a shape is cut, and its launch.

Activations come quantised by their producer (`Prepared`). Where they do not, `linear_few_hopper` quantises up
to 16 tokens itself; for more of them (`linear_many_hopper`) a launch here does it, which the product's start
overlaps. Programs should all run at once, with as much of the weights on its way as shared memory holds: 64
rows a program where a cluster shares out the channels, 128 elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from cedar.kernels import cluster_hopper, linear_bulk_hopper, linear_wide_hopper
from cedar.kernels.codes_hopper import TILE8, power_of_two, quantise
from cedar.kernels.grid_hopper import counters
from cedar.kernels.linear_few_hopper import TILE83, TILE84, brought, few, rows_each, together
from cedar.kernels.linear_many_hopper import area_of, many
from cedar.kernels.linear_trades_hopper import REGISTERS, area_each, trades
from cedar.kernels.prepared import CODES, Prepared, empty_codes
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024  # a multiprocessor's, less what the system takes
FEW = 16  # tokens up to which a product can quantise
PARTS = 8  # of the chip, at most, none of which a cluster leaves
SMALL = 48  # programs that leave room for the next launch's
MOST = 1024


QUERIES = 64 * 512  # outputs of wq_b, which attention follows that may read before (`waits_first`)


class Few(NamedTuple):
    """How up to 16 tokens are cut: wgmma's columns, blocks of 128 channels a program, stages and how many of
    them are asked for before the launch before this one has ended, warps, shares of the channels in one tile
    and over a cluster's programs, blocks multiplied while one is scaled, and whether the next launch may
    start before this one's activations are there.
    """

    columns: int
    blocks: int
    stages: int
    asked: int
    warps: int
    shares: int
    splits: int
    ahead: int
    early: bool


class Many(NamedTuple):
    """How more tokens are cut: tokens and rows a program, blocks of 128 channels a program, stages, warps,
    programs of a cluster that share out the channels, and whether the next launch may start before this
    one's activations are there.
    """

    tokens: int
    rows: int
    blocks: int
    stages: int
    warps: int
    splits: int
    early: bool


class Trades(NamedTuple):
    """How 65 tokens and more are cut, 128 a program: rows of a tile, blocks of 128 channels a program,
    stages, programs that share out the channels, tiles a program, whether activations stay, and whether
    programs that share out the channels are a cluster.
    """

    rows: int
    blocks: int
    stages: int
    splits: int
    each: int
    hold: bool
    cluster: bool = False


class Bulk(NamedTuple):
    """How many tokens are cut: tokens a tile of `linear_bulk_hopper`, which meets x in the order GROUPED."""

    tokens: int


def _room(programs: int) -> int:
    """Shared memory of each of so many programs if all are to run at once, as far as one can have it."""
    each: int = triton.cdiv(programs, MULTIPROCESSORS)
    return min(SHARED_BYTES, max(SHARED_BYTES // each - 1024, 48 * 1024))


def _stages(room: int, stage: int, fixed: int, area: int, most: int) -> int:
    """Stages of `stage` bytes that fit `room` beside `fixed` bytes and a cluster's area, at least one."""
    count = max(1, min(most, (room - 1024 - fixed - area) // stage))
    while count > 1 and not granted(area, fixed + count * stage):
        count -= 1
    return count


def granted(area: int, shared: int) -> bool:
    """Whether at least `shared` bytes beside a cluster's area can be had: CUDA must be asked for more than 48
    KiB in all, and Triton asks by its own share alone.
    """
    return not area or shared > 48 * 1024 or shared + area <= 47 * 1024


def _few(tokens: int, outputs: int, columns: int) -> Few:
    blocks = columns // 128
    share = triton.cdiv(blocks, 8)
    if tokens == 1 and blocks % share == 0 and 100 <= outputs // 16 <= 3 * MULTIPROCESSORS:
        stages = _stages(_room(outputs // 16), 16 * 1024, 1024 * (brought(share) + 2), 0, share)
        early = outputs // 16 > MULTIPROCESSORS
        # with few stages, the block that is multiplied would keep one of them from being filled again
        ahead = int(stages > 4 or stages == share)
        return Few(8, share, stages, _asked(stages, early), 8, 8, 1, ahead, early)
    n = 8 if tokens <= 8 else 16
    warps = 8 if outputs % 128 == 0 and outputs // 128 >= MULTIPROCESSORS else 4
    tiles = outputs // (16 * warps)
    each = triton.cdiv(blocks, min(range(1, 9), key=lambda splits: _burden(tiles, blocks, splits, 16)))
    while each.bit_count() > 4:  # pieces in which they are quantised
        each += 1
    splits = triton.cdiv(blocks, each)
    area = (
        cluster_hopper.area_bytes(splits * n * (4 * rows_each(16 * warps, splits) + 16) + 16)
        if splits > 1
        else 0
    )
    fixed = brought(each) * 128 * n + each * 4 * (n + warps)
    stages = _stages(_room(tiles * splits), 2048 * warps, fixed, area, each)
    if splits > 1:
        # with more, the last programs of a cluster or the next launch's find no room
        stages = min(stages, max(4, each // 2 if stages < each else (2 * each + 1) // 3))
    ahead = int(stages > 1 or each == 1)  # else a block would be waited for before it is asked for
    # late where the next launch's programs find room beside all of this one's
    early = splits == 1 or not SMALL < tiles * splits <= 2 * MULTIPROCESSORS
    asked = _asked(stages, early)
    return Few(n, each, stages, asked, warps, 1, splits, ahead, early and outputs != QUERIES)


def _asked(stages: int, early: bool) -> int:
    """Stages asked for before the launch before has ended: three fifths. With all of them, its own weights
    and the next launch's would keep a launch's activations waiting. More than five that come early: all, as
    measured before; fewer were not tried.
    """
    return stages if early and stages > 5 else (3 * stages + 4) // 5


def _many(tokens: int, outputs: int, columns: int, m: int = 128) -> Many | Trades:
    """`m`: tokens a program, where there are more than 64."""
    blocks = columns // 128
    if tokens <= 64:
        m = 64
    tall = triton.cdiv(tokens, m)
    if m == 64 and outputs % 128 == 0 and outputs // 128 >= MULTIPROCESSORS - 4:
        r, splits = 128, 1
    else:
        r, splits = 64, _clusters(m, outputs // 64 * tall, blocks)
    if not splits:
        cut = _trades(tall, outputs, blocks)
        # sums of few blocks take longer to bring together than to make: fewer programs share a tile's
        fewer = m == 128 and cut.splits > 1 and cut.blocks <= 8
        return _many(tokens, outputs, columns, 64) if fewer else cut
    each = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, each)
    if splits > 1 and cluster_hopper.area_bytes(area_of(m, r, splits)) > cluster_hopper.AREA_BYTES:
        each = triton.cdiv(blocks, 4)  # rows that splits do not divide take more
        splits = triton.cdiv(blocks, each)
    programs = outputs // r * tall * splits
    area = cluster_hopper.area_bytes(area_of(m, r, splits)) if splits > 1 else 0
    fixed = power_of_two(each) * (r // 8 + 4 * m)
    most = min(each, 4 if m == 64 else 3)
    # room for the next launch's first programs, too, where it does not cost a stage of two
    room = _room(max(programs, MULTIPROCESSORS + 1) if m == 64 else programs)
    stages = _stages(room, 128 * (m + r), fixed, area, most)
    if not granted(area, fixed + 128 * (m + r) * stages):  # few channels: one program takes them all
        splits, each, stages = 1, blocks, min(blocks, most)
    early = r == 64 and (splits == 1 or programs > MULTIPROCESSORS)  # else the next launch may `settle`
    return Many(m, r, each, stages, 4 if m == 64 else 8, splits, early)


def _trades(tall: int, outputs: int, blocks: int) -> Trades:
    r = 128 if outputs % 128 == 0 else 64
    tiles = outputs // r
    kept = (blocks + 3) * 16 * 1024 + power_of_two(blocks) * 512
    if r == 128 and tiles >= MULTIPROCESSORS and kept <= SHARED_BYTES - 10 * 1024:
        each = min(triton.cdiv(tiles * tall, MULTIPROCESSORS), 128 // blocks)
        return Trades(r, blocks, 3, 1, each, True)
    splits = max(MULTIPROCESSORS // (tiles * tall), triton.cdiv(blocks, 128), 1)  # 128: their scales fit
    each = triton.cdiv(blocks, min(64, splits, triton.cdiv(blocks, 2)))
    splits = triton.cdiv(blocks, each)
    # clusters that surely all run at once, wherever the chip's parts end
    cluster = 1 < splits <= 8 and tiles * tall * splits <= MULTIPROCESSORS - PARTS * (splits - 1)
    fixed = power_of_two(each) * (512 + r // 4) + 4 * 1024
    stages = _stages(SHARED_BYTES, 128 * (r + 128), fixed, 2 * area_each(r, splits, cluster), min(each, 4))
    return Trades(r, each, stages, splits, 1, False, cluster)


def _clusters(m: int, tiles: int, blocks: int) -> int:
    """Programs that share out the channels of a tile of 64 rows; 0 where trades do better."""
    if m == 64:
        return min((1, 2, 4, 8), key=lambda splits: _burden(tiles, blocks, splits))
    splits = 1
    while splits < 8 and 2 * splits <= blocks and (blocks > 10 * splits or tiles * splits < 100):
        splits *= 2
    return splits if blocks <= 10 * splits and tiles * splits <= MULTIPROCESSORS else 0


def _burden(tiles: int, blocks: int, splits: int, most: int | None = None) -> tuple[int, bool, int]:
    """Blocks of the multiprocessor that has most, when `splits` programs share out a tile's. Worse than any:
    more than `most` blocks a program, fewer than two, or more than three programs a multiprocessor. Worse
    yet: what shared memory might not hold.
    """
    most = most or blocks
    each, programs = triton.cdiv(blocks, splits), triton.cdiv(tiles * splits, MULTIPROCESSORS)
    unfit = each > most or (splits > 1 and (2 * splits > blocks or programs > 3))
    return max(0, each - 2 * most), unfit, programs * each


def _bulk_pays(tokens: int, outputs: int) -> bool:
    """Whether tiles of 128 x 256 through bf16 take less time than tiles of 128 x 128 through FP8. One of
    these takes two thirds of one of those, so it depends on how often they fill the chip.
    """
    rows = outputs // linear_bulk_hopper.ROWS
    small, large = (triton.cdiv(rows * triton.cdiv(tokens, n), MULTIPROCESSORS) for n in (128, 256))
    return tokens > MOST or 3 * large < 2 * small


@cache
def plan(tokens: int, outputs: int, columns: int, bulk: bool = True) -> Few | Many | Trades | Bulk | None:
    """The cut for a shape, from what was measured at the model's; None where these kernels do not fit.

    `bulk` False: x is codes, so up to MOST tokens not in bulk.
    """
    if columns % 128 or outputs % 64 or tokens <= 0:
        return None
    if (bulk or tokens > MOST) and outputs % linear_bulk_hopper.ROWS == 0 and _bulk_pays(tokens, outputs):
        return Bulk(linear_bulk_hopper.TOKENS)
    if tokens > MOST:
        return None
    return _few(tokens, outputs, columns) if tokens <= FEW else _many(tokens, outputs, columns)


def waits_first(cut: Few | Many | Trades | Bulk | None) -> bool:
    """Whether a launch of this cut lets the next one start only when it has itself waited: the next may then
    read at once whatever is older than this launch.
    """
    return not (isinstance(cut, (Few, Many)) and cut.early)


def is_wide(cut: Few | Many | Trades | Bulk | None) -> bool:
    """Whether `linear_wide_hopper` has this cut too: whole channels in a program, tiles of its size."""
    return (
        isinstance(cut, Trades)
        and cut.rows == linear_wide_hopper.ROWS
        and cut.splits == 1
        and not cut.hold
        and cut.blocks >= linear_wide_hopper.STAGES
    )


def quantised(x: torch.Tensor) -> Prepared:
    """x bf16 [N, C], C a multiple of 128, rows contiguous, as codes: one launch."""
    out = empty_codes(x)
    assert out.scale is not None
    quantise[(triton.cdiv(x.shape[0], 8), x.shape[1] // 128)](
        x, out.values, out.scale.view(torch.int32), x.shape[0], x.shape[1], x.stride(0), num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return out


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    cut: Few | Many | Trades | Bulk,
    prepared: tuple[Prepared, ...],
) -> torch.Tensor:
    """bf16 [N, O]: x bf16 [N, I] quantised, times E4M3 [O, I] with 32x32 scales, cut as `plan` says."""
    if isinstance(cut, Bulk):
        return linear_bulk_hopper.product(x, weight, scale, prepared)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    codes = next((copy for copy in prepared if copy.order == CODES), None)
    if isinstance(cut, Few):
        _launch_few(x, codes, weight, scale, out, cut)
    elif codes is None and is_wide(cut):
        linear_wide_hopper.quantising(x, weight, scale, out)
    elif isinstance(cut, Many):
        _launch_many(codes if codes is not None else quantised(x), weight, scale, out, cut)
    else:
        _launch_trades(codes if codes is not None else quantised(x), weight, scale, out, cut)
    return out


def _launch_few(
    x: torch.Tensor,
    codes: Prepared | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    cut: Few,
) -> None:
    outputs, columns = weight.shape
    rows = 16 * cut.warps // cut.shares
    blocks = triton.cdiv(columns // 128, cut.shares)
    w_desc = TensorDescriptor(
        weight,
        [blocks, columns // 128 // blocks, outputs, 128],
        [128, 128 * blocks, columns, 1],
        [1, cut.shares, rows, 128],
        TILE84.value,
    )
    tiles = triton.cdiv(x.shape[0], cut.columns // cut.shares)
    x_desc, words = w_desc, scale
    if codes is None and not cut.early and outputs // rows * cut.splits > MULTIPROCESSORS:
        # quantising takes longer than the next launch should wait; one that comes early wants more on its way
        cut = cut._replace(stages=min(cut.blocks, cut.stages + 1), early=True)
    if codes is not None:  # one token's shares are rows
        assert codes.scale is not None
        width = 128 * blocks if cut.shares > 1 else columns
        x_desc = TensorDescriptor(
            codes.values, [width // 128, columns // width * x.shape[0], 128], [128, width, 1],
            [together(cut.blocks), cut.columns, 128], TILE83.value,
        )  # fmt: skip
        words = codes.scale
    cluster_hopper.launch(
        few, (1, outputs // rows, tiles), cut.splits, w_desc, x_desc, x, words, scale, out, x.shape[0],
        outputs, x.stride(0), columns, cut.blocks, cut.splits, cut.columns, cut.stages, cut.asked, cut.warps,
        cut.shares, cut.ahead, cut.early, codes is not None, num_warps=cut.warps,
    )  # fmt: skip


def _launch_many(
    x: Prepared, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, cut: Many
) -> None:
    outputs, columns = weight.shape
    tokens = out.shape[0]
    cluster_hopper.launch(
        many, (1, outputs // cut.rows, triton.cdiv(tokens, cut.tokens)), cut.splits,
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [cut.rows, 128], TILE8.value),
        TensorDescriptor(x.values, [tokens, columns], [columns, 1], [cut.tokens, 128], TILE8.value),
        x.scale, scale, out, tokens, outputs,
        columns, cut.blocks, cut.splits, cut.tokens, cut.rows, cut.stages, cut.warps, cut.early,
        num_warps=cut.warps,
    )  # fmt: skip


def _launch_trades(
    x: Prepared, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, cut: Trades
) -> None:
    outputs, columns = weight.shape
    tokens, tall = out.shape[0], triton.cdiv(out.shape[0], 128)
    left = cut.splits * tall * 128 * outputs if cut.splits > 1 and not cut.cluster else 1
    part = torch.empty(left, dtype=torch.float32, device=out.device)
    arguments = (
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [cut.rows, 128], TILE8.value),
        TensorDescriptor(x.values, [tokens, columns], [columns, 1], [128, 128], TILE8.value),
        x.scale, scale, out, part, counters(out.device.index or 0), tokens, outputs,
        columns // 128, cut.blocks, cut.splits, cut.rows, cut.stages, cut.hold, cut.each, REGISTERS,
        cut.cluster,
    )  # fmt: skip
    tiles = triton.cdiv(outputs // cut.rows, cut.each) * tall
    cluster_hopper.launch(
        trades, (1, 1, tiles) if cut.cluster else (1, cut.splits, tiles), cut.splits if cut.cluster else 1,
        *arguments, num_warps=4, end=2 * area_each(cut.rows, cut.splits, cut.cluster),
    )  # fmt: skip
