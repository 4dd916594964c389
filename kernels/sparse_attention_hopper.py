# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention for Hopper's matrix units, 64 heads of 512: FP4 rows become fp16 tiles while wgmma runs.

One program holds one query's 64 heads. Keys come in tiles of 64, expanded into one of two shared tiles
(even and odd
channels apart). In one turn: softmax of the tile's scores; p·k of this tile and q·k of the next, which run
while the tile
after that is expanded from raw bytes that were copied a turn ahead. The code is kept small, for at these
batch sizes a
multiprocessor runs it once, out of a cold instruction cache.
fp16 holds every FP4 entry and every FP8 window key exactly once scaled by 2^-7, and p to 11 bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Eight packed channels and their scale (two fp16, value·2^7) to words of (0, 2), (4, 6), (1, 3), (5, 7),
# times 2^-7.
# A byte goes to the upper byte of a half word; E2M1's three magnitude bits land on fp16's bits 9 to 11:
# value·2^-14.
_FP4_ASM = gl.constexpr("""
{
.reg .b32 t0, t1, a0, a1, b0, b1, c;
prmt.b32 t0, $4, 0, 0x1404;
prmt.b32 t1, $4, 0, 0x3424;
shr.b32 a0, t0, 3;
shr.b32 a1, t1, 3;
and.b32 a0, a0, 0x0E000E00;
and.b32 a1, a1, 0x0E000E00;
lop3.b32 a0, t0, 0x80008000, a0, 0xEA;
lop3.b32 a1, t1, 0x80008000, a1, 0xEA;
mul.rn.f16x2 $2, a0, $5;
mul.rn.f16x2 $3, a1, $5;
shl.b32 b0, t0, 1;
shl.b32 b1, t1, 1;
and.b32 b0, b0, 0x0E000E00;
and.b32 b1, b1, 0x0E000E00;
shl.b32 c, t0, 4;
lop3.b32 b0, c, 0x80008000, b0, 0xEA;
shl.b32 c, t1, 4;
lop3.b32 b1, c, 0x80008000, b1, 0xEA;
mul.rn.f16x2 $0, b0, $5;
mul.rn.f16x2 $1, b1, $5;
}
""")

# Four E4M3 channels and their scale (two fp16, value·2) to words of (0, 2) and (1, 3), times 2^-7 (the
# bits alone: 2^-8).
_FP8_ASM = gl.constexpr("""
{
.reg .b32 a, b, c;
shl.b32 a, $2, 7;
and.b32 a, a, 0x3F803F80;
shl.b32 c, $2, 8;
lop3.b32 a, c, 0x80008000, a, 0xEA;
mul.rn.f16x2 $0, a, $3;
shr.b32 b, $2, 1;
and.b32 b, b, 0x3F803F80;
lop3.b32 b, $2, 0x80008000, b, 0xEA;
mul.rn.f16x2 $1, b, $3;
}
""")

_TILE = gl.constexpr(
    gl.BlockedLayout([8, 2], [1, 32], [8, 1], [1, 0])
)  # words [64, 64]: a warp holds whole rows
_TILE3 = gl.constexpr(
    gl.BlockedLayout([8, 1, 2], [1, 32, 1], [8, 1, 1], [2, 1, 0])
)  # the same as [64, 32, 2]
_WIDE = gl.constexpr(gl.BlockedLayout([8, 4], [1, 32], [8, 1], [1, 0]))  # words [64, 128]
_WIDE3 = gl.constexpr(
    gl.BlockedLayout([8, 1, 4], [1, 32, 1], [8, 1, 1], [2, 1, 0])
)  # the same as [64, 32, 4]
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # words [64, 64], 16 bytes a thread
_COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [8, 1], [1, 0]))  # words [64, 8]
_SHARED_RAW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_QUERY = gl.constexpr(gl.BlockedLayout([8, 8], [1, 32], [8, 1], [1, 0]))  # [64, 256]
_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [64, 64]
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))  # [64, 256]
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # the same bytes as words


