# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention of many queries on Hopper, on keys that were expanded once: 64 heads of 512 (spec §3).

Keys are rows of fp16 times 2^-7. A program stays on its multiprocessor and takes query after query; four
trades of four warps meet at mbarriers. One fetches: a query's q and then its keys, 64 rows at a time, go
through a ring of three shared tiles, and the next query's follow before the present one is done. One
multiplies a tile with q, most of which it has in registers, and takes the softmax. Two weigh: each multiplies
p with half of the keys' channels. They begin a tile only when the next tile's scores are done: then their
products run while the softmax is taken, and do not delay the scores that it waits for.
"""

from __future__ import annotations

import torch
from cedar.kernels.sparse_attention_join_hopper import bf16_words, channels_of, half_words
from cedar.kernels.sparse_attention_operands_hopper import PLAIN_WORDS
from cedar.kernels.sparse_attention_softmax_hopper import (
    any_above,
    barriers,
    halves_of,
    own_sum,
    set_flag,
    softmax_step,
)
from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SLOTS = gl.constexpr(3)
WEIGH_REGISTERS, FETCH_REGISTERS = 160, 32
SCALE = gl.constexpr(512**-0.5 * 1.4426950408889634 * 128.0)  # keys are times 2^-7

_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_LEFT_Q = gl.constexpr(gl.DotOperandLayout(0, _SCORE, 2))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Rows of a tile: eight lanes have 128 bytes of a row, a thread eight times that of four rows, whose places in
# the tile's swizzle differ by constants.
_COPY = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 64], [0, 128], [0, 256], [16, 0], [32, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[4, 0], [8, 0]],
        [],
        [64, 512],
    )
)
# Words [64, 32] of 64 channels of q.
_QUERY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
# Words [64, 32] of 64 channels of the output, two neighbours a thread.
_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [8, 0]],
        [[0, 4], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)

# Kinds of barriers: a place of the ring is ready, and free again; of p and its shrinking factors, two places:
# ready, free again, and to be used (the next scores are done).
_READY, _FREE, _P_READY, _P_FREE, _GO = (gl.constexpr(i) for i in range(5))
# The maximum that p refers to is raised only when a p would come to more than 2^8, which fp16 holds.
RAISE = gl.constexpr(8.0)


@gluon.jit
def _long(x):
    return x.to(gl.int64)


@gluon.jit
def _fetch_rows(base, rows, present, tile):
    """Starts copies of rows of 512 channels into a tile; zeros where none is present."""
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY))
    source = base + rows.to(gl.int64)[:, None] * 512 + channel[None, :]
    async_copy.async_copy_global_to_shared(tile, source, mask=present[:, None])


@gluon.jit
def _count(entries_ptr, token, tokens, entry_count, NAMES: gl.constexpr):
    """The place, from 1 on, of each of a query's entries, 0 where there is none; the greatest counts."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, NAMES, layout=line)
    there = (lane < entry_count) & (token < tokens)
    entry = gl.load(entries_ptr + token * entry_count + lane, mask=there, other=-1).to(gl.int32)
    return gl.where(entry >= 0, lane + 1, 0)


@gluon.jit
def _near(window_ptr, rows_ptr, token, at, window_count, row_count):
    """The window, and the rows of it that a query's numbers name; -1 for none."""
    number = gl.load(rows_ptr + token * row_count + at, mask=at < row_count, other=-1)
    return window_ptr, gl.maximum(gl.minimum(number, window_count - 1), -1).to(gl.int32)


@gluon.jit
def _far(wide_ptr, entries_ptr, token, at, sequence, entry_rows, entry_count):
    """The same of a sequence's entries."""
    number = gl.load(entries_ptr + token * entry_count + at, mask=at < entry_count, other=-1).to(gl.int32)
    return wide_ptr, gl.where(number >= 0, sequence * entry_rows + gl.minimum(number, entry_rows - 1), -1)


