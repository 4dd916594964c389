# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Selection among scores: the exact top k, ties to the lower position, ascending (spec §3).

A threshold is found eight bits at a time by histograms. So that few keys need counting, `_guess` first
takes a threshold from
a sample that a few times k scores reach, `_filter` collects where those are in one pass over the row, and
`_choose` seeks the
k-th greatest among them. A row of up to `SHORT` scores is one program. Where a guess fails (many equal
scores, say) the row
itself is searched: slower, and as exact.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

SHORT = 4096
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _ordered(x):
    """uint32 that orders as the fp32 scores do; -inf (never chosen) becomes 0, and both zeros are equal."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(x == float("-inf"), 0, key.to(tl.uint32, bitcast=True))


@triton.jit
def _score(key):
    """The least score that `_ordered` maps to `key` or above, for key 0 the least finite one."""
    bits = key.to(tl.int32, bitcast=True)
    x = (bits ^ ((~(bits >> 31)) | -2147483648)).to(tl.float32, bitcast=True)
    return tl.where(key < 8388608, LOWEST, x)


@triton.jit
def _threshold(key, k, LOW: tl.constexpr):
    """The greatest t with at least k keys >= t (its bits below LOW left 0); 0 when fewer than k keys are
    positive.
    """
    t = tl.full([], 0, tl.uint32)
    need = k
    top = tl.max(key, axis=0)
    width = (
        top.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    ) - 126  # bits of the greatest key, or one more
    above = tl.where(top == 0, 0, tl.minimum(width, 32))  # bits below here are still to be found
    live = key > 0
    bins = tl.arange(0, 256)
    while above > LOW:
        shift = tl.maximum(above - 8, 0)
        digit = (key >> shift.to(tl.uint32)) & ((1 << (above - shift)) - 1).to(tl.uint32)
        counts = tl.histogram(digit.to(tl.int32), 256, mask=live)
        reach = tl.cumsum(counts, axis=0, reverse=True)
        found = tl.max(tl.where(reach >= need, bins, 0), axis=0)
        need -= tl.sum(tl.where(bins > found, counts, 0), axis=0)
        t = t | (found.to(tl.uint32) << shift.to(tl.uint32))
        live = live & (digit == found.to(tl.uint32))
        above = shift
    return t


@triton.jit
def _newest(visible_ptr, divisor):
    """The block that holds the newest visible position; -1 where nothing is visible."""
    visible = tl.load(visible_ptr).to(tl.int32)
    return tl.where(visible > 0, (visible - 1) // divisor, -1)


@triton.jit
def _load_scores(row_ptr, visible, place, count, MODE: tl.constexpr):
    """Keys at `place`; MODE 1: the block that holds the newest visible position beats everything."""
    x = tl.load(row_ptr + place, mask=place < count, other=float("-inf")).to(tl.float32)
    key = _ordered(x)
    if MODE == 1:
        key = tl.where((place == visible) & (place < count), 4294967295, key).to(tl.uint32)
    return key


@triton.jit
def _short(
    scores_ptr,
    visible_ptr,
    out_ptr,
    count,
    stride,
    k,
    divisor,
    K: tl.constexpr,
    B: tl.constexpr,
    MODE: tl.constexpr,
):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    visible = _newest(visible_ptr + row, divisor) if MODE == 1 else 0
    place = tl.arange(0, B)
    key = _load_scores(scores_ptr + row * stride, visible, place, count, MODE)
    out_ptr += row * k
    t = _threshold(key, k, 0)
    above = (key > t) & (key > 0)
    spare = k - tl.sum(above.to(tl.int32), axis=0)
    equal = (key == t) & (key > 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= spare))
    order = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(out_ptr + order - 1, place, mask=chosen)
    written = tl.max(order, axis=0)
    slot = tl.arange(0, K)
    tl.store(out_ptr + slot, -1, mask=(slot >= written) & (slot < k))


@triton.jit
def _sample(row_ptr, visible, count, B: tl.constexpr, MODE: tl.constexpr):
    """Keys of B scores, in fours, spread over a row of at least 4B; how far into its step each lies
    varies.
    """
    lane = tl.arange(0, B)
    group = lane // 4
    step = count // B
    place = (group * step + ((group * 40503) >> 4) % step) * 4 + lane % 4
    return _load_scores(row_ptr, visible, place, count, MODE)


@triton.jit
def _guess(
    scores_ptr, visible_ptr, guess_ptr, found_ptr, count, stride, rank, divisor,
    B: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a score near the rank-th greatest of a sample, not above it; found is cleared."""
    row = tl.program_id(0).to(tl.int64)
    visible = _newest(visible_ptr + row, divisor) if MODE == 1 else 0
    key = _sample(scores_ptr + row * stride, visible, count, B, MODE)
    tl.store(guess_ptr + row, _score(_threshold(key, rank, 16)))
    tl.store(found_ptr + row, 0)


