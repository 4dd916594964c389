# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The top k of rows that are cut into slices, one program each, on a bound that never fails (spec §3).

A row falls into groups. The k-th greatest of the groups' maxima is reached by at least k keys, and on most
rows
by little more: those are collected in order of place, and the k greatest chosen among them. A short row is
one
program. Where too many keys reach the bound (equal scores, or sorted ones) the row itself is searched:
slower,
and as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.select_keys_triton import (
    LANES,
    aligned,
    decide,
    kth,
    load_keys,
    newest_block,
    one_each,
    search,
)

MOST = 2048  # the greatest k that has a path of its own
SHORT = 16_384
_CHUNK = 4 * LANES.value  # four neighbouring keys a thread
_CHUNK_KEYS = tl.constexpr(_CHUNK)
_BOUND_BITS = tl.constexpr(16)  # of the bound: sign, exponent, seven of the mantissa


@triton.jit
def _slice(row_ptr, newest, start, count, CHUNKS: tl.constexpr, MODE: tl.constexpr):
    """CHUNKS tensors of keys [1024, 4] from place `start` on: a thread has four neighbours of each."""
    place = start + tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    keys = ()
    for r in tl.static_range(CHUNKS):
        more = load_keys(row_ptr, newest, place + r * _CHUNK_KEYS, count, MODE)
        keys = keys + (more,)  # type: ignore[assignment]  # noqa: RUF005 (Triton cannot unpack)
    return keys


@triton.jit
def _greatest(keys, CHUNKS: tl.constexpr):
    """The greatest key of every thread, uint32 [1024]."""
    best = tl.max(keys[0], axis=1)
    for r in tl.static_range(1, CHUNKS):
        best = tl.maximum(best, tl.max(keys[r], axis=1))
    return best


@triton.jit
def _compact(keys, start, least, key_ptr, place_ptr, CHUNKS: tl.constexpr, LIMIT: tl.constexpr):
    """Writes the keys >= least and their places, in order of place, up to LIMIT; returns how many there
    are.
    """
    packed = tl.zeros([LANES], tl.int64)  # how many a thread has of each chunk, 16 bits each
    for r in tl.static_range(CHUNKS):
        packed += tl.sum((keys[r] >= least).to(tl.int32), axis=1).to(tl.int64) << (16 * r)
    reach = tl.cumsum(packed, axis=0)
    total = tl.max(tl.where(tl.arange(0, LANES) == LANES - 1, reach, 0), axis=0)
    before = total * 281479271743488  # 0x1_0001_0001_0000: the sums of the chunks before each
    first = reach - packed + before
    place = start + tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for r in tl.static_range(CHUNKS):
        hit = keys[r] >= least
        base = (first >> (16 * r)).to(tl.int32) & 65535
        slot = base[:, None] + tl.cumsum(hit.to(tl.int32), axis=1) - 1
        keep = hit & (slot < LIMIT)
        tl.store(key_ptr + slot, keys[r].to(tl.int32, bitcast=True), mask=keep)
        tl.store(place_ptr + slot, place + r * _CHUNK_KEYS, mask=keep)
    return ((total + before) >> (16 * (CHUNKS - 1))).to(tl.int32) & 65535


@triton.jit
def _decide_found(key_ptr, place_ptr, found, out_ptr, k, FEW: tl.constexpr):
    """The k greatest of the `found` collected, at most FEW."""
    lane = tl.arange(0, FEW)
    key = tl.load(key_ptr + lane, mask=lane < found, other=0).to(tl.uint32, bitcast=True)
    decide(key, tl.load(place_ptr + lane, mask=lane < found, other=0), found, out_ptr, k)


