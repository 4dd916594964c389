# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The choice of the next token on a GPU: one launch, one program a row.

A row is read twice where nothing is ranked: for its greatest logit, then for the weights, whose sums by
block say where the draw falls. Where top-k or top-p rank it, the second pass also sets aside the logits
above a guess, which the 1,024th greatest of the column maxima is; these are sorted, and all else happens
in registers. A filter that reaches past them (a flat distribution) is searched for bit by bit instead.

Letters: B block of columns, CAP logits set aside, SLOTS of them a column at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.sampling_ref import LOG2_E, ONE, POWERS, STREAM_TAG

P0, P1, P2, P3, P4, P5, P6, P7 = (tl.constexpr(power) for power in POWERS)
_ONE = tl.constexpr(float(ONE))
_LOG2_E = tl.constexpr(LOG2_E)
_TAG = tl.constexpr(STREAM_TAG)
BLOCK, CAP, SLOTS, RANK = 4096, 2048, 8, 1024
_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _bits(seed, position, stream):
    """53 random bits, int64 (`sampling_ref.bits`); words are uint32 scalars."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = (position & 0xFFFFFFFF).to(tl.uint32)
    b = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c = (stream + tl.zeros_like(position)).to(tl.uint32)
    d = (tl.zeros_like(position) + _TAG).to(tl.uint32)
    for _ in tl.static_range(10):
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ low
        b = (second & 0xFFFFFFFF).to(tl.uint32)
        c = (first >> 32).to(tl.uint32) ^ d ^ high
        d = (first & 0xFFFFFFFF).to(tl.uint32)
        low = ((low.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        high = ((high.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    return (((b.to(tl.uint64) << 32) | a.to(tl.uint64)) >> 11).to(tl.int64)


@triton.jit
def _weigh(below, scale):
    """`sampling_ref.weigh`."""
    z = tl.maximum(below * scale, -100.0)
    whole = tl.floor(z + 0.5)
    f = z - whole
    p = P7 * f + P6
    p = p * f + P5
    p = p * f + P4
    p = p * f + P3
    p = p * f + P2
    p = p * f + P1
    p = p * f + P0
    fixed = (p * 16777216.0).to(tl.int32).to(tl.int64) << 20
    return fixed >> tl.minimum((-whole).to(tl.int32), 63).to(tl.int64)


@triton.jit
def _key(x):
    """int32 that orders as the fp32 does."""
    word = x.to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The fp32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _filtered(below, scale, least):
    """Weights, 0 where below `least`."""
    weights = _weigh(below, scale)
    return tl.where(weights >= least, weights, 0)


@triton.jit
def _above(row_ptr, width, cut, greatest, scale, least, B: tl.constexpr):
    """How many logits have a key of `cut` or more, and their weight."""
    count = tl.zeros([B], tl.int64)
    mass = tl.zeros([B], tl.int64)
    for start in range(0, width, B):
        at = start + tl.arange(0, B)
        x = tl.load(row_ptr + at, mask=at < width, other=float("-inf")) + 0.0
        taken = (at < width) & (_key(x) >= cut)
        count += taken.to(tl.int64)
        mass += tl.where(taken, _filtered(x - greatest, scale, least), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search(row_ptr, width, greatest, scale, least, floor, goal, COUNT: tl.constexpr, B: tl.constexpr):
    """The greatest key, of `floor` or more, at and above which there are `goal` logits (COUNT) or that
    weight; `floor` itself is taken to do.
    """
    low = floor.to(tl.int64)
    high = tl.zeros_like(low) + 0x7FFFFFFF
    while low < high:
        middle = (low + high + 1) >> 1
        count, mass = _above(row_ptr, width, middle, greatest, scale, least, B)
        if (count if COUNT else mass) >= goal:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _nth(row_ptr, width, key, which, B: tl.constexpr):
    """The id of the logit number `which`, from 0, of those with this key, by id."""
    before = tl.zeros_like(which)
    found = tl.zeros_like(which)
    for start in range(0, width, B):
        at = start + tl.arange(0, B)
        x = tl.load(row_ptr + at, mask=at < width, other=float("-inf")) + 0.0
        same = ((at < width) & (_key(x) == key)).to(tl.int64)
        place = before + tl.cumsum(same, axis=0) - 1
        found += tl.sum(tl.where((same > 0) & (place == which), at, 0).to(tl.int64), axis=0)
        before += tl.sum(same, axis=0)
    return found


@triton.jit
def _draw_flat(row_ptr, width, greatest, scale, least, k, top_p, random, total, B: tl.constexpr):
    """The id drawn by rank, however many the filters keep."""
    lowest = tl.zeros_like(k) - 0x80000000
    cut = lowest
    if k < width:
        cut = _search(row_ptr, width, greatest, scale, least, lowest, k, True, B)
        count, mass = _above(row_ptr, width, cut + 1, greatest, scale, least, B)
        total = mass + (k - count) * _filtered(_logit(cut.to(tl.int32)) - greatest, scale, least)
    wanted = tl.minimum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), total)
    cut = _search(row_ptr, width, greatest, scale, least, cut, wanted, False, B)
    count, mass = _above(row_ptr, width, cut + 1, greatest, scale, least, B)
    each = tl.maximum(_filtered(_logit(cut.to(tl.int32)) - greatest, scale, least), 1)
    mass += (wanted - mass + each - 1) // each * each
    target = tl.minimum(tl.floor(mass.to(tl.float64) * random).to(tl.int64), mass - 1)
    cut = _search(row_ptr, width, greatest, scale, least, cut, target + 1, False, B)
    count, mass = _above(row_ptr, width, cut + 1, greatest, scale, least, B)
    each = tl.maximum(_filtered(_logit(cut.to(tl.int32)) - greatest, scale, least), 1)
    return _nth(row_ptr, width, cut, (target - mass) // each, B)


@triton.jit
def _guess(best, RANK: tl.constexpr):
    """The greatest key at or above which RANK of the keys int32 [B] are; the least of all if there are
    fewer.
    """
    low = tl.min(best, axis=0).to(tl.int64)
    high = tl.max(best, axis=0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((best >= middle).to(tl.int32), axis=0) >= RANK:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["rows", "stream"])
def _draw(
    logits_ptr, seed_ptr, position_ptr, temperature_ptr, k_ptr, p_ptr, least_ptr, aside_ptr, dense_ptr,
    sums_ptr, id_ptr, out_ptr, width, rows, stream,
    B: tl.constexpr, CAP: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows). id int64 and, in the same tensor, out float64 [4, rows]: id, its logit, the greatest
    logit, the mass at temperature 1.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * width
    column = tl.arange(0, B)
    best = tl.full([B], float("-inf"), tl.float32)
    first = tl.zeros([B], tl.int32)
    odd = tl.zeros([B], tl.int32)
    for start in range(0, width, B):
        at = start + column
        x = tl.load(row_ptr + at, mask=at < width, other=float("-inf")) + 0.0
        odd |= ((at < width) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
        first = tl.where(x > best, at, first)
        best = tl.maximum(best, x)
    greatest = tl.max(best, axis=0)
    likeliest = tl.min(tl.where(best == greatest, first, 0x7FFFFFFF), axis=0).to(tl.int64)
    chosen = tl.zeros_like(row) - 1
    total = tl.zeros_like(row)
    mass = tl.zeros_like(row)
    if tl.max(odd, axis=0) == 0:
        temperature = tl.load(temperature_ptr + row)
        k = tl.load(k_ptr + row)
        top_p = tl.load(p_ptr + row)
        ranked = (k > 0) | (top_p < 1.0)
        drawn = temperature > 0.0
        scale = (tl.full([1], _LOG2_E, tl.float64) / tl.where(drawn, temperature, 1.0)).to(tl.float32)
        scale = tl.sum(scale, axis=0)
        least = tl.ceil(tl.load(least_ptr + row) * _ONE).to(tl.int64)
        random = _bits(tl.load(seed_ptr + row), tl.load(position_ptr + row), stream).to(tl.float64)
        random = random * 1.1102230246251565e-16  # 2^-53
        guess = tl.zeros_like(row) + 0x7FFFFFFF
        if drawn & ranked:
            guess = _guess(_key(best), RANK)
        used = tl.zeros([B], tl.int32)
        for start in range(0, width, B):
            at = start + column
            x = tl.load(row_ptr + at, mask=at < width, other=float("-inf")) + 0.0
            below = tl.where(at < width, x - greatest, 0.0)
            weights = _weigh(below, 1.4426950408889634)
            mass += tl.sum(tl.where(at < width, weights, 0), axis=0)
            if drawn:
                weights = _filtered(below, scale, least)
                part = tl.sum(tl.where(at < width, weights, 0), axis=0)
                tl.store(sums_ptr + row * BLOCKS + start // B, part)
                total += part
                key = _key(x)
                taken = (at < width) & (key >= guess)
                pair = (key.to(tl.int64) << 32) | (0xFFFFFFFF - at.to(tl.int64))
                place = (row * SLOTS + tl.minimum(used, SLOTS - 1)) * B + column
                tl.store(aside_ptr + place, pair, mask=taken)
                used += taken.to(tl.int32)
        chosen = likeliest
        if drawn:
            tl.debug_barrier()
            if ranked:
                k = tl.where((k == 0) | (k > width), width, k)
                count = tl.sum(used, axis=0)
                kept = tl.zeros_like(row)
                if (count <= CAP) & (tl.max(used, axis=0) <= SLOTS):
                    offset = tl.cumsum(used, axis=0) - used
                    for slot in range(tl.max(used, axis=0)):
                        pair = tl.load(
                            aside_ptr + (row * SLOTS + slot) * B + column, mask=slot < used, other=0
                        )
                        tl.store(dense_ptr + row * CAP + offset + slot, pair, mask=slot < used)
                    tl.debug_barrier()
                    rank = tl.arange(0, CAP)
                    pairs = tl.load(dense_ptr + row * CAP + rank, mask=rank < count, other=_LEAST)
                    pairs = tl.sort(pairs, descending=True)
                    x = _logit((pairs >> 32).to(tl.int32))
                    weights = _filtered(tl.where(rank < count, x - greatest, 0.0), scale, least)
                    weights = tl.where(rank < count, weights, 0)
                    running = tl.cumsum(weights, axis=0)
                    if k <= count:
                        total = tl.sum(tl.where(rank < k, weights, 0), axis=0)
                    wanted = tl.minimum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), total)
                    kept = tl.sum(((running < wanted) & (rank < count)).to(tl.int64), axis=0) + 1
                    kept = tl.minimum(kept, k)
                    if kept <= count:
                        kept_mass = tl.sum(tl.where(rank < kept, weights, 0), axis=0)
                        target = tl.floor(kept_mass.to(tl.float64) * random).to(tl.int64)
                        target = tl.minimum(target, kept_mass - 1)
                        place = tl.sum((running <= target).to(tl.int32), axis=0)
                        pair = tl.sum(tl.where(rank == place, pairs, 0), axis=0)
                        chosen = 0xFFFFFFFF - (pair & 0xFFFFFFFF)
                    else:
                        kept = tl.zeros_like(row)
                if kept == 0:
                    total = tl.where(k < width, 0, total)
                    chosen = _draw_flat(row_ptr, width, greatest, scale, least, k, top_p, random, total, B)
            else:
                target = tl.minimum(tl.floor(total.to(tl.float64) * random).to(tl.int64), total - 1)
                number = tl.arange(0, BLOCKS)
                known = number * B < width
                parts = tl.load(sums_ptr + row * BLOCKS + number, mask=known, other=0)
                running = tl.cumsum(parts, axis=0)
                block = tl.sum((known & (running <= target)).to(tl.int32), axis=0)
                before = tl.sum(tl.where(number < block, parts, 0), axis=0)
                at = block * B + column
                x = tl.load(row_ptr + at, mask=at < width, other=float("-inf")) + 0.0
                weights = _filtered(tl.where(at < width, x - greatest, 0.0), scale, least)
                weights = tl.where(at < width, weights, 0)
                running = before + tl.cumsum(weights, axis=0)
                chosen = (block * B + tl.sum((running <= target).to(tl.int32), axis=0)).to(tl.int64)
        picked = tl.load(row_ptr + tl.minimum(tl.maximum(chosen, 0), width - 1)) + 0.0
        tl.store(out_ptr + rows + row, picked.to(tl.float64))
        tl.store(out_ptr + 2 * rows + row, greatest.to(tl.float64))
        tl.store(out_ptr + 3 * rows + row, mass.to(tl.float64))
    else:
        for field in tl.static_range(1, 4):
            tl.store(out_ptr + field * rows + row, tl.zeros([], tl.float64))
    tl.store(id_ptr + row, chosen)


def draw_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    stream: int,
    *,
    block: int = BLOCK,
    cap: int = CAP,
    rank: int = RANK,
) -> torch.Tensor:
    """As `sampling_ref.draw_tokens`. `block`, `cap`, `rank` are for tests on small rows."""
    rows, width = logits.shape
    out = torch.empty(4, rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(block, max(64, triton.next_power_of_2(width)))
        blocks = triton.next_power_of_2(triton.cdiv(width, block))
        scratch = torch.empty(rows, SLOTS * block + cap + blocks, dtype=torch.int64, device=logits.device)
        parts = scratch.view(-1).split([rows * SLOTS * block, rows * cap, rows * blocks])
        _draw[(rows,)](
            logits.contiguous(), seeds.contiguous(), positions.contiguous(), temperatures.contiguous(),
            top_k.contiguous(), top_p.contiguous(), min_p.contiguous(), *parts, out,
            out.view(torch.float64), width, rows,
            stream,
            block, cap, SLOTS, rank, blocks, num_warps=16 if block == BLOCK else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
