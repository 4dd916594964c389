# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Keys that order as scores do, and the exact choice among those that one program holds (spec §3).

A threshold is found bit by bit. How many keys reach a trial costs one barrier, which adds up a predicate of
all threads (`barrier.red.popc`), instead of a reduction across warps; of four keys and more a thread, one
between the warps' sums and theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LANES = tl.constexpr(1024)  # threads of a program that calls `tally`: 32 warps


def _tally_asm(each: int) -> str:
    """Adds up `each` predicates of all threads of a program; every result is the sum."""
    lines = ["{", ".reg .pred p;", ".reg .b32 n, s;", "mov.b32 s, 0;"]
    for i in range(each):
        lines += [f"setp.ne.s32 p, ${each + i}, 0;", "barrier.red.popc.u32 n, 0, p;", "add.s32 s, s, n;"]
    return "\n".join([*lines, *[f"mov.b32 ${i}, s;" for i in range(each)], "}"])


def _sums_asm(each: int) -> str:
    """The same by way of the warps' sums in shared memory, one barrier however many; the last argument is
    the turn of a loop, for a turn may still read when the next one writes.
    """
    lines = ["{", ".shared .align 4 .b32 sums[64];", ".reg .b32 n, at, place;", f"mov.b32 n, ${each};"]
    lines += [f"add.s32 n, n, ${each + i};" for i in range(1, each)]
    return "\n".join(
        [
            *lines,
            "redux.sync.add.s32 n, n, -1;",
            "mov.b32 at, sums;",
            f"and.b32 place, ${2 * each}, 1;",
            "mad.lo.u32 at, place, 128, at;",
            "mov.u32 place, %tid.x;",
            "shr.u32 place, place, 5;",
            "mad.lo.u32 place, place, 4, at;",
            "st.shared.b32 [place], n;",
            "bar.sync 0;",
            "mov.u32 place, %laneid;",
            "mad.lo.u32 place, place, 4, at;",
            "ld.shared.b32 n, [place];",
            "redux.sync.add.s32 n, n, -1;",
            *[f"mov.b32 ${i}, n;" for i in range(each)],
            "}",
        ]
    )


_TALLY_1, _TALLY_2 = (tl.constexpr(_tally_asm(n)) for n in (1, 2))
_ARGS_1, _ARGS_2 = (tl.constexpr(",".join(["=r"] * n + ["r"] * n)) for n in (1, 2))
_SUMS_4, _SUMS_8 = (tl.constexpr(_sums_asm(n)) for n in (4, 8))
_SUM_ARGS_4, _SUM_ARGS_8 = (tl.constexpr(",".join(["=r"] * n + ["r"] * 2 * n)) for n in (4, 8))


@triton.jit
def one_each(key, scratch_ptr, ALIGNED: tl.constexpr):
    """key uint32 [1024], a thread one each, as `tally` needs it.

    Rows that are not ALIGNED to 16 bytes are loaded in a layout in which a thread's key is held by others
    too: from there it goes through scratch int32 [1024].
    """
    if not ALIGNED and not INTERPRETED:
        lane = tl.arange(0, LANES)
        tl.store(scratch_ptr + lane, key.to(tl.int32, bitcast=True))
        tl.debug_barrier()
        key = tl.load(scratch_ptr + lane).to(tl.uint32, bitcast=True)
        tl.debug_barrier()
    return key


def aligned(scores: torch.Tensor) -> bool:
    """Whether every row of scores [N, M] begins on 16 bytes, in a way that the compiler knows of."""
    return scores.stride(0) % 16 == 0 and scores.data_ptr() % 16 == 0


@triton.jit
def tally(flag, turn=0):
    """How many of `flag` [EACH·1024] are true, in its shape; a thread must hold EACH of them, none twice.

    In a loop turn counts up.
    """
    EACH: tl.constexpr = flag.shape[0] // LANES
    flag = flag.to(tl.int32)
    if INTERPRETED:
        n = tl.zeros([flag.shape[0]], tl.int32) + tl.sum(flag, axis=0)
    elif EACH == 1:
        n = tl.inline_asm_elementwise(_TALLY_1, _ARGS_1, [flag], dtype=tl.int32, is_pure=False, pack=1)
    elif EACH == 2:
        n = tl.inline_asm_elementwise(_TALLY_2, _ARGS_2, [flag], dtype=tl.int32, is_pure=False, pack=2)
    elif EACH == 4:
        turns = tl.zeros(flag.shape, tl.int32) + turn
        n = tl.inline_asm_elementwise(
            _SUMS_4, _SUM_ARGS_4, [flag, turns], dtype=tl.int32, is_pure=False, pack=4
        )
    else:
        tl.static_assert(EACH == 8)
        turns = tl.zeros(flag.shape, tl.int32) + turn
        n = tl.inline_asm_elementwise(
            _SUMS_8, _SUM_ARGS_8, [flag, turns], dtype=tl.int32, is_pure=False, pack=8
        )
    return n


