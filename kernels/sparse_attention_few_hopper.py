# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention of heads of 128 channels in one launch, for Hopper (spec §3).

Time here is latency: a chain of loads (entry, page, row), cold instructions, meetings. So a query is shared
out over many small programs, 16 heads and 32 keys each, and nothing but sums passes through shared memory:

- Warp w of four holds a quarter of the channels. Thread (g, t) of its eight by four loads the bytes of keys
  g, g + 8, g + 16, g + 24 from channel 8·(4w + t) on. Expanded, they are the right operand of
  `mma.sync` for q·kᵀ as they lie (which channels meet in one step does not matter, if q's are loaded alike).
- q's heads g and g + 8 of the same channels are the left operand. What the warps' products lack, the other
  warps' channels, is added through shared memory; every warp does softmax for itself.
- Every warp leaves its expanded channels in shared memory and takes them back turned over (`ldmatrix`), which
  is the right operand of p·k. `movmatrix` would do without, and takes longer.

The programs of 16 heads then wait for each other at a counter; each joins the parts of some of the heads.
fp16 holds every FP4 entry and every FP8 window key exactly once scaled by 2^-7, and p to 11 bits.
"""

from __future__ import annotations

import triton
from cedar.kernels.cluster_hopper import area as area_of
from cedar.kernels.grid_hopper import (
    COUNTER_STEP,
    SINGLES,
    arrive,
    goal_of,
    grid_release,
    grid_wait,
    wait_for,
)
from cedar.kernels.sparse_attention_operands_hopper import (
    FOURS,
    FOURS_OF_FOUR,
    FOURS_OF_TWO,
    ONE,
    ONES,
    SIXTEENS,
    TWOS,
    TWOS_OF_EIGHT,
    along,
    angles,
    entry_block,
    entry_scale,
    numbers,
    same,
    shaped,
    stack,
    turned,
    window_block,
    window_scale,
    words_at,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
# $0-3 sums of eight keys; $4-7 their words; $8-11 q's of row g, $12-15 of row g + 8; $16-19 sums so far.
_SCORE = gl.constexpr(f"""{{
.reg .f32 a<4>;
{_MMA}{{a0,a1,a2,a3}}, {{$8,$12,$9,$13}}, {{$4,$5}}, {{$16,$17,$18,$19}};
{_MMA}{{$0,$1,$2,$3}}, {{$10,$14,$11,$15}}, {{$6,$7}}, {{a0,a1,a2,a3}};
}}""")
# $0-3 sums of two channels and two rows; $4-7 keys turned over, eight a word; $8-11 p of keys 0 to 15,
# $12-15 of 16 to 31.
_WEIGH = gl.constexpr(f"""{{
.reg .f32 a<4>, z;
mov.f32 z, 0f00000000;
{_MMA}{{a0,a1,a2,a3}}, {{$8,$9,$10,$11}}, {{$4,$5}}, {{z,z,z,z}};
{_MMA}{{$0,$1,$2,$3}}, {{$12,$13,$14,$15}}, {{$6,$7}}, {{a0,a1,a2,a3}};
}}""")
_PUT = gl.constexpr(
    "st.shared.v4.b32 [$4], {$8, $9, $10, $11};\n" + "".join(f"mov.b32 ${i}, 0;\n" for i in range(4))
)
_TAKE = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];")
# Over the four threads of a row.
_AMONG_FOUR = """{{
.reg .f32 t;
shfl.sync.bfly.b32 t, $1, 1, 31, -1;
{0}.f32 t, t, $1;
shfl.sync.bfly.b32 $0, t, 2, 31, -1;
{0}.f32 $0, $0, t;
}}"""
_MAX_OF_FOUR, _SUM_OF_FOUR = gl.constexpr(_AMONG_FOUR.format("max")), gl.constexpr(_AMONG_FOUR.format("add"))
_PRESENT = gl.constexpr("{\n.reg .pred p;\nsetp.ge.s32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, -1;\n}")
_HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0]))
_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))


@gluon.jit
def _score(keys, q, q8, acc):
    """acc [4, 32, 4 tiles of keys, 2 rows × 2 keys] and the products of eight channels a thread."""
    return gl.inline_asm_elementwise(
        _SCORE, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [keys, along(q, 2, FOURS_OF_FOUR), along(q8, 2, FOURS_OF_FOUR), acc],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _offset(key, chunk):
    """Bytes to eight channels of a key in a warp's area: neither eight threads that store nor eight keys that
    are taken meet a bank twice.
    """
    return key * 64 + ((chunk ^ ((key >> 1) & 3)) << 4)


@gluon.jit
def _put(keys, space, g, t):
    """Leaves eight channels of four keys in the warp's area."""
    key = along(along(g, 2, FOURS) + 8 * numbers(4, FOURS), 3, FOURS_OF_FOUR)
    chunk = along(along(t, 2, FOURS), 3, FOURS_OF_FOUR)
    place = along(along(space, 2, FOURS), 3, FOURS_OF_FOUR) + _offset(key, chunk)
    gl.inline_asm_elementwise(
        _PUT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [place + keys * 0, keys], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def _take(space, lane):
    """Words [4, 32, 4 chunks of eight channels, 4 tiles of keys]: channel g of keys 2t and 2t + 1."""
    place = along(space, 2, FOURS) + _offset(along(lane, 2, FOURS), numbers(4, FOURS))
    a, b, c, d = gl.inline_asm_elementwise(
        _TAKE, "=r,=r,=r,=r,r", [place], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
    )
    return stack(a, b, c, d)


@gluon.jit
def _weigh(keys, p0, p1, inverse, at, at8, real, real8):
    """Writes p·k of four chunks of eight channels: row g at `at`, row g + 8 at `at8`. A thread's words, two
    channels of each chunk, become neighbours (`_join` turns that back).
    """
    acc = gl.inline_asm_elementwise(
        _WEIGH, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r",
        [keys, along(p0, 2, FOURS_OF_FOUR), along(p1, 2, FOURS_OF_FOUR)],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip
    low, high = gl.split(gl.reshape(acc, [4, 32, 4, 2, 2]))
    low = same(low, FOURS_OF_TWO) * along(inverse, 2, FOURS_OF_TWO)
    high = same(high, FOURS_OF_TWO) * along(inverse, 2, FOURS_OF_TWO)
    words = gl.inline_asm_elementwise(_HALVES, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    row, row8 = gl.split(words)
    slot = numbers(4, FOURS)
    gl.store(at + slot, same(row, FOURS), mask=real)
    gl.store(at8 + slot, same(row8, FOURS), mask=real8)


@gluon.jit(
    do_not_specialize=["page_count", "sequences", "table_width", "window_count", "entry_count", "row_count"]
)
def attend_few(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr, part_ptr, lse_ptr, count_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, scale,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    NEAR: gl.constexpr, SPLITS: gl.constexpr, heads: gl.constexpr, HALF_ROPE: gl.constexpr,
    ALONE: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, ceil(heads / 16), tokens), heads of 128 channels.

    The first NEAR splits take window rows, the others entries. part fp16 [tokens, SPLITS, heads, 128], lse
    fp32 [tokens, heads, SPLITS rounded up to fours]. ALONE: the page table has one row. For `launch_pdl`.
    """
    WORDS: gl.constexpr = 64  # of a head, two channels each
    grid_wait()
    grid_release()
    split = gl.program_id(0)
    group = gl.program_id(1)
    token = gl.program_id(2).to(gl.int64)
    spot = count_ptr + COUNTER_STEP * (token * gl.num_programs(1) + group)
    goal = goal_of(spot)
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, ONE))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, ONE))[None, :]
    g = (lane >> 2) + warp * 0
    t = lane & 3
    quad = 4 * warp + t
    quad4 = along(quad, 2, FOURS)
    slot = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, FOURS_OF_FOUR))))[
        None, None, None, :
    ]
    key = along(g, 2, FOURS) + 8 * numbers(4, FOURS)
    if split < NEAR:
        where = split * 32 + key
        found = gl.load(rows_ptr + token * row_count + where, mask=where < row_count, other=-1).to(gl.int32)
        sequence = gl.to_tensor(0).to(gl.int64)
    else:
        where = (split - NEAR) * 32 + key
        found = gl.load(entries_ptr + token * entry_count + where, mask=where < entry_count, other=-1)
        found = found.to(gl.int32)  # rows of any type stand here in a layer without entries
        if ALONE:
            sequence = gl.to_tensor(0).to(gl.int64)
        else:
            sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
    # q and its angles are asked for before the rows, and turned while those are on their way
    head = group * 16 + g
    q_words = words_at(q_ptr) + token * (heads * WORDS) + 4 * quad
    q_at = along(q_words + gl.minimum(head, heads - 1) * WORDS, 2, FOURS)
    q_at8 = along(q_words + gl.minimum(head + 8, heads - 1) * WORDS, 2, FOURS)
    turn = along(4 * quad - (WORDS - HALF_ROPE), 2, FOURS)
    cos_at = cos_ptr + token * HALF_ROPE
    sin_at = sin_ptr + token * HALF_ROPE
    q0, r0 = gl.load(q_at + numbers(4, FOURS)), gl.load(q_at8 + numbers(4, FOURS))
    c0, s0 = angles(cos_at, turn, 0, 1.0, HALF_ROPE), angles(sin_at, turn, 0, 0.0, HALF_ROPE)
    if split < NEAR:
        near_row = gl.minimum(gl.maximum(found, 0), window_count - 1).to(gl.int64)
        near = window_ptr + near_row * (WORDS * 2 + 4)
        code = gl.load(near + (WORDS * 2 + (quad4 >> 2))).to(gl.int32)
        near_at = words_at(near) + 2 * quad4
        raw = gl.load(near_at)
        more = gl.load(near_at + 1)
    else:
        entry = gl.maximum(found, 0)
        column = gl.minimum(entry // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1).to(gl.int64)
        start = pages_ptr + page * PAGE
        row = entry % ROWS
        payload = words_at(start + PAYLOAD + row * WORDS) + quad4
        scales = start + SCALES + row * 8
        code = gl.load(scales + (quad4 >> 1)).to(gl.int32)
        raw = gl.load(payload)
        more = gl.full([4, 32, 4], 0, gl.int32, FOURS)
    q0, r0 = turned(q0, c0, s0, HALF_ROPE), turned(r0, c0, s0, HALF_ROPE)
    code = gl.where(found >= 0, code, 0)  # a row that is not there may hold anything
    if split < NEAR:
        scale0 = window_scale(code)
        k0 = window_block(raw, more, scale0)
    else:
        scale0 = entry_scale(code & 255)
        k0 = entry_block(raw, scale0)
    present = gl.inline_asm_elementwise(_PRESENT, "=r,r", [found], dtype=gl.int32, is_pure=True, pack=1)
    area = area_of(8192) + warp * 2048 + lane * 0
    lane = lane + warp * 0
    _put(k0, area, g, t + warp * 0)
    s = _score(k0, q0, r0, gl.full([4, 32, 4, 4], 0.0, gl.float32, FOURS_OF_FOUR))
    space = gl.allocate_shared_memory(gl.float32, [128, 16], _SHARED)
    space.store(shaped(s, [128, 16], _ROWS))
    own: gl.constexpr = gl.SliceLayout(0, SIXTEENS)
    s = (space.slice(0, 32).load(own) + space.slice(32, 32).load(own)) + (
        space.slice(64, 32).load(own) + space.slice(96, 32).load(own)
    )
    # key 8j + 2t + e of tile j: its bytes were loaded by the four threads from 4·(2t + e) on
    bit = along(along(8 * t + warp * 0, 2, FOURS), 3, FOURS_OF_FOUR) + 4 * (slot & 1)
    there = ((along(present, 3, FOURS_OF_FOUR) >> bit) & 1) == 1
    s = gl.where(shaped(there, [4, 32, 16], SIXTEENS), gl.expand_dims(s, 0) * (scale * 128.0), float("-inf"))
    s = shaped(gl.permute(gl.reshape(s, [4, 32, 4, 2, 2]), (0, 1, 3, 2, 4)), [4, 32, 2, 8], TWOS_OF_EIGHT)
    top = gl.inline_asm_elementwise(
        _MAX_OF_FOUR, "=&f,f", [same(gl.max(s, axis=3), TWOS)], dtype=gl.float32, is_pure=True, pack=1
    )
    top = gl.maximum(top, -1e30)
    p = gl.exp2(s - along(top, 3, TWOS_OF_EIGHT))
    total = gl.inline_asm_elementwise(
        _SUM_OF_FOUR, "=&f,f", [same(gl.sum(p, axis=3), TWOS)], dtype=gl.float32, is_pure=True, pack=1
    )
    some = total > 0
    total = gl.where(some, total, 1.0)
    inverse = gl.where(some, 128.0 / total, 0.0)
    lse = gl.where(some, top + gl.log2(total), float("-inf"))
    low, high = gl.split(gl.reshape(p, [4, 32, 2, 4, 2]))
    pairs = gl.inline_asm_elementwise(_HALVES, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    p0, p1 = gl.split(gl.permute(gl.reshape(pairs, [4, 32, 2, 2, 2]), (0, 1, 4, 2, 3)))
    p0, p1 = shaped(p0, [4, 32, 4], FOURS), shaped(p1, [4, 32, 4], FOURS)
    PLACES: gl.constexpr = (SPLITS + 3) // 4 * 4
    head2 = along(head, 2, TWOS) + 8 * numbers(2, TWOS)
    gl.store(
        lse_ptr + (token * heads + head2) * PLACES + split, lse,
        mask=along((t == 0) & (warp == 0), 2, TWOS) & (head2 < heads),
    )  # fmt: skip
    at = words_at(part_ptr) + ((token * SPLITS + split) * heads + head) * WORDS + 16 * warp + 4 * t
    at = along(at, 2, FOURS)
    real, real8 = along(head, 2, FOURS) < heads, along(head + 8, 2, FOURS) < heads
    _weigh(_take(area, lane), p0, p1, inverse, at, at + 8 * WORDS, real, real8)
    arrive(spot, gl.where(split == 0, 65 - SPLITS, 1))
    for one in range(split, 16, SPLITS):
        if group * 16 + one < heads:
            _join(
                part_ptr, lse_ptr, sink_ptr, cos_at, sin_at, out_ptr, spot, goal, token, group * 16 + one,
                heads, HALF_ROPE, SPLITS,
            )  # fmt: skip


@gluon.jit
def _join(
    part_ptr, lse_ptr, sink_ptr, cos_at, sin_at, out_ptr, spot, goal, token, head,
    heads: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Waits for the parts of a head and writes them weighted by their sums, with the sink, turned back."""
    WORDS: gl.constexpr = 64
    PLACES: gl.constexpr = (SPLITS + 3) // 4 * 4
    MOST: gl.constexpr = triton.next_power_of_2(SPLITS)
    sums: gl.constexpr = gl.BlockedLayout([1, 1, MOST], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    deep: gl.constexpr = gl.BlockedLayout([1, 1, MOST, 1], [1, 32, 1, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, ONE))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, ONE))[None, :]
    pair = along(warp * 32 + lane, 2, ONES)
    mine = pair < WORDS
    channels = (pair & -16) + 4 * (pair & 3) + ((pair >> 2) & 3)  # which two lie there: `_weigh`
    sink = gl.load(sink_ptr + head) * 1.4426950408889634
    if HALF_ROPE > 0:
        turn = channels - (WORDS - HALF_ROPE)
        cos = gl.load(cos_at + turn, mask=(turn >= 0) & mine, other=1.0)
        sin = gl.load(sin_at + turn, mask=(turn >= 0) & mine, other=0.0)
    wait_for(spot, goal)
    split = numbers(MOST, sums)
    lse = gl.load(
        lse_ptr + (token * heads + head) * PLACES + (along(lane * 0 + warp * 0, 2, sums) + split),
        mask=split < SPLITS, other=float("-inf"),
    )  # fmt: skip
    depth = gl.arange(0, MOST, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, deep))))[
        None, None, :, None
    ]
    words = gl.load(
        words_at(part_ptr)
        + (token * SPLITS * heads + head) * WORDS
        + (along(pair, 2, deep) + depth * (heads * WORDS)),
        mask=(depth < SPLITS) & along(mine, 2, deep), other=0,
    )  # fmt: skip
    peak = gl.maximum(same(gl.max(lse, axis=2), ONE), sink)
    weight = gl.exp2(lse - along(peak, 2, sums))
    total = same(gl.sum(weight, axis=2), ONE) + gl.exp2(sink - peak)
    weight = along(weight * along(1.0 / total, 2, sums), 3, deep)
    a, b = gl.inline_asm_elementwise(
        SINGLES, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    even, odd = same(gl.sum(weight * a, axis=2), ONES), same(gl.sum(weight * b, axis=2), ONES)
    if HALF_ROPE > 0:
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    out = gl.inline_asm_elementwise(_PAIR, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    gl.store(words_at(out_ptr) + (token * heads + head) * WORDS + channels, out, mask=mine)