@gluon.jit
def _start_copy(
    pages, here, raw, raw_scales,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Starts copying the raw bytes of 64 entries, named by page·ROWS + row (negative: none), into shared
    memory.
    """
    words = pages.to(gl.pointer_type(gl.int32))
    flat = gl.maximum(here.load(gl.SliceLayout(1, _COPY)), 0).to(gl.uint32)
    start = (flat // ROWS).to(gl.int64) * (PAGE // 4) + PAYLOAD // 4 + ((flat % ROWS) * 64).to(gl.int64)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    async_copy.async_copy_global_to_shared(raw, words + start[:, None] + columns[None, :])
    flat = gl.maximum(here.load(gl.SliceLayout(1, _COPY_SCALES)), 0).to(gl.uint32)
    start = (flat // ROWS).to(gl.int64) * (PAGE // 4) + SCALES // 4 + ((flat % ROWS) * 8).to(gl.int64)
    columns = gl.arange(0, 8, layout=gl.SliceLayout(0, _COPY_SCALES))
    async_copy.async_copy_global_to_shared(raw_scales, words + start[:, None] + columns[None, :])
    async_copy.commit_group()


@gluon.jit
def _take_copy(here, raw, raw_scales):
    """The copied bytes: payload words [64, 64], scale bytes [64, 32], scale 0 where there is no entry."""
    async_copy.wait_group(0)
    named = here.load(gl.SliceLayout(1, gl.SliceLayout(2, _TILE3)))
    scales = raw_scales._reinterpret(gl.uint8, [64, 32], _SHARED_RAW).load(gl.SliceLayout(2, _TILE3))
    return raw.load(_TILE), gl.where(named[:, None] >= 0, scales, 0)


@gluon.jit
def _expand_entries(payload, scales, even, odd):
    """Writes raw entries as fp16·2^-7 into the shared tiles (words) of even and of odd channels."""
    bits = scales.to(gl.int32) * 0x00800080  # E4M3's bits as two fp16: value·2^-8
    power = gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x78007800], dtype=gl.int32, is_pure=True, pack=1
    )
    wide = power[:, :, None] + gl.full([64, 32, 2], 0, gl.int32, _TILE3)
    scale = gl.convert_layout(gl.reshape(wide, [64, 64]), _TILE, assert_trivial=True)
    e0, e1, o0, o1 = gl.inline_asm_elementwise(
        _FP4_ASM, "=r,=r,=r,=r,r,r", [payload, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    even.store(gl.reshape(gl.join(e0, e1), [64, 128]))
    odd.store(gl.reshape(gl.join(o0, o1), [64, 128]))


@gluon.jit
def _load_window(window, flat_tile):
    """Raw bytes of 64 window rows: words of E4M3 [64, 128], scale bytes [64, 32] (each of 16, twice)."""
    flat = gl.maximum(flat_tile.load(gl.SliceLayout(1, _WIDE)), 0)
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, _WIDE))
    words = gl.load(
        window.to(gl.pointer_type(gl.int32)) + (flat.to(gl.int64) * 132)[:, None] + columns[None, :]
    )
    named = flat_tile.load(gl.SliceLayout(1, gl.SliceLayout(2, _WIDE3)))
    groups = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, _WIDE3))) // 2
    scales = gl.load(window + (gl.maximum(named, 0).to(gl.int64) * 528 + 512)[:, None] + groups[None, :])
    return words, gl.where(named[:, None] >= 0, scales, 0)


@gluon.jit
def _expand_window(words, scales, even, odd):
    """The same of window rows."""
    code = scales.to(gl.int32)
    normal = (gl.minimum(code, 141) - 111) << 10
    power = (
        gl.where(code >= 112, normal, gl.where(code >= 102, 1 << (gl.maximum(code, 102) - 102), 0))
        * 0x00010001
    )
    wide = power[:, :, None] + gl.full([64, 32, 4], 0, gl.int32, _WIDE3)
    scale = gl.convert_layout(gl.reshape(wide, [64, 128]), _WIDE, assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        _FP8_ASM, "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    even.store(low)
    odd.store(high)


@gluon.jit
def _half_tile(words):
    """A shared tile of words [64, 128] as the fp16 [64, 256] that wgmma reads."""
    return words._reinterpret(gl.float16, [64, 256], _SHARED)


@gluon.jit
def _scores(q_even, q_odd, even, odd):
    s = gl.full([64, 64], 0.0, gl.float32, _SCORE)
    s = warpgroup_mma(q_even, _half_tile(even).permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(q_odd, _half_tile(odd).permute((1, 0)), s, is_async=True)


@gluon.jit
def _softmax(s, flat_tile, top, total, scale):
    """One tile's p (fp16), the factor for what was summed before, and the new running maximum and sums."""
    present = flat_tile.load(gl.SliceLayout(0, _SCORE)) >= 0
    s = gl.where(present[None, :], s * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1))
    p = gl.exp2(s - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return p.to(gl.float16), shrink, new_top, total * shrink[:, None] + p


@gluon.jit
def _shrink(x, shrink):
    return x * gl.convert_layout(shrink, gl.SliceLayout(1, _ACC), assert_trivial=True)[:, None]


@gluon.jit
def _pack(even, odd):
    """Words of two bf16, even in the lower half, nearest even."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _turn(words, cos, sin):
    """Rotates pairs of bf16 (words) by (cos, sin)."""
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    return _pack(even * cos - odd * sin, even * sin + odd * cos)


@gluon.jit
def attend_hopper(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr, part_ptr, lse_ptr, page_count, sequences, table_width, window_count, entry_count, row_count,
    scale,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Grid (tokens, SPLITS): TILES of 64 entries are shared out over the splits; the first takes the
    window's two too.
    """
    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)

    # Which rows the tiles read: page·ROWS + row for entries, the window row for window keys, -1 for none.
    name_layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    shared_names: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    name_space = gl.allocate_shared_memory(gl.int32, [NAMES], shared_names)
    names = name_space._reinterpret(gl.int32, [NAMES // 64, 64], shared_names)
    lane = gl.arange(0, NAMES, layout=name_layout)
    row = gl.load(rows_ptr + token * row_count + lane, mask=lane < row_count, other=-1)
    name = gl.minimum(row, window_count - 1).to(gl.int32)
    last = 0
    if TILES > 0:
        sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
        where = lane - 128
        entry = gl.load(
            entries_ptr + token * entry_count + where, mask=(where >= 0) & (where < entry_count), other=-1
        )
        column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column, mask=entry >= 0, other=0).to(gl.int32)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1)
        name = gl.where(entry >= 0, page * ROWS + entry % ROWS, name)
        last = gl.max(gl.where(entry >= 0, where + 1, 0), axis=0)
    name_space.store(name)

    # q: pairs of bf16 (even, odd) as words, rotated, into two shared tiles.
    q_even = gl.allocate_shared_memory(gl.float16, [64, 256], _SHARED)
    q_odd = gl.allocate_shared_memory(gl.float16, [64, 256], _SHARED)
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, _QUERY))
    pairs = gl.arange(0, 256, layout=gl.SliceLayout(0, _QUERY))
    words = gl.load(
        q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384 + heads[:, None] * 256 + pairs[None, :]
    )
    if HALF_ROPE > 0:
        turn = pairs - (256 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)
        words = _turn(words, cos[None, :], sin[None, :])
    q_even.store((words << 16).to(gl.float32, bitcast=True).to(gl.float16))
    q_odd.store((words & -65536).to(gl.float32, bitcast=True).to(gl.float16))

    k_even = gl.allocate_shared_memory(gl.int32, [2, 64, 128], _SHARED_WORDS)
    k_odd = gl.allocate_shared_memory(gl.int32, [2, 64, 128], _SHARED_WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [64, 64], _SHARED)
    o_even = gl.full([64, 256], 0.0, gl.float32, _ACC)
    o_odd = gl.full([64, 256], 0.0, gl.float32, _ACC)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
    total = gl.full([64, 64], 0.0, gl.float32, _SCORE)

    # This split's tiles: names[base : base + count]. The first split has the window's two, then its share
    # of entries.
    used = (last + 63) // 64
    if SPLITS == 1:
        base = 0
        count = 2 + used
    else:
        share: gl.constexpr = (TILES + 2 + SPLITS - 1) // SPLITS
        beside: gl.constexpr = share - 2 if share > 2 else 0
        each: gl.constexpr = (TILES - beside + SPLITS - 2) // (SPLITS - 1)
        base = gl.where(split == 0, 0, 2 + beside + (split - 1) * each)
        count = gl.maximum(gl.minimum(gl.where(split == 0, 2 + beside, each), 2 + used - base), 0)

    raw = gl.allocate_shared_memory(gl.int32, [64, 64], _SHARED_RAW)
    raw_scales = gl.allocate_shared_memory(gl.int32, [64, 8], _SHARED_RAW)
    if split == 0:
        if TILES > 0:
            _start_copy(pages_ptr, names.index(2), raw, raw_scales, ROWS, PAGE, PAYLOAD, SCALES)
        near, near_scale = _load_window(window_ptr, names.index(0))
        far, far_scale = _load_window(window_ptr, names.index(1))
        _expand_window(near, near_scale, k_even.index(0), k_odd.index(0))
        _expand_window(far, far_scale, k_even.index(1), k_odd.index(1))
    else:
        for t in range(gl.minimum(count, 2)):
            _start_copy(pages_ptr, names.index(base + t), raw, raw_scales, ROWS, PAGE, PAYLOAD, SCALES)
            payload, scales = _take_copy(names.index(base + t), raw, raw_scales)
            _expand_entries(payload, scales, k_even.index(t), k_odd.index(t))
        if count > 2:
            _start_copy(pages_ptr, names.index(base + 2), raw, raw_scales, ROWS, PAGE, PAYLOAD, SCALES)
    if count > 0:
        fence_async_shared()
        s = warpgroup_mma_wait(0, deps=[_scores(q_even, q_odd, k_even.index(0), k_odd.index(0))])
        for t in range(count - 1):
            here = t & 1
            p, shrink, top, total = _softmax(s, names.index(base + t), top, total, scale)
            p_shared.store(p)
            fence_async_shared()
            acc_even = warpgroup_mma(
                p_shared, _half_tile(k_even.index(here)), _shrink(o_even, shrink), is_async=True
            )
            acc_odd = warpgroup_mma(
                p_shared, _half_tile(k_odd.index(here)), _shrink(o_odd, shrink), is_async=True
            )
            coming = _scores(q_even, q_odd, k_even.index(1 - here), k_odd.index(1 - here))
            o_even, o_odd = warpgroup_mma_wait(2, deps=[acc_even, acc_odd])
            if t + 2 < count:
                payload, scales = _take_copy(names.index(base + t + 2), raw, raw_scales)
                _start_copy(
                    pages_ptr, names.index(base + gl.minimum(t + 3, count - 1)), raw, raw_scales,
                    ROWS, PAGE, PAYLOAD, SCALES,
                )  # fmt: skip
                _expand_entries(payload, scales, k_even.index(here), k_odd.index(here))
                fence_async_shared()
            s = warpgroup_mma_wait(0, deps=[coming])
        p, shrink, top, total = _softmax(s, names.index(base + count - 1), top, total, scale)
        p_shared.store(p)
        fence_async_shared()
        here = (count - 1) & 1
        o_even = warpgroup_mma(p_shared, _half_tile(k_even.index(here)), _shrink(o_even, shrink))
        o_odd = warpgroup_mma(p_shared, _half_tile(k_odd.index(here)), _shrink(o_odd, shrink))
    async_copy.wait_group(0)

    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
    pair = gl.arange(0, 256, layout=gl.SliceLayout(0, _ACC))
    denominator = gl.sum(total, axis=1)
    if SPLITS > 1:
        alive = denominator > 0
        factor = gl.where(alive, 128.0 / gl.where(alive, denominator, 1.0), 0.0)
        lse = gl.where(alive, top + gl.log2(gl.where(alive, denominator, 1.0)), float("-inf"))
        cell = (token * SPLITS + split) * 64
        gl.store(lse_ptr + cell + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE)), lse)
        target = part_ptr + cell * 512 + head[:, None] * 256 + pair[None, :]
        gl.store(target, _shrink(o_even, factor).to(gl.float16))
        gl.store(target + 64 * 256, _shrink(o_odd, factor).to(gl.float16))
    else:
        sink = gl.load(sink_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE))) * 1.4426950408889634
        peak = gl.maximum(top, sink)
        factor = gl.exp2(top - peak) * 128.0 / (denominator * gl.exp2(top - peak) + gl.exp2(sink - peak))
        even = _shrink(o_even, factor)
        odd = _shrink(o_odd, factor)
        if HALF_ROPE > 0:
            turn = pair - (256 - HALF_ROPE)
            cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
            sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
            words = _pack(even * cos + odd * sin, odd * cos - even * sin)
        else:
            words = _pack(even, odd)
        gl.store(
            out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384 + head[:, None] * 256 + pair[None, :], words
        )