@triton.jit
def ordered(x):
    """uint32 that orders as the fp32 scores do; -inf (never chosen) becomes 0, and both zeros are equal."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(x == float("-inf"), 0, key.to(tl.uint32, bitcast=True))


@triton.jit
def newest_block(visible_ptr, row, divisor, MODE: tl.constexpr):
    """MODE 1: the block that holds the row's newest visible position, -1 for none; MODE 0: -1."""
    if MODE == 1:
        visible = tl.load(visible_ptr + row).to(tl.int32)
        newest = tl.where(visible > 0, (visible - 1) // divisor, -1)
    else:
        newest = -1
    return newest


@triton.jit
def load_keys(row_ptr, newest, place, count, MODE: tl.constexpr):
    """Keys at `place`; MODE 1: the newest block beats everything."""
    x = tl.load(row_ptr + place, mask=place < count, other=float("-inf")).to(tl.float32)
    key = ordered(x)
    if MODE == 1:
        key = tl.where((place == newest) & (place < count), 4294967295, key).to(tl.uint32)
    return key


@triton.jit
def kth(key, k, BITS: tl.constexpr):
    """The greatest t of BITS upper bits that k of key [EACH·1024] reach, in key's shape; 0 without k."""
    t = tl.zeros([key.shape[0]], tl.uint32)
    bit = tl.full([key.shape[0]], 2147483648, tl.uint32)
    for turn in range(BITS):
        trial = t | bit
        t = tl.where(tally(key >= trial, turn) >= k, trial, t)
        bit = bit >> 1
    return t


@triton.jit
def decide(key, place, found, out_ptr, k):
    """Writes the places of the k greatest of key [EACH·1024], in their order, then -1; ties to the earlier.

    `found` of the keys are not 0; those that are 0 are never chosen.
    """
    t = kth(key, k, 32)
    above = (key > t) & (key > 0)
    equal = (key == t) & (key > 0)
    spare = k - tally(above)
    reach = tl.cumsum((equal.to(tl.int32) << 16) | above.to(tl.int32), axis=0)
    tied = (reach >> 16) - equal.to(tl.int32)  # how many equal ones come before
    at = (reach & 65535) - above.to(tl.int32) + tl.minimum(tied, spare)
    tl.store(out_ptr + at, place, mask=above | (equal & (tied < spare)))
    lane = tl.arange(0, key.shape[0])
    tl.store(out_ptr + lane, -1, mask=(lane >= found) & (lane < k))


@triton.jit
def _count_row(row_ptr, newest, count, low, B: tl.constexpr, MODE: tl.constexpr):
    """How many keys of a whole row are >= low."""
    reach = tl.zeros([B], tl.int32)
    for start in range(0, count, B):
        key = load_keys(row_ptr, newest, start + tl.arange(0, B), count, MODE)
        reach += (key >= low).to(tl.int32)
    return tl.sum(reach, axis=0)


@triton.jit
def search(row_ptr, newest, count, out_ptr, k, B: tl.constexpr, MODE: tl.constexpr):
    """The same of a whole row, of any length and k, read once a bit: slow, where nothing else serves."""
    t = tl.full([], 0, tl.uint32)
    bit = tl.full([], 2147483648, tl.uint32)
    for _ in range(32):
        t = tl.where(_count_row(row_ptr, newest, count, t | bit, B, MODE) >= k, t | bit, t)
        bit = bit >> 1
    spare = k - _count_row(row_ptr, newest, count, tl.minimum(t, 4294967294) + 1, B, MODE)
    written = 0
    ties = 0
    for start in range(0, count, B):
        place = start + tl.arange(0, B)
        key = load_keys(row_ptr, newest, place, count, MODE)
        equal = (key == t) & (key > 0)
        chosen = ((key > t) & (key > 0)) | (equal & (ties + tl.cumsum(equal.to(tl.int32), axis=0) <= spare))
        at = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(out_ptr + at, place, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), axis=0)
        ties += tl.sum(equal.to(tl.int32), axis=0)
    for start in range(written, k, B):
        slot = start + tl.arange(0, B)
        tl.store(out_ptr + slot, -1, mask=slot < k)
