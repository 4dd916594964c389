# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The top k of many long rows, each read once (spec §3).

`guess_bound` takes a bound from a sample of a row that a few times k keys reach, `filter_row` collects where
those are, `choose_row` seeks the k greatest among them. Where a guess fails (many equal scores, say) the row
itself is searched: slower, and as exact.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from cedar.kernels.select_keys_triton import (
    LANES,
    aligned,
    kth,
    load_keys,
    newest_block,
    one_each,
    search,
    tally,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)
_GROUP_KEYS = 16
_EACH = 16  # sampled keys a thread
_SAMPLE = _EACH * LANES.value


@triton.jit
def _score(key):
    """The least score that `ordered` maps to `key` or above, for key 0 the least finite one."""
    bits = key.to(tl.int32, bitcast=True)
    x = (bits ^ ((~(bits >> 31)) | -2147483648)).to(tl.float32, bitcast=True)
    return tl.where(key < 8388608, LOWEST, x)


@triton.jit
def guess_bound(
    scores_ptr, visible_ptr, guess_ptr, found_ptr, place_ptr, count, stride, rank, divisor,
    FEW: tl.constexpr, EACH: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a score near the rank-th greatest of 1024·EACH sampled, not above it; found is cleared.

    The sample is spread over the row in fours; how far into its step each four lies varies.
    """
    row = tl.program_id(0).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    step = count // (LANES * EACH)
    group = tl.arange(0, LANES)[:, None] * (EACH // 4)
    best = tl.zeros([LANES], tl.uint32)
    for i in tl.static_range(EACH // 4):
        which = group + i
        place = (which * step + ((which * 40503) >> 4) % step) * 4 + tl.arange(0, 4)[None, :]
        best = tl.maximum(
            best, tl.max(load_keys(scores_ptr + row * stride, newest, place, count, MODE), axis=1)
        )
    best = one_each(best, place_ptr + row * FEW, ALIGNED)
    tl.store(guess_ptr + row, _score(tl.max(kth(best, rank, 16), axis=0)))
    tl.store(found_ptr + row, 0)


@triton.jit
def filter_row(
    scores_ptr, visible_ptr, guess_ptr, found_ptr, place_ptr, group_ptr, count, stride, divisor,
    FEW: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(count / 16B), rows): collects, in no order, the places of scores that reach the guess.

    Few do: first which groups of sixteen hold one, then those groups again.
    """
    row = tl.program_id(1).to(tl.int64)
    guess = tl.load(guess_ptr + row)
    row_ptr = scores_ptr + row * stride
    newest = newest_block(visible_ptr, row, divisor, MODE)
    group = tl.program_id(0) * B + tl.arange(0, B)
    within = tl.arange(0, 16)
    place = group[:, None] * 16 + within[None, :]
    x = tl.load(row_ptr + place, mask=place < count, other=float("-inf")).to(tl.float32)
    hit = tl.max(x, axis=1) >= guess
    if MODE == 1:
        hit = hit | ((newest >= 0) & (group == newest // 16))
    order = tl.cumsum(hit.to(tl.int32), axis=0)
    hits = tl.max(order, axis=0)
    if hits > 0:
        group_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * B
        tl.store(group_ptr + order - 1, group, mask=hit)
        tl.debug_barrier()
        for start in range(0, hits, 32):
            some = start + tl.arange(0, 32)
            again = tl.load(group_ptr + some, mask=some < hits, other=134217727)
            spot = tl.reshape(again[:, None] * 16 + within[None, :], [512])
            score = tl.load(row_ptr + spot, mask=spot < count, other=float("-inf")).to(tl.float32)
            reaches = (score >= guess) | (spot == newest)
            rank = tl.cumsum(reaches.to(tl.int32), axis=0)
            at = tl.atomic_add(found_ptr + row, tl.max(rank, axis=0)) + rank - 1
            tl.store(place_ptr + row * FEW + at, spot, mask=reaches & (at < FEW))


@triton.jit
def _among(
    row_ptr, newest, place_ptr, out_ptr, count, found, k,
    K: tl.constexpr, FEW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The k greatest of the `found` scores collected in any order, ties to the lower place, sorted."""
    lane = tl.arange(0, FEW)
    place = tl.load(place_ptr + lane, mask=lane < found, other=2147483647)
    key = tl.where(lane < found, load_keys(row_ptr, newest, place, count, MODE), 0)
    t = kth(key, k, 32)
    above = (key > t) & (key > 0)
    spare = k - tally(above)
    equal = (key == t) & (key > 0)
    # the spare-th lowest place among the equal: the greatest bound with fewer than `spare` of them below it
    bound = tl.zeros([FEW], tl.int32)
    bit = tl.full([FEW], 1073741824, tl.int32)
    if tl.max(tally(equal) - spare, axis=0) > 0:
        for turn in range(31):
            trial = bound | bit
            bound = tl.where(tally(equal & (place < trial), turn) < spare, trial, bound)
            bit = bit >> 1
    else:
        bound += 2147483647
    chosen = above | (equal & (place <= bound) & (spare > 0))
    at = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # every place has been read
    tl.store(place_ptr + at, place, mask=chosen)
    tl.debug_barrier()
    slot = tl.arange(0, K)
    picked = tl.sort(tl.load(place_ptr + slot, mask=slot < tl.minimum(k, found), other=2147483647))
    tl.store(out_ptr + slot, tl.where(picked == 2147483647, -1, picked), mask=slot < k)


@triton.jit
def choose_row(
    scores_ptr, visible_ptr, guess_ptr, found_ptr, place_ptr, out_ptr, count, stride, k, divisor,
    FEW: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the k greatest of those collected; of the row itself where the guess failed."""
    row = tl.program_id(0).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    found = tl.load(found_ptr + row)
    guess = tl.load(guess_ptr + row)
    row_ptr = scores_ptr + row * stride
    out_ptr += row * k
    # a guess of the lowest finite score collects every one that may be chosen, however few
    if (found <= FEW) & ((found >= k) | (guess == LOWEST)):
        _among(row_ptr, newest, place_ptr + row * FEW, out_ptr, count, found, k, K, FEW, MODE)
    else:
        search(row_ptr, newest, count, out_ptr, k, 4096, MODE)


def _rank(k: int, sample: int, count: int) -> int:
    """Which of a sample's greatest to take as the guess: some six deviations below the k-th of the row."""
    expected = k * sample / count
    return math.ceil(expected + 6 * math.sqrt(expected) + 6)


def _room(k: int, count: int) -> int:
    """How many keys of a row to make room for: well above what reaches the guess."""
    expected = max(k, int(1.6 * _rank(k, _SAMPLE, count) * count / _SAMPLE))
    return int(max(LANES.value, triton.next_power_of_2(expected)))


def fits(k: int, count: int) -> bool:
    """Whether a guess at the k-th of rows of `count` keys leaves no more than a program holds."""
    return count >= 4 * _SAMPLE and _rank(k, _SAMPLE, count) <= 256 and _room(k, count) <= 8 * LANES.value


def select(scores: torch.Tensor, visible: torch.Tensor, out: torch.Tensor, mode: int, divisor: int) -> None:
    """Fills out int32 [N, k] from scores fp32 [N, M], k and M such that `fits`."""
    rows, count = scores.shape
    k, stride = out.shape[1], scores.stride(0)
    rank, few, width = _rank(k, _SAMPLE, count), _room(k, count), triton.next_power_of_2(k)
    guess = torch.empty(rows, dtype=torch.float32, device=scores.device)
    found = torch.empty(rows, dtype=torch.int32, device=scores.device)
    places = torch.empty(rows, few, dtype=torch.int32, device=scores.device)
    guess_bound[(rows,)](
        scores, visible, guess, found, places, count, stride, rank, divisor, few, _EACH, mode,
        aligned(scores), num_warps=32,
    )  # fmt: skip
    block = 256
    programs = triton.cdiv(count, block * _GROUP_KEYS)
    groups = torch.empty(rows * programs * block, dtype=torch.int32, device=scores.device)
    filter_row[(programs, rows)](
        scores, visible, guess, found, places, groups, count, stride, divisor, few, block, mode, num_warps=8
    )
    choose_row[(rows,)](
        scores, visible, guess, found, places, out, count, stride, k, divisor, few, width, mode, num_warps=32
    )
