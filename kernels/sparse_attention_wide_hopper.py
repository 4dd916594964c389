# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention of many queries on Hopper, on keys that were expanded once: 64 heads of 512 (spec §3).

Keys are rows of fp16 times 2^-7. A program stays on its multiprocessor and takes query after query. Four warps
fetch: a query's q and then its keys, 64 rows at a time, go through a ring of three shared tiles, and the next
query's follow before the present one is done. Two trades of four warps have half of the channels each, of q in
registers, of scores, and of the output: they add each other's scores through shared memory, both take the whole
softmax, and p goes from registers to the product with their half of the keys.
"""

from __future__ import annotations

import torch
from cedar.kernels.sparse_attention_join_hopper import bf16_words
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
WEIGH_REGISTERS, FETCH_REGISTERS = 240, 24
SCALE = gl.constexpr(512**-0.5 * 1.4426950408889634 * 128.0)  # keys are times 2^-7

_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_LEFT_Q = gl.constexpr(gl.DotOperandLayout(0, _SCORE, 2))
_LEFT_P = gl.constexpr(gl.DotOperandLayout(0, _ACC, 2))
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
# Scores as each thread has them, four at a time.
_SWAP = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16],
        ]
    )
)  # fmt: skip
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

# Barriers: a place of the ring is ready, and free again; a trade's scores are there, and read.
_READY, _FREE, _SENT, _READ = gl.constexpr(0), gl.constexpr(3), gl.constexpr(6), gl.constexpr(8)
BARRIERS = gl.constexpr(10)

# Two bf16 channels as fp16.
_PLAIN = gl.constexpr("""{
.reg .b32 e, o;
.reg .f32 x, y;
shl.b32 e, $1, 16;
and.b32 o, $1, 0xFFFF0000;
mov.b32 x, e;
mov.b32 y, o;
cvt.rn.f16x2.f32 $0, y, x;
}""")


@gluon.jit
def _fetch_rows(base, rows, present, tile):
    """Starts copies of rows of 512 channels into a tile; zeros where none is present."""
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY))
    source = base + rows.to(gl.int64)[:, None] * 512 + channel[None, :]
    async_copy.async_copy_global_to_shared(tile, source, mask=present[:, None])


@gluon.jit
def _count(entries_ptr, token, tokens, entry_count, NAMES: gl.constexpr):
    """Entries of a query, one a lane, -1 where there are none."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, NAMES, layout=line)
    there = (lane < entry_count) & (token < tokens)
    entry = gl.load(entries_ptr + token * entry_count + lane, mask=there, other=-1)
    return gl.where(entry >= 0, lane + 1, 0)


