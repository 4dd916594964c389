# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 matrix products of 1 to 1024 tokens on Hopper: how a shape is cut, and its launch.

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
from cedar.kernels import cluster_hopper
from cedar.kernels.codes_hopper import TILE8, quantise
from cedar.kernels.grid_hopper import counters
from cedar.kernels.linear_few_hopper import TILE84, few, rows_each
from cedar.kernels.linear_hold_hopper import hold
from cedar.kernels.linear_many_hopper import area_of, many
from cedar.kernels.prepared import CODES, Prepared, empty_codes
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024  # a multiprocessor's, less what the system takes
FEW = 16  # tokens up to which a product can quantise
MOST = 1024


class Few(NamedTuple):
    """How up to 16 tokens are cut: wgmma's columns, blocks of 128 channels a program, stages, warps, shares
    of the channels in one tile and over a cluster's programs, blocks at a time, and whether the next launch
    may start before this one's activations are there.
    """

    columns: int
    blocks: int
    stages: int
    warps: int
    shares: int
    splits: int
    together: int
    early: bool


class Many(NamedTuple):
    """How more tokens are cut: tokens and rows a program, blocks of 128 channels a program, stages of weights
    and of activations, warps, programs that share out the channels, whether they are a cluster, and whether
    the next launch may start before this one's activations are there.
    """

    tokens: int
    rows: int
    blocks: int
    stages: int
    ahead: int
    warps: int
    splits: int
    cluster: bool
    early: bool = True


class Hold(NamedTuple):
    """How tokens are cut where their activations stay: tokens and rows of a tile, stages, tiles a program."""

    tokens: int
    rows: int
    stages: int
    each: int