@triton.jit
def _filter(
    scores_ptr, visible_ptr, guess_ptr, found_ptr, place_ptr, group_ptr, count, stride, divisor,
    FEW: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(count / 16B), rows): collects, in no order, the places of scores that reach the guess.

    Few do: first which groups of sixteen hold one, then those groups again.
    """
    row = tl.program_id(1).to(tl.int64)
    guess = tl.load(guess_ptr + row)
    row_ptr = scores_ptr + row * stride
    newest = _newest(visible_ptr + row, divisor) if MODE == 1 else -1
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
def _count_row(row_ptr, visible, count, low, B: tl.constexpr, MODE: tl.constexpr):
    """How many keys of a whole row are >= low."""
    reach = tl.zeros([B], tl.int32)
    for start in range(0, count, B):
        key = _load_scores(row_ptr, visible, start + tl.arange(0, B), count, MODE)
        reach += (key >= low).to(tl.int32)
    return tl.sum(reach, axis=0)


@triton.jit
def _choose(
    scores_ptr, visible_ptr, guess_ptr, found_ptr, place_ptr, out_ptr, count, stride, k, divisor,
    FEW: tl.constexpr, K: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the k greatest of those collected, sorted by place; of the row itself where the guess
    failed.
    """
    row = tl.program_id(0).to(tl.int64)
    visible = _newest(visible_ptr + row, divisor) if MODE == 1 else 0
    found = tl.load(found_ptr + row)
    guess = tl.load(guess_ptr + row)
    row_ptr = scores_ptr + row * stride
    out_ptr += row * k
    slot = tl.arange(0, K)
    # a guess of the lowest finite score collects every one that may be chosen, however few
    if (found <= FEW) & ((found >= k) | (guess == LOWEST)):
        _among(
            row_ptr, visible, place_ptr + row * FEW, out_ptr, count, found, k, _ordered(guess), K, FEW, MODE
        )
    else:
        t = tl.full([], 0, tl.uint32)
        bit = tl.full([], 2147483648, tl.uint32)
        for _ in range(32):
            t = tl.where(_count_row(row_ptr, visible, count, t | bit, B, MODE) >= k, t | bit, t)
            bit = bit >> 1
        spare = k - _count_row(row_ptr, visible, count, tl.minimum(t, 4294967294) + 1, B, MODE)
        written = 0
        ties = 0
        for start in range(0, count, B):
            place = start + tl.arange(0, B)
            key = _load_scores(row_ptr, visible, place, count, MODE)
            equal = (key == t) & (key > 0)
            chosen = ((key > t) & (key > 0)) | (
                equal & (ties + tl.cumsum(equal.to(tl.int32), axis=0) <= spare)
            )
            at = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(out_ptr + at, place, mask=chosen)
            written += tl.sum(chosen.to(tl.int32), axis=0)
            ties += tl.sum(equal.to(tl.int32), axis=0)
        tl.store(out_ptr + slot, -1, mask=(slot >= written) & (slot < k))