@gluon.jit
def _fetch(
    q_ptr, cos_ptr, sin_ptr, wide_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
    tokens, sequences, entry_rows, window_count, entry_count, row_count,
    tiles, notes, turns, bars,
    TILES: gl.constexpr, NAMES: gl.constexpr, NEAR: gl.constexpr, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """Fills the ring: q, and with it how many tiles follow; then the window's tiles and those of entries.

    Row numbers are read before a place is free, so that only the rows themselves are waited for.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY))
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    word = gl.arange(0, 64, layout=line)
    begin = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if TILES > 0:
        ahead = _count(entries_ptr, first.to(gl.int64), tokens, entry_count, NAMES)
    for n in range(first, tokens, step):
        token = _long(n)
        count = NEAR
        sequence = 0
        if TILES > 0:
            count = gl.maximum(NEAR + (gl.max(ahead, axis=0) + 63) // 64, 1)
            ahead = _count(entries_ptr, token + step, tokens, entry_count, NAMES)
            sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token).to(gl.int32), 0), sequences - 1)
        if HALF_ROPE > 0:
            pair = word % 32 - (32 - HALF_ROPE)
            cos = gl.load(cos_ptr + token * HALF_ROPE + pair, mask=pair >= 0, other=1.0)
            sin = gl.load(sin_ptr + token * HALF_ROPE + pair, mask=pair >= 0, other=0.0)
            angle = gl.where(word < 32, cos, sin)
        slot = begin % SLOTS
        mbarrier.wait(bars[_FREE].index(slot), ((begin // SLOTS) & 1) ^ 1)
        if HALF_ROPE > 0:
            turns.index(((n - first) // step) & 3).store(angle)
        notes.index(slot).store((gl.full([64], 0, gl.int32, line) + count).to(gl.float32, bitcast=True))
        mbarrier.arrive(bars[_READY].index(slot), count=1)
        _fetch_rows(q_ptr.to(gl.pointer_type(gl.float16)) + token * 32768, row, row >= 0, tiles.index(slot))
        async_copy.mbarrier_arrive(bars[_READY].index(slot), increment_count=False)
        for t in range(count):
            item = begin + 1 + t
            place = item % SLOTS
            if TILES == 0:
                base, number = _near(window_ptr, rows_ptr, token, t * 64 + row, window_count, row_count)
            elif NEAR == 0:
                base, number = _far(
                    wide_ptr, entries_ptr, token, t * 64 + row, sequence, entry_rows, entry_count
                )
            elif t < NEAR:
                base, number = _near(window_ptr, rows_ptr, token, t * 64 + row, window_count, row_count)
            else:
                base, number = _far(
                    wide_ptr, entries_ptr, token, (t - NEAR) * 64 + row, sequence, entry_rows, entry_count
                )
            mbarrier.wait(bars[_FREE].index(place), ((item // SLOTS) & 1) ^ 1)
            notes.index(place).store(gl.where(number >= 0, 0.0, float("-inf")))
            mbarrier.arrive(bars[_READY].index(place), count=1)
            _fetch_rows(base, number, number >= 0, tiles.index(place))
            async_copy.mbarrier_arrive(bars[_READY].index(place), increment_count=False)
        begin = begin + 1 + count


@gluon.jit
def _angles(turns, layout: gl.constexpr):
    """cos and sin [1, 32] of the last 32 pairs of channels."""
    cos = turns.slice(0, 32).load(gl.SliceLayout(0, layout))
    sin = turns.slice(32, 32).load(gl.SliceLayout(0, layout))
    return cos[None, :], sin[None, :]


@gluon.jit
def _registers(tile, COLUMN: gl.constexpr, WIDTH: gl.constexpr):
    """Channels of q as fp16 in registers."""
    q = tile._reinterpret(gl.bfloat16, [64, 512], _SHARED).slice(COLUMN, WIDTH, dim=1).load(_LEFT_Q)
    return gl.inline_asm_elementwise(PLAIN_WORDS, "=r,r", [q], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _hold(tile, held, turns, BLOCK: gl.constexpr, HALF_ROPE: gl.constexpr):
    """Puts a block of 64 channels of q into shared memory as fp16, the last one turned."""
    words = tile._reinterpret(gl.int32, [64, 256], _SHARED_WORDS).slice(192 + 32 * BLOCK, 32, dim=1)
    even, odd = channels_of(words.load(_QUERY))
    if BLOCK == 1 and HALF_ROPE > 0:
        cos, sin = _angles(turns, _QUERY)
        even, odd = channels_of(bf16_words(even * cos - odd * sin, even * sin + odd * cos))
    held.index(BLOCK)._reinterpret(gl.int32, [64, 32], _SHARED_WORDS).store(half_words(even, odd))


@gluon.jit
def _score(
    sink_ptr, tokens, tiles, notes, turns, held, shares, shrinks, counts, bars, HALF_ROPE: gl.constexpr
):
    """Scores and softmax: p of each tile, and by how much the sums so far shrink; at the end their factor.

    Each of these is a message to those who weigh; m and last number them, and two are under way at most.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    begin = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    set_flag(2)
    for n in range(first, tokens, step):
        slot = begin % SLOTS
        turn = (n - first) // step
        mbarrier.wait(bars[_READY].index(slot), (begin // SLOTS) & 1)
        tile = tiles.index(slot)
        count = gl.max(notes.index(slot).slice(0, 32).load(line).to(gl.int32, bitcast=True), axis=0)
        _hold(tile, held, turns.index(turn & 3), 0, HALF_ROPE)
        _hold(tile, held, turns.index(turn & 3), 1, HALF_ROPE)
        counts.index(turn & 1).store(gl.full([32], 0, gl.int32, line) + count)
        fence_async_shared()
        q = _registers(tile, 0, 256)
        r = _registers(tile, 256, 128)
        mbarrier.arrive(bars[_FREE].index(slot), count=2)
        top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
        total = own_sum(gl.full([64, 64], 0.0, gl.float32, _SCORE))
        for t in range(count):
            item = begin + 1 + t
            place = item % SLOTS
            m = begin + t
            mbarrier.wait(bars[_READY].index(place), (item // SLOTS) & 1)
            fence_async_shared()
            keys = tiles.index(place)
            s = gl.full([64, 64], 0.0, gl.float32, _SCORE)
            s = warpgroup_mma(q, keys.slice(0, 256, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(r, keys.slice(256, 128, dim=1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(held.index(0), keys.slice(384, 64, dim=1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(held.index(1), keys.slice(448, 64, dim=1).permute((1, 0)), s, is_async=True)
            note = notes.index(place).load(gl.SliceLayout(0, _SCORE))
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(bars[_GO].index((m + 1) & 1), count=1, pred=t > 0)  # the message before
            s = s + note[None, :]
            p, shrink, top, total = softmax_step(s, SCALE, top, total, RAISE, 2)
            p = gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
            )
            mbarrier.wait(bars[_P_FREE].index(m & 1), ((m >> 1) & 1) ^ 1)
            shares.index(m & 1).store(p)
            shrinks.index(m & 1).store(shrink)
            fence_async_shared()
            mbarrier.arrive(bars[_P_READY].index(m & 1), count=1)
        total = gl.convert_layout(gl.sum(total, axis=1), top.type.layout, assert_trivial=True)
        last = begin + count
        mbarrier.arrive(bars[_GO].index((last + 1) & 1), count=1)
        sink = gl.load(sink_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE))) * 1.4426950408889634
        peak = gl.maximum(top, sink)
        factor = gl.exp2(top - peak) * 128.0 / (total * gl.exp2(top - peak) + gl.exp2(sink - peak))
        mbarrier.wait(bars[_P_FREE].index(last & 1), ((last >> 1) & 1) ^ 1)
        shrinks.index(last & 1).store(factor)
        mbarrier.arrive(bars[_P_READY].index(last & 1), count=1)
        mbarrier.arrive(bars[_GO].index(last & 1), count=1)
        begin = begin + 1 + count


@gluon.jit
def _write_block(o, start, turns, COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr):
    """64 channels from COLUMN on, turned back and rounded."""
    even, odd = gl.split(gl.reshape(o, [64, 32, 2]))
    if COLUMN + 64 > 512 - 2 * HALF_ROPE:
        layout: gl.constexpr = even.type.layout
        cos, sin = _angles(turns, layout)
        words = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
    else:
        words = bf16_words(even, odd)
    words = gl.convert_layout(words, _OUT)  # neighbours of a row to one thread
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _OUT))
    pair = COLUMN // 2 + gl.arange(0, 32, layout=gl.SliceLayout(0, _OUT))
    gl.store(start + head[:, None] * 256 + pair[None, :], words)


@gluon.jit
def _weigh(
    out_ptr, tokens, tiles, turns, shares, shrinks, counts, bars, HALF: gl.constexpr, HALF_ROPE: gl.constexpr
):
    """Half of the output's channels. The first message of a query says how many follow."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    begin = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    set_flag(HALF)
    for n in range(first, tokens, step):
        turn = (n - first) // step
        mbarrier.wait(bars[_P_READY].index(begin & 1), (begin >> 1) & 1)
        count = gl.max(counts.index(turn & 1).load(line), axis=0)
        o = gl.full([64, 256], 0.0, gl.float32, _ACC)
        for t in range(count):
            place = (begin + 1 + t) % SLOTS
            m = begin + t
            mbarrier.wait(bars[_P_READY].index(m & 1), (m >> 1) & 1)
            shrink = shrinks.index(m & 1).load(gl.SliceLayout(1, _ACC))
            if any_above(1.0 - shrink, 0.0, HALF):
                o = o * shrink[:, None]
            mbarrier.wait(bars[_GO].index(m & 1), (m >> 1) & 1)
            values = tiles.index(place).slice(256 * HALF, 256, dim=1)
            o = warpgroup_mma(shares.index(m & 1), values, o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(bars[_FREE].index(place), count=1)
            mbarrier.arrive(bars[_P_FREE].index(m & 1), count=1)
        last = begin + count
        mbarrier.wait(bars[_P_READY].index(last & 1), (last >> 1) & 1)
        factor = shrinks.index(last & 1).load(gl.SliceLayout(1, _ACC))
        mbarrier.arrive(bars[_P_FREE].index(last & 1), count=1)
        begin = begin + 1 + count
        o = o * factor[:, None]
        start = out_ptr.to(gl.pointer_type(gl.int32)) + _long(n) * 16384
        angles = turns.index(turn & 3)
        left, right = halves_of(o)
        a, b = halves_of(left)
        _write_block(a, start, angles, 256 * HALF, HALF_ROPE)
        _write_block(b, start, angles, 256 * HALF + 64, HALF_ROPE)
        a, b = halves_of(right)
        _write_block(a, start, angles, 256 * HALF + 128, HALF_ROPE)
        _write_block(b, start, angles, 256 * HALF + 192, HALF_ROPE)


@gluon.jit(do_not_specialize=["tokens", "sequences", "entry_rows", "window_count"])
def attend_expanded(
    q_ptr, cos_ptr, sin_ptr, wide_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr,
    tokens, sequences, entry_rows, window_count, entry_count, row_count,
    TILES: gl.constexpr, NAMES: gl.constexpr, NEAR: gl.constexpr, HALF_ROPE: gl.constexpr,
    WEIGH_REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). TILES of entries and NEAR of window rows, 64 each, at most; NAMES: entries, rounded up
    to a power of two.

    Beside the ring: the channels of q that are not in registers, p, its shrinking factors, how many tiles a
    query has, a place's absent keys (0 or -inf; of q that number), and angles: a query's are read until its
    output is written, when the third after it may be under way, hence four.
    """
    tiles = gl.allocate_shared_memory(gl.float16, [SLOTS, 64, 512], _SHARED)
    held = gl.allocate_shared_memory(gl.float16, [2, 64, 64], _SHARED)
    shares = gl.allocate_shared_memory(gl.float16, [2, 64, 64], _SHARED)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], _FLAT)
    counts = gl.allocate_shared_memory(gl.int32, [2, 32], _FLAT)
    notes = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], _FLAT)
    turns = gl.allocate_shared_memory(gl.float32, [4, 64], _FLAT)
    bars = (
        barriers(SLOTS, 129),  # every thread that fetches, and one more for the notes
        barriers(SLOTS, 2), barriers(2, 1), barriers(2, 2), barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score, (
                sink_ptr, tokens, tiles, notes, turns, held, shares, shrinks, counts, bars, HALF_ROPE,
            )),
            (_weigh, (out_ptr, tokens, tiles, turns, shares, shrinks, counts, bars, 0, HALF_ROPE)),
            (_weigh, (out_ptr, tokens, tiles, turns, shares, shrinks, counts, bars, 1, HALF_ROPE)),
            (_fetch, (
                q_ptr, cos_ptr, sin_ptr, wide_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
                tokens, sequences, entry_rows, window_count, entry_count, row_count,
                tiles, notes, turns, bars, TILES, NAMES, NEAR, HALF_ROPE,
            )),
        ],
        [4, 4, 4], [WEIGH_REGISTERS, WEIGH_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


def attend_wide(
    q: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    entries_wide: torch.Tensor | None,
    seq: torch.Tensor | None,
    entries: torch.Tensor | None,
    window_wide: torch.Tensor,
    window_rows: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes and returns out bf16 [N, 64, 512]: o after the inverse of q's RoPE; zeros where there is no key.

    q bf16 [N, 64, 512] before its RoPE, by cos and sin fp32 [N, R / 2], R at most 64; entries_wide fp16
    [S, E, 512] and window_wide fp16 [M, 512], keys times 2^-7; entries [N, K] and window_rows [N, W] int32 or
    int64, -1 for none; seq [N] in S. Numbers outside what they index are clamped; rows that none names are
    not read.
    """
    tokens = q.shape[0]
    half_rope = 0 if cos is None else cos.shape[1]
    if q.shape[1:] != (64, 512) or half_rope > 32 or out.shape != q.shape:
        raise ValueError(f"q {q.shape}, out {out.shape}, R {2 * half_rope}: must be 64 heads of 512, R <= 64")
    for part in (q, cos, sin, entries_wide, seq, entries, window_wide, window_rows, sink, out):
        if part is not None and not part.is_contiguous():
            raise ValueError(f"a tensor {tuple(part.shape)} is not contiguous")
    if tokens == 0:
        return out
    near = -(-window_rows.shape[1] // 64) if window_wide.numel() else 0
    count, sequences, rows = 0, 1, 1
    wide, places, numbers = window_wide, window_rows, window_rows
    if entries_wide is not None and entries_wide.numel() and seq is not None and entries is not None:
        count, (sequences, rows) = entries.shape[1], entries_wide.shape[:2]
        wide, places, numbers = entries_wide, seq, entries
    if near + count == 0:
        return out.zero_()
    programs = min(tokens, torch.cuda.get_device_properties(q.device).multi_processor_count)
    attend_expanded[(programs,)](
        q, sink if cos is None else cos, sink if sin is None else sin, wide, places, numbers,
        window_wide, window_rows, sink, out,
        tokens, sequences, rows, window_wide.shape[0], count, window_rows.shape[1],
        -(-count // 64), max(128, next_power_of_2(count)), near, half_rope,
        WEIGH_REGISTERS, FETCH_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out