@triton.jit
def top_short(
    scores_ptr, visible_ptr, key_ptr, place_ptr, out_ptr, count, stride, k, divisor,
    CHUNKS: tl.constexpr, FEW: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (rows): rows of up to CHUNKS·4096 keys, k at most 512; a thread's keys are a group."""
    row = tl.program_id(0).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    row_ptr = scores_ptr + row * stride
    out_ptr += row * k
    key_ptr += row * FEW
    place_ptr += row * FEW
    keys = _slice(row_ptr, newest, 0, count, CHUNKS, MODE)
    best = one_each(_greatest(keys, CHUNKS), key_ptr, ALIGNED)
    least = tl.maximum(kth(best, k, _BOUND_BITS), 1)
    found = _compact(keys, 0, least[:, None], key_ptr, place_ptr, CHUNKS, FEW)
    if found <= LANES:  # nearly always
        tl.debug_barrier()
        _decide_found(key_ptr, place_ptr, found, out_ptr, k, LANES)
    elif found <= FEW:
        tl.debug_barrier()
        _decide_found(key_ptr, place_ptr, found, out_ptr, k, FEW)
    else:
        search(row_ptr, newest, count, out_ptr, k, _CHUNK_KEYS, MODE)


@triton.jit
def top_few(
    scores_ptr, visible_ptr, out_ptr, count, stride, k, divisor, FEW: tl.constexpr, MODE: tl.constexpr
):
    """Grid (rows): rows of up to FEW keys, any k."""
    row = tl.program_id(0).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    lane = tl.arange(0, FEW)
    key = load_keys(scores_ptr + row * stride, newest, lane, count, MODE)
    decide(key, lane, tl.sum((key > 0).to(tl.int32), axis=0), out_ptr + row * k, k)
    for start in range(FEW, k, FEW):
        tl.store(out_ptr + row * k + start + lane, -1, mask=start + lane < k)


@triton.jit
def top_any(scores_ptr, visible_ptr, out_ptr, count, stride, k, divisor, MODE: tl.constexpr):
    """Grid (rows): any row, any k, slow."""
    row = tl.program_id(0).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    search(scores_ptr + row * stride, newest, count, out_ptr + row * k, k, _CHUNK_KEYS, MODE)


@triton.jit
def slice_maxima(
    scores_ptr, visible_ptr, best_ptr, count, stride, divisor,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (slices, rows): the greatest key of each of a slice's GROUPS groups."""
    row = tl.program_id(1).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    start = tl.program_id(0) * (CHUNKS * _CHUNK_KEYS)
    best = _greatest(_slice(scores_ptr + row * stride, newest, start, count, CHUNKS, MODE), CHUNKS)
    best = tl.max(tl.reshape(best, [GROUPS, LANES // GROUPS]), axis=1)
    at = best_ptr + (row * tl.num_programs(0) + tl.program_id(0)) * GROUPS + tl.arange(0, GROUPS)
    tl.store(at, best.to(tl.int32, bitcast=True))


@triton.jit
def slice_collect(
    scores_ptr, visible_ptr, best_ptr, key_ptr, place_ptr, found_ptr, count, stride, k, divisor, groups,
    CHUNKS: tl.constexpr, BEST: tl.constexpr, LIMIT: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (slices, rows): a slice's keys that reach the k-th greatest of the row's `groups` maxima."""
    row = tl.program_id(1).to(tl.int64)
    newest = newest_block(visible_ptr, row, divisor, MODE)
    start = tl.program_id(0) * (CHUNKS * _CHUNK_KEYS)
    keys = _slice(scores_ptr + row * stride, newest, start, count, CHUNKS, MODE)
    lane = tl.arange(0, BEST)
    best = tl.load(best_ptr + row * groups + lane, mask=lane < groups, other=0).to(tl.uint32, bitcast=True)
    least = tl.max(tl.maximum(kth(best, k, _BOUND_BITS), 1), axis=0)
    cell = row * tl.num_programs(0) + tl.program_id(0)
    found = _compact(keys, start, least, key_ptr + cell * LIMIT, place_ptr + cell * LIMIT, CHUNKS, LIMIT)
    tl.store(found_ptr + cell, found)


@triton.jit
def _decide_slices(
    key_ptr, place_ptr, reach_ptr, slices, total, out_ptr, k,
    SLICES: tl.constexpr, LIMIT: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The k greatest of the `total` (at most FEW) that slices collected; reach: how many those up to each
    hold.
    """
    lane = tl.arange(0, FEW)
    low = tl.zeros([FEW], tl.int32)  # how many slices end at or before a lane's key
    width = SLICES // 2
    while width > 0:
        ends = tl.load(reach_ptr + low + width - 1)
        low = tl.where(ends <= lane, low + width, low)
        width = width // 2
    low = tl.minimum(low, slices - 1)
    before = tl.load(reach_ptr + low - 1, mask=low > 0, other=0)
    at = low.to(tl.int64) * LIMIT + lane - before
    key = tl.load(key_ptr + at, mask=lane < total, other=0).to(tl.uint32, bitcast=True)
    decide(key, tl.load(place_ptr + at, mask=lane < total, other=0), total, out_ptr, k)


@triton.jit
def slice_finish(
    scores_ptr, visible_ptr, key_ptr, place_ptr, found_ptr, reach_ptr, out_ptr,
    count, stride, k, divisor, slices,
    SLICES: tl.constexpr, LIMIT: tl.constexpr, FEW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the k greatest of what the slices collected; of the row itself where that was too much."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, SLICES)
    found = tl.load(found_ptr + row * slices + which, mask=which < slices, other=0)
    reach = tl.cumsum(found, axis=0)
    total = tl.sum(found, axis=0)
    most = tl.max(found, axis=0)
    out_ptr += row * k
    if (total <= FEW) & (most <= LIMIT):
        reach_ptr += row * SLICES
        tl.store(reach_ptr + which, reach)
        tl.debug_barrier()
        key_ptr += row * slices * LIMIT
        place_ptr += row * slices * LIMIT
        if total <= FEW // 2:  # nearly always
            _decide_slices(key_ptr, place_ptr, reach_ptr, slices, total, out_ptr, k, SLICES, LIMIT, FEW // 2)
        else:
            _decide_slices(key_ptr, place_ptr, reach_ptr, slices, total, out_ptr, k, SLICES, LIMIT, FEW)
    else:
        newest = newest_block(visible_ptr, row, divisor, MODE)
        search(scores_ptr + row * stride, newest, count, out_ptr, k, _CHUNK_KEYS, MODE)


def select(
    scores: torch.Tensor, visible: torch.Tensor, out: torch.Tensor, mode: int, divisor: int, chunks: int = 0
) -> None:
    """Fills out int32 [N, k] from scores fp32 [N, M], M > 0. `chunks`: cut into slices of so many, however
    short.
    """
    rows, count = scores.shape
    k, stride = out.shape[1], scores.stride(0)
    few = 2048 if k <= 512 else 4096 if k <= 1024 else 8192

    def space(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=scores.device)

    row = (count, stride, k, divisor)
    if count <= few:
        size = max(LANES.value, triton.next_power_of_2(count))
        top_few[(rows,)](scores, visible, out, *row, size, mode, num_warps=32)
    elif k > MOST:
        top_any[(rows,)](scores, visible, out, *row, mode, num_warps=8)
    elif k <= 512 and count <= SHORT and not chunks:
        work = space(2, rows, few)
        size = triton.next_power_of_2(triton.cdiv(count, _CHUNK))
        top_short[(rows,)](
            scores, visible, work[0], work[1], out, *row, size, few, mode, aligned(scores), num_warps=32
        )
    else:
        if not chunks:
            chunks = 1 if rows * count <= 132 * _CHUNK else 2 if rows * count <= 264 * _CHUNK else 4
            while chunks > 1 and triton.cdiv(count, chunks * _CHUNK) * LANES.value < 2 * k:
                chunks //= 2  # or the groups would be too few for a bound
        slices, limit = triton.cdiv(count, chunks * _CHUNK), few // 2
        groups = min(LANES.value, triton.next_power_of_2(triton.cdiv(2 * k, slices)))
        size, maxima = triton.next_power_of_2(slices), slices * groups
        best, found, reach = space(rows, maxima), space(rows, slices), space(rows, max(2, size))
        work = space(2, rows * slices * limit)
        slice_maxima[(slices, rows)](
            scores, visible, best, count, stride, divisor, chunks, groups, mode, num_warps=32
        )
        slice_collect[(slices, rows)](
            scores, visible, best, work[0], work[1], found, *row, maxima,
            chunks, max(LANES.value, triton.next_power_of_2(maxima)), limit, mode, num_warps=32,
        )  # fmt: skip
        slice_finish[(rows,)](
            scores, visible, work[0], work[1], found, reach, out, *row, slices,
            max(2, size), limit, few, mode, num_warps=32,
        )  # fmt: skip