@triton.jit
def _among(
    row_ptr, visible, place_ptr, out_ptr, count, found, k, least,
    K: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The k greatest of `found` scores at the places collected, ties to the lower place, in order of
    place.
    """
    lane = tl.arange(0, B)
    place = tl.load(place_ptr + lane, mask=lane < found, other=2147483647)
    key = _load_scores(row_ptr, visible, place, count, MODE)
    key = tl.where(key > 0, key - least + 1, 0)  # none is below the guess: fewer bits to search
    t = _threshold(key, k, 0)
    above = key > t
    spare = k - tl.sum(above.to(tl.int32), axis=0)
    equal = (key == t) & (lane < found)
    chosen = above | equal
    if tl.sum(equal.to(tl.int32), axis=0) > spare:
        # the spare-th lowest place among the equal: the greatest bound with fewer than `spare` places
        # below it
        bound = tl.full([], 0, tl.int32)
        bit = tl.full([], 1073741824, tl.int32)
        for _ in range(31):
            trial = bound | bit
            bit = bit >> 1
            bound = tl.where(tl.sum((equal & (place < trial)).to(tl.int32), axis=0) < spare, trial, bound)
        chosen = above | (equal & (place <= bound) & (spare > 0))
    at = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(place_ptr + at, place, mask=chosen)
    tl.debug_barrier()
    slot = tl.arange(0, K)
    picked = tl.load(place_ptr + slot, mask=slot < tl.minimum(k, found), other=2147483647)
    picked = tl.sort(picked)
    tl.store(out_ptr + slot, tl.where(picked == 2147483647, -1, picked), mask=slot < k)


def _select(
    scores: torch.Tensor, visible: torch.Tensor, k: int, mode: int, divisor: int, short: int = SHORT
) -> torch.Tensor:
    rows, count = scores.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    if count == 0:
        return out.fill_(-1)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    width = triton.next_power_of_2(k)
    stride = scores.stride(0)
    if count <= short:
        size = max(triton.next_power_of_2(count), 32)
        _short[(rows,)](
            scores,
            visible,
            out,
            count,
            stride,
            k,
            divisor,
            width,
            size,
            mode,
            num_warps=4 if size < 2048 else 8,
        )
        return out
    sample = max(short // 4, min(16384, triton.next_power_of_2(count) // 8))
    rank = _rank(k, sample, count)
    few = max(width, triton.next_power_of_2(int(1.6 * rank * count / sample)))
    guess = torch.empty(rows, dtype=torch.float32, device=scores.device)
    found = torch.empty(rows, dtype=torch.int32, device=scores.device)
    places = torch.empty(rows, few, dtype=torch.int32, device=scores.device)
    _guess[(rows,)](
        scores,
        visible,
        guess,
        found,
        count,
        stride,
        rank,
        divisor,
        sample,
        mode,
        num_warps=8 if sample < 8192 else 16,
    )
    block = min(4096, short) // 16
    programs = triton.cdiv(count, block * 16)
    groups = torch.empty(rows * programs * block, dtype=torch.int32, device=scores.device)
    _filter[(programs, rows)](
        scores, visible, guess, found, places, groups, count, stride, divisor, few, block, mode, num_warps=8
    )
    _choose[(rows,)](
        scores,
        visible,
        guess,
        found,
        places,
        out,
        count,
        stride,
        k,
        divisor,
        few,
        width,
        min(2048, short),
        mode,
        num_warps=8,
    )
    return out


def _rank(k: int, sample: int, count: int) -> int:
    """Which of a sample's greatest to take as the guess: some six deviations below the k-th of the row."""
    expected = k * sample / count
    return math.ceil(expected + 6 * math.sqrt(expected) + 6)


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [N, k]: ascending positions of the k greatest scores [N, M] fp32, -1 at the end; -inf is never
    chosen.
    """
    return _select(scores, scores, k, 0, 1)


def keep_blocks(best: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """int32 [N, keep]: ascending ids of the blocks kept, of their greatest scores [N, blocks]; the newest
    always is.
    """
    return _select(best, visible.contiguous(), keep, 1, block)


@triton.jit
def _maxima(scores_ptr, visible_ptr, best_ptr, count, blocks, block, BW: tl.constexpr, B: tl.constexpr):
    """Grid (ceil(blocks / B), rows)."""
    row = tl.program_id(1).to(tl.int64)
    limit = tl.minimum(tl.load(visible_ptr + row), count)
    which = tl.program_id(0) * B + tl.arange(0, B)
    within = tl.arange(0, BW)
    place = which[:, None] * block + within[None, :]
    x = tl.load(
        scores_ptr + row * count + place,
        mask=(place < limit) & (within < block)[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    tl.store(best_ptr + row * blocks + which, tl.max(x, axis=1), mask=which < blocks)


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, keep: int) -> torch.Tensor:
    """The same from scores fp32 [N, M]; `keep_blocks` where the score kernel has written the maxima
    already.
    """
    rows, count = scores.shape
    blocks = -(-count // block)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    if rows and blocks:
        _maxima[(triton.cdiv(blocks, 256), rows)](
            scores.contiguous(),
            visible.contiguous(),
            best,
            count,
            blocks,
            block,
            triton.next_power_of_2(block),
            256,
        )
    return keep_blocks(best, visible, block, keep)


@triton.jit
def _positions(blocks_ptr, visible_ptr, out_ptr, keep, block, B: tl.constexpr):
    """Grid (ceil(keep·block / B), rows)."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * B + tl.arange(0, B)
    which = tl.load(blocks_ptr + row * keep + slot // block, mask=slot < keep * block, other=-1)
    position = which * block + slot % block
    position = tl.where((which >= 0) & (position < tl.load(visible_ptr + row)), position, -1)
    tl.store(out_ptr + row * keep * block + slot, position.to(tl.int32), mask=slot < keep * block)


def block_positions(blocks: torch.Tensor, block: int, visible: torch.Tensor) -> torch.Tensor:
    """int32 [N, keep·block]: the visible positions of blocks int32 [N, keep]."""
    rows, keep = blocks.shape
    out = torch.empty(rows, keep * block, dtype=torch.int32, device=blocks.device)
    if rows and keep:
        _positions[(triton.cdiv(keep * block, 1024), rows)](
            blocks.contiguous(), visible.contiguous(), out, keep, block, 1024
        )
    return out


@triton.jit
def _take(candidates_ptr, columns_ptr, out_ptr, width, k, B: tl.constexpr):
    """Grid (ceil(k / B), rows)."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * B + tl.arange(0, B)
    column = tl.load(columns_ptr + row * k + slot, mask=slot < k, other=-1)
    column = tl.minimum(column, width - 1)
    taken = tl.load(candidates_ptr + row * width + column, mask=column >= 0, other=-1)
    tl.store(out_ptr + row * k + slot, taken, mask=slot < k)


def take(candidates: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int32 [N, k]: candidates[n, columns[n]], -1 where the column is."""
    out = torch.empty_like(columns)
    rows, k = columns.shape
    if rows and k:
        _take[(triton.cdiv(k, 512), rows)](
            candidates.contiguous(), columns.contiguous(), out, candidates.shape[1], k, 512
        )
    return out