@gluon.jit
def _fetch(
    q_ptr, cos_ptr, sin_ptr, wide_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
    tokens, sequences, entry_rows, window_count, entry_count, row_count,
    tiles, notes, turns, bars,
    TILES: gl.constexpr, NAMES: gl.constexpr, NEAR: gl.constexpr, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """Fills the ring: q, and with it how many tiles follow; then the window's tiles and those of entries."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY))
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    word = gl.arange(0, 64, layout=line)
    begin = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if TILES > 0:
        ahead = _count(entries_ptr, first.to(gl.int64), tokens, entry_count, NAMES)
    for n in range(first, tokens, step):
        token = n.to(gl.int64)
        count = NEAR
        sequence = 0
        if TILES > 0:
            count = NEAR + (gl.max(ahead, axis=0) + 63) // 64
            ahead = _count(entries_ptr, token + step, tokens, entry_count, NAMES)
            sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token).to(gl.int32), 0), sequences - 1)
        if HALF_ROPE > 0:
            pair = word % 32 - (32 - HALF_ROPE)
            cos = gl.load(cos_ptr + token * HALF_ROPE + pair, mask=pair >= 0, other=1.0)
            sin = gl.load(sin_ptr + token * HALF_ROPE + pair, mask=pair >= 0, other=0.0)
            angle = gl.where(word < 32, cos, sin)
        slot = begin % SLOTS
        mbarrier.wait(bars.index(_FREE + slot), ((begin // SLOTS) & 1) ^ 1)
        if HALF_ROPE > 0:
            turns.index(((n - first) // step) & 3).store(angle)
        notes.index(slot).store((gl.full([64], 0, gl.int32, line) + count).to(gl.float32, bitcast=True))
        mbarrier.arrive(bars.index(_READY + slot), count=1)
        _fetch_rows(q_ptr.to(gl.pointer_type(gl.float16)) + token * 32768, row, row >= 0, tiles.index(slot))
        async_copy.mbarrier_arrive(bars.index(_READY + slot), increment_count=False)
        for t in range(count):
            item = begin + 1 + t
            place = item % SLOTS
            if t < NEAR:
                at = t * 64 + row
                number = gl.load(rows_ptr + token * row_count + at, mask=at < row_count, other=-1)
                number = gl.minimum(number, window_count - 1).to(gl.int32)
                base = window_ptr
            else:
                at = (t - NEAR) * 64 + row
                number = gl.load(entries_ptr + token * entry_count + at, mask=at < entry_count, other=-1)
                number = number.to(gl.int32)  # rows of any type stand here in a layer without entries
                number = gl.where(number >= 0, sequence * entry_rows + gl.minimum(number, entry_rows - 1), -1)
                base = wide_ptr
            mbarrier.wait(bars.index(_FREE + place), ((item // SLOTS) & 1) ^ 1)
            notes.index(place).store(gl.where(number >= 0, 0.0, float("-inf")))
            mbarrier.arrive(bars.index(_READY + place), count=1)
            _fetch_rows(base, number, number >= 0, tiles.index(place))
            async_copy.mbarrier_arrive(bars.index(_READY + place), increment_count=False)
        begin = begin + 1 + count


@gluon.jit
def _angles(turns, layout: gl.constexpr):
    """cos and sin [1, 32] of the last 32 pairs of channels."""
    cos = turns.slice(0, 32).load(gl.SliceLayout(0, layout))
    sin = turns.slice(32, 32).load(gl.SliceLayout(0, layout))
    return cos[None, :], sin[None, :]


@gluon.jit
def _unpack(words):
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pack_half(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _registers(tile, COLUMN: gl.constexpr, WIDTH: gl.constexpr):
    """Channels of q as fp16 in registers."""
    q = tile._reinterpret(gl.bfloat16, [64, 512], _SHARED).slice(COLUMN, WIDTH, dim=1).load(_LEFT_Q)
    return gl.inline_asm_elementwise(_PLAIN, "=r,r", [q], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _query(tile, held, turns, HALF: gl.constexpr, HALF_ROPE: gl.constexpr):
    """This trade's 256 channels of q as fp16: 192 in registers, the last 64, turned, in shared memory."""
    words = tile._reinterpret(gl.int32, [64, 256], _SHARED_WORDS).slice(128 * HALF + 96, 32, dim=1)
    even, odd = _unpack(words.load(_QUERY))
    if HALF == 1 and HALF_ROPE > 0:
        cos, sin = _angles(turns, _QUERY)
        even, odd = _unpack(bf16_words(even * cos - odd * sin, even * sin + odd * cos))
    held._reinterpret(gl.int32, [64, 32], _SHARED_WORDS).store(_pack_half(even, odd))
    fence_async_shared()
    return _registers(tile, 256 * HALF, 128), _registers(tile, 256 * HALF + 128, 64)


@gluon.jit
def _score(q, r, held, keys):
    """Scores [64, 32] of a trade's channels, on their way: three products."""
    s = gl.full([64, 32], 0.0, gl.float32, _SCORE)
    s = warpgroup_mma(held, keys.slice(192, 64, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q, keys.slice(0, 128, dim=1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(r, keys.slice(128, 64, dim=1).permute((1, 0)), s, is_async=True)


@gluon.jit
def _swap(s, mine, other, bars, round, HALF: gl.constexpr):
    """s and the other trade's: both add the same two numbers."""
    mbarrier.wait(bars.index(_READ + 1 - HALF), (round & 1) ^ 1)
    mine.store(s)
    mbarrier.arrive(bars.index(_SENT + HALF), count=1)
    mbarrier.wait(bars.index(_SENT + 1 - HALF), round & 1)
    s = s + other.load(_SCORE)
    mbarrier.arrive(bars.index(_READ + HALF), count=1)
    return s


@gluon.jit
def _in_two(x):
    """The left and right halves of a trade's columns."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [64, 2, WIDTH]), (0, 2, 1)))


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
    sink_ptr, out_ptr, tokens, tiles, notes, turns, held, mine, other, bars,
    HALF: gl.constexpr, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and output of half of the channels."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    begin = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for n in range(first, tokens, step):
        slot = begin % SLOTS
        turn = turns.index(((n - first) // step) & 3)
        mbarrier.wait(bars.index(_READY + slot), (begin // SLOTS) & 1)
        count = gl.max(notes.index(slot).slice(0, 32).load(line).to(gl.int32, bitcast=True), axis=0)
        q, r = _query(tiles.index(slot), held, turn, HALF, HALF_ROPE)
        mbarrier.arrive(bars.index(_FREE + slot), count=1)
        o = gl.full([64, 256], 0.0, gl.float32, _ACC)
        top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, _SCORE))
        for t in range(count):
            item = begin + 1 + t
            place = item % SLOTS
            mbarrier.wait(bars.index(_READY + place), (item // SLOTS) & 1)
            fence_async_shared()
            keys = tiles.index(place).slice(256 * HALF, 256, dim=1)
            s = _score(q, r, held, keys.slice(0, 32, dim=0))
            z = _score(q, r, held, keys.slice(32, 32, dim=0))
            s = warpgroup_mma_wait(3, deps=[s])
            s = _swap(s, mine, other, bars, 0, HALF)
            z = warpgroup_mma_wait(0, deps=[z])
            z = _swap(z, mine, other, bars, 1, HALF)
            note = notes.index(place)
            s = s + note.slice(0, 32).load(gl.SliceLayout(0, _SCORE))[None, :]
            z = z + note.slice(32, 32).load(gl.SliceLayout(0, _SCORE))[None, :]
            new_top = gl.maximum(top, gl.max(gl.maximum(s, z), axis=1) * SCALE)
            s = gl.exp2(s * SCALE - new_top[:, None])
            z = gl.exp2(z * SCALE - new_top[:, None])
            shrink = gl.exp2(top - new_top)
            top = new_top
            total = total * shrink + gl.sum(s + z, axis=1)
            s = gl.convert_layout(s.to(gl.float16), _LEFT_P, assert_trivial=True)
            z = gl.convert_layout(z.to(gl.float16), _LEFT_P, assert_trivial=True)
            shrink = gl.convert_layout(shrink, gl.SliceLayout(1, _ACC), assert_trivial=True)
            o = warpgroup_mma(s, keys.slice(0, 32, dim=0), o * shrink[:, None], is_async=True)
            o = warpgroup_mma(z, keys.slice(32, 32, dim=0), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(bars.index(_FREE + place), count=1)
        begin = begin + 1 + count
        sink = gl.load(sink_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE))) * 1.4426950408889634
        peak = gl.maximum(top, sink)
        factor = gl.exp2(top - peak) * 128.0 / (total * gl.exp2(top - peak) + gl.exp2(sink - peak))
        factor = gl.convert_layout(factor, gl.SliceLayout(1, _ACC), assert_trivial=True)
        o = o * factor[:, None]
        start = out_ptr.to(gl.pointer_type(gl.int32)) + n.to(gl.int64) * 16384
        left, right = _in_two(o)
        a, b = _in_two(left)
        _write_block(a, start, turn, 256 * HALF, HALF_ROPE)
        _write_block(b, start, turn, 256 * HALF + 64, HALF_ROPE)
        a, b = _in_two(right)
        _write_block(a, start, turn, 256 * HALF + 128, HALF_ROPE)
        _write_block(b, start, turn, 256 * HALF + 192, HALF_ROPE)


@gluon.jit(do_not_specialize=["tokens", "sequences", "entry_rows", "window_count"])
def attend_expanded(
    q_ptr, cos_ptr, sin_ptr, wide_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr,
    tokens, sequences, entry_rows, window_count, entry_count, row_count,
    TILES: gl.constexpr, NAMES: gl.constexpr, NEAR: gl.constexpr, HALF_ROPE: gl.constexpr,
    WEIGH_REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs). TILES of entries and NEAR of window rows, 64 each, at most; NAMES: entries, rounded up
    to a power of two.
    """
    tiles = gl.allocate_shared_memory(gl.float16, [SLOTS, 64, 512], _SHARED)
    held = gl.allocate_shared_memory(gl.float16, [2, 64, 64], _SHARED)
    left = gl.allocate_shared_memory(gl.float32, [64, 32], _SWAP)
    right = gl.allocate_shared_memory(gl.float32, [64, 32], _SWAP)
    notes = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], _FLAT)
    turns = gl.allocate_shared_memory(gl.float32, [4, 64], _FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(b), count=129 if b < _FREE else 2 if b < _SENT else 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_weigh, (
                sink_ptr, out_ptr, tokens, tiles, notes, turns, held.index(0), left, right, bars, 0, HALF_ROPE,
            )),
            (_weigh, (
                sink_ptr, out_ptr, tokens, tiles, notes, turns, held.index(1), right, left, bars, 1, HALF_ROPE,
            )),
            (_fetch, (
                q_ptr, cos_ptr, sin_ptr, wide_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
                tokens, sequences, entry_rows, window_count, entry_count, row_count,
                tiles, notes, turns, bars, TILES, NAMES, NEAR, HALF_ROPE,
            )),
        ],
        [4, 4], [WEIGH_REGISTERS, FETCH_REGISTERS],
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
    """Writes and returns out bf16 [N, 64, 512], of q before its RoPE, o after the inverse."""
    tokens = q.shape[0]
    if tokens == 0:
        return out
    count = 0 if entries is None or entries_wide is None or seq is None else entries.shape[1]
    if entries_wide is not None and not entries_wide.numel():
        count = 0
    tiles = -(-count // 64)
    near = -(-window_rows.shape[1] // 64)
    if not count or entries_wide is None or seq is None or entries is None:
        sequences, rows, wide, seq, entries = 1, 1, window_wide, window_rows, window_rows
    else:
        sequences, rows, wide = *entries_wide.shape[:2], entries_wide
    half_rope = 0 if cos is None else cos.shape[1]
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    attend_expanded[(min(tokens, programs),)](
        q, sink if cos is None else cos, sink if sin is None else sin, wide, seq, entries,
        window_wide, window_rows, sink, out,
        tokens, sequences, rows, window_wide.shape[0], count, window_rows.shape[1],
        tiles, max(128, 1 << (count - 1).bit_length()) if count else 128, near, half_rope,
        WEIGH_REGISTERS, FETCH_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out