def _room(programs: int) -> int:
    """Shared memory of each of so many programs if all are to run at once, as far as one can have it."""
    each: int = triton.cdiv(programs, MULTIPROCESSORS)
    return min(SHARED_BYTES, max(SHARED_BYTES // each - 1024, 48 * 1024))


def _stages(room: int, stage: int, fixed: int, area: int, most: int) -> int:
    """Stages of `stage` bytes that fit `room` beside `fixed` bytes and a cluster's area, at least one."""
    count = max(1, min(most, (room - 1024 - fixed - area) // stage))
    while count > 1 and not _granted(area, fixed + count * stage):
        count -= 1
    return count


def _granted(area: int, shared: int) -> bool:
    """Whether at least `shared` bytes beside a cluster's area can be had: CUDA must be asked for more than 48
    KiB in all, and Triton asks by its own share alone.
    """
    return not area or shared > 48 * 1024 or shared + area <= 47 * 1024


def _few(tokens: int, outputs: int, columns: int) -> Few:
    blocks = columns // 128
    share = triton.cdiv(blocks, 8)
    if tokens == 1 and blocks % share == 0 and 100 <= outputs // 16 <= 3 * MULTIPROCESSORS:
        stages = _stages(_room(outputs // 16), 16 * 1024, 1024 * (share + 2), 0, share)
        return Few(8, share, stages, 8, 8, 1, share if share in (3, 5) and stages == share else 1, True)
    n = 8 if tokens <= 8 else 16
    warps = 8 if outputs % 128 == 0 and outputs // 128 >= MULTIPROCESSORS else 4
    tiles = outputs // (16 * warps)
    splits = 1
    while splits < 8 and 2 * splits <= blocks and (blocks > 16 * splits or tiles * splits < 100):
        splits *= 2
    each = triton.cdiv(blocks, splits)
    while each.bit_count() > 4:  # pieces in which they are quantised
        each += 1
    splits = triton.cdiv(blocks, each)
    area = (
        cluster_hopper.area_bytes(splits * n * (4 * rows_each(16 * warps, splits) + 16)) if splits > 1 else 0
    )
    stages = _stages(_room(tiles * splits), 2048 * warps, each * (132 * n + 4 * warps), area, each)
    together = next((u for u in (3, 2) if each % u == 0 and each * splits == blocks), 1)
    return Few(n, each, stages, warps, 1, splits, together, splits == 1 or tiles * splits > MULTIPROCESSORS)


def _many(tokens: int, outputs: int, columns: int) -> Many | Hold:
    blocks = columns // 128
    m = 64 if tokens <= 64 else 128
    r = 128 if outputs % 128 == 0 else 64
    tall = triton.cdiv(tokens, m)
    if m == r == 128 and outputs // r >= MULTIPROCESSORS and (blocks + 3) * m * r <= SHARED_BYTES - 8192:
        return Hold(m, r, 3, triton.cdiv(outputs // r * tall, MULTIPROCESSORS))
    warps = 8 if m == 128 else 4
    clusters = _clusters(m, outputs // 64 * tall, blocks)
    if m == 64 and r == 128 and outputs // r >= MULTIPROCESSORS - 4:
        splits, cluster = 1, False
    elif clusters:
        r, splits, cluster = 64, clusters, clusters > 1
    else:
        splits = min(64, max(1, MULTIPROCESSORS // (outputs // r * tall)), triton.cdiv(blocks, 2))
        cluster = False
    each = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, each)
    programs = outputs // r * tall * splits
    area = cluster_hopper.area_bytes(area_of(m, r, splits)) if cluster else 0
    fixed = each * r // 8
    if m == r == 128:
        stages = ahead = _stages(SHARED_BYTES, 128 * (m + r), fixed, area, min(each, 4 if splits == 1 else 3))
    else:  # room for the next launch's first programs, too
        left = _room(max(programs, MULTIPROCESSORS + 1)) - 1024 - fixed - area
        most = min(each, 6 if programs <= MULTIPROCESSORS else 4)
        for ahead in range(min(each, 4 if m == 64 else 3), 0, -1):
            stages = max(1, min(most, (left - 128 * m * ahead) // (128 * r)))
            if stages >= ahead:
                break
    cluster = cluster and _granted(area, fixed + 128 * (m * ahead + r * stages))
    early = programs > MULTIPROCESSORS if cluster else splits == 1
    return Many(m, r, each, stages, ahead, warps, splits, cluster, early)


def _clusters(m: int, tiles: int, blocks: int) -> int:
    """Programs that share out the channels of a tile of 64 rows; 0 where tiles of 128 rows do better."""
    most = 16 if m == 64 else 10  # blocks a program
    splits = 1
    while splits < 8 and 2 * splits <= blocks and (blocks > most * splits or tiles * splits < 100):
        splits *= 2
    return splits if m == 64 or (blocks <= most * splits and tiles * splits <= 2 * MULTIPROCESSORS) else 0


@cache
def plan(tokens: int, outputs: int, columns: int) -> Few | Many | Hold | None:
    """The cut for a shape, from what was measured at the model's; None where these kernels do not fit."""
    if columns % 128 or outputs % 64 or not 0 < tokens <= MOST:
        return None
    cut = _few(tokens, outputs, columns) if tokens <= FEW else _many(tokens, outputs, columns)
    if isinstance(cut, Hold) and columns < 128 * cut.stages:
        return None  # its first copies are of so many blocks of one tile
    return cut


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
    cut: Few | Many | Hold,
    prepared: tuple[Prepared, ...],
) -> torch.Tensor:
    """bf16 [N, O]: x bf16 [N, I] quantised, times E4M3 [O, I] with 32x32 scales, cut as `plan` says."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    codes = next((copy for copy in prepared if copy.order == CODES), None)
    if isinstance(cut, Few):
        _launch_few(x, codes, weight, scale, out, cut)
    elif isinstance(cut, Many):
        _launch_many(codes if codes is not None else quantised(x), weight, scale, out, cut)
    else:
        _launch_hold(codes if codes is not None else quantised(x), weight, scale, out, cut)
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
    if codes is not None:  # one token's shares are rows
        assert codes.scale is not None
        width = 128 * blocks if cut.shares > 1 else columns
        shape = [columns // width * x.shape[0], width]
        x_desc = TensorDescriptor(codes.values, shape, [width, 1], [cut.columns, 128], TILE8.value)
        words = codes.scale
    cluster_hopper.launch(
        few, (1, outputs // rows, tiles), cut.splits, w_desc, x_desc, x, words, scale, out, x.shape[0],
        outputs, x.stride(0), columns, cut.blocks, cut.splits, cut.columns, cut.stages, cut.warps, cut.shares,
        cut.together, cut.early, codes is not None, num_warps=cut.warps,
    )  # fmt: skip


def _launch_many(
    x: Prepared, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, cut: Many
) -> None:
    outputs, columns = weight.shape
    tokens = out.shape[0]
    tiles = triton.cdiv(tokens, cut.tokens)
    together = cut.splits if cut.cluster else 1
    meeting = cut.splits > together
    part = torch.empty(
        cut.splits * tiles * cut.tokens * outputs if meeting else 1, dtype=torch.float32, device=out.device
    )
    cluster_hopper.launch(
        many, (cut.splits // together, outputs // cut.rows, tiles), together,
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [cut.rows, 128], TILE8.value),
        TensorDescriptor(x.values, [tokens, columns], [columns, 1], [cut.tokens, 128], TILE8.value),
        x.scale, scale, out, part, counters(out.device.index or 0), tokens, outputs,
        columns, cut.blocks, cut.splits, cut.tokens, cut.rows, cut.stages, cut.ahead, cut.warps, cut.cluster,
        cut.early,
        num_warps=cut.warps,
    )  # fmt: skip


def _launch_hold(
    x: Prepared, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, cut: Hold
) -> None:
    outputs, columns = weight.shape
    tokens = out.shape[0]
    hold[(triton.cdiv(outputs // cut.rows, cut.each), triton.cdiv(tokens, cut.tokens))](
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [cut.rows, 128], TILE8.value),
        TensorDescriptor(x.values, [tokens, columns], [columns, 1], [cut.tokens, 128], TILE8.value),
        x.scale, scale, out, tokens, outputs, columns // 128, cut.tokens, cut.rows, cut.stages, cut.each,
        num_warps=8, launch_pdl=True,
    )  # fmt: skip
