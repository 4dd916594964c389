# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention of few queries in one launch, heads of 512 channels, for Hopper (spec §3).

A query is shared out over programs of 16 heads and 32, 64 or 128 keys, so that all queries' programs run at
once and no larger part of the output than need be passes through memory. A program has a team of four warps
for each 32 keys, and memory is asked for everything at the start:

- Warp w of a team expands a quarter of the channels. Thread (g, t) of its eight by four loads the bytes of
  keys g, g + 8, g + 16, g + 24 from channel 32·(4w + t) on. Expanded, they are the right operand of
  `mma.sync` for q·kᵀ as they lie, and wait in shared memory to be read turned over (`ldmatrix`) for p·k.
- q is turned and converted once a program and lies in shared memory as the left operand is read: 16 bytes
  are two words of a head and of that 8 heads on.
- A thread takes the softmax of four keys of a head; then a warp weighs all keys of a part of the channels.

Each of the programs of 16 heads then joins the parts of some of them (`sparse_attention_until_hopper`). fp16
holds p to 11 bits.
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.sparse_attention_operands_hopper import along, numbers, same, window_scale, words_at
from cedar.kernels.sparse_attention_pieces_hopper import (
    HALVES,
    PUT_ONE,
    PUT_TWO,
    among,
    entry_scale,
    entry_words,
    four_of,
    get,
    halves,
    held,
    keep,
    ldmatrix,
    near_words,
    offset,
    product,
    put,
    put_query,
    quarters,
    score,
    slots,
)
from cedar.kernels.sparse_attention_until_hopper import join
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _bytes(teams):
    """Shared memory: keys, four quarters' scores, p, inverse sums, names and q, and a spare line."""
    keys = 32 * teams
    scores, chances = 256 * (keys + 8), 16 * (2 * keys + 16)
    return (1024 * keys + scores + chances + 64 + 4 * keys + 16384 + 1024) // 512 * 512


@gluon.jit(
    do_not_specialize=["page_count", "sequences", "table_width", "window_count", "entry_count", "row_count"]
)
def attend_teams(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr, part_ptr, lse_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, scale,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    NEAR: gl.constexpr, SPLITS: gl.constexpr, heads: gl.constexpr, HALF_ROPE: gl.constexpr,
    ALONE: gl.constexpr, SETTLED: gl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, ceil(heads / 16), tokens), heads of 512 channels; 4, 8 or 16 warps, eight keys each.

    The first NEAR splits take window rows, the others entries. part and lse are `parts`. ALONE: the page
    table has one row. SETTLED: the launch before wrote nothing that this one reads but q and let it start
    only once it had itself waited, so all but q is read before the wait. For `launch_pdl`.
    """
    W: gl.constexpr = gl.num_warps()
    T: gl.constexpr = W // 4
    KEYS: gl.constexpr = 8 * W
    WORDS: gl.constexpr = 256  # of a head, two channels each
    ROW: gl.constexpr = 4 * (KEYS + 8)  # bytes of a head's scores
    P_ROW: gl.constexpr = 2 * KEYS + 16
    ones: gl.constexpr = held(W)
    twos: gl.constexpr = held(W, 2)
    fours: gl.constexpr = held(W, 4)
    squares: gl.constexpr = held(W, 4, 4)
    if not SETTLED:
        grid_wait()
        grid_release()
    split = gl.program_id(0)
    group = gl.program_id(1)
    token = gl.program_id(2).to(gl.int64)
    block = (token * gl.num_programs(1) + group) * SPLITS + split
    LINES: gl.constexpr = _bytes(T) // 512
    space = gl.allocate_shared_memory(gl.int32, [LINES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # a store, lest the allocation be dropped: all others go by addresses
    space.index(LINES - 1).store(gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [W], [0])))
    base = gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    scores = base + 1024 * KEYS
    chances = scores + 64 * ROW
    inverses = chances + 16 * P_ROW
    names = inverses + 64
    query = names + 4 * KEYS
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, ones))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, ones))[None, :]
    warp, lane = warp + lane * 0, lane + warp * 0
    team = warp >> 2
    quarter = (warp + team) & 3  # teams' same quarters on different schedulers
    g = lane >> 2
    t = lane & 3
    quad = 4 * quarter + t
    quad4 = along(quad, 2, fours)
    slot = slots(4, squares)
    key = along(32 * team + g, 2, fours) + 8 * numbers(4, fours)
    if split < NEAR:
        where = split * KEYS + key
        found = gl.load(rows_ptr + token * row_count + where, mask=where < row_count, other=-1)
        found = gl.maximum(gl.minimum(found, window_count - 1), -1).to(gl.int32)
        sequence = gl.to_tensor(0).to(gl.int64)
    else:
        where = (split - NEAR) * KEYS + key
        found = gl.load(entries_ptr + token * entry_count + where, mask=where < entry_count, other=-1)
        found = found.to(gl.int32)  # rows of any type stand here in a layer without entries
        if ALONE:
            sequence = gl.to_tensor(0).to(gl.int64)
        else:
            sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
    # q: eight channels of two heads 8 apart a time, those that turn first
    first = group * 16
    TURNS: gl.constexpr = (HALF_ROPE + 3) // 4  # eights of channels of a head
    unit = along(32 * warp + lane, 2, held(W, 4 // T)) + 32 * W * numbers(4 // T, held(W, 4 // T))
    turns = unit < 8 * TURNS
    if TURNS == 0 or TURNS == 64:
        row = unit >> 6
        chunk = unit & 63
    else:
        row = gl.where(turns, unit // TURNS, (unit - 8 * TURNS) // (64 - TURNS))
        chunk = gl.where(turns, unit % TURNS + (64 - TURNS), (unit - 8 * TURNS) % (64 - TURNS))
    units: gl.constexpr = held(W, 4 // T, 4)
    word = along(4 * chunk, 3, units) + slots(4, units)
    q_words = words_at(q_ptr) + token * (heads * WORDS)
    q_at = q_words + (along(gl.minimum(first + row, heads - 1) * WORDS, 3, units) + word)
    q_at8 = q_words + (along(gl.minimum(first + row + 8, heads - 1) * WORDS, 3, units) + word)
    flip = ((chunk >> 2) & 3) ^ ((row & 1) << 2)
    left = along(query + row * 2048 + (((2 * chunk) ^ flip) << 4), 3, units)
    left2 = along(query + row * 2048 + (((2 * chunk + 1) ^ flip) << 4), 3, units)
    turns = along(turns.to(gl.int32), 3, units)
    cos_at = cos_ptr + token * HALF_ROPE
    sin_at = sin_ptr + token * HALF_ROPE
    pair = word - (WORDS - HALF_ROPE)
    if not SETTLED:
        q, q8 = gl.load(q_at), gl.load(q_at8)
    cos = gl.load(cos_at + pair, mask=pair >= 0, other=1.0)
    sin = gl.load(sin_at + pair, mask=pair >= 0, other=0.0)
    there = found >= 0
    there4 = along(there, 3, squares)
    if split < NEAR:
        near = window_ptr + gl.maximum(found, 0).to(gl.int64) * (WORDS * 2 + 16)
        code = gl.load(near + (WORDS * 2 + quad4)).to(gl.int32)
        near_at = along(words_at(near) + 8 * quad4, 3, squares) + slot
        raw = gl.load(near_at, mask=there4, other=0)  # a row that is not there may hold NaN
        more = gl.load(near_at + 4, mask=there4, other=0)
    else:
        entry = gl.maximum(found, 0)
        column = gl.minimum(entry // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1).to(gl.int64)
        start = pages_ptr + page * PAGE
        line = entry % ROWS
        scales = start + SCALES + line * 32
        code = gl.load(scales.to(gl.pointer_type(gl.int16), bitcast=True) + quad4).to(gl.int32)
        raw = gl.load(along(words_at(start + PAYLOAD + line * WORDS) + 4 * quad4, 3, squares) + slot)
        more = raw
    if SETTLED:
        grid_wait()
        grid_release()
        q, q8 = gl.load(q_at), gl.load(q_at8)
    gl.inline_asm_elementwise(
        PUT_ONE, "=r,r,r", [names + key * 4, found], dtype=gl.int32, is_pure=False, pack=1
    )
    if not SETTLED:
        put_query(q, q8, cos, sin, turns, left, left2, fours)
    code = gl.where(there, code, 0)  # a row that is not there may hold anything
    area = base + (4 * team + quarter) * 8192
    if split < NEAR:
        scale0 = window_scale(code)
        w0, w1, w2, w3 = four_of(raw, fours)
        w4, w5, w6, w7 = four_of(more, fours)
        k0 = near_words(w0, w1, scale0, squares)
        put(k0, area, g, t, 0, fours, squares)
        k1 = near_words(w2, w3, scale0, squares)
        put(k1, area, g, t, 1, fours, squares)
        k2 = near_words(w4, w5, scale0, squares)
        put(k2, area, g, t, 2, fours, squares)
        k3 = near_words(w6, w7, scale0, squares)
        put(k3, area, g, t, 3, fours, squares)
    else:
        scale0 = entry_scale(code & 255)
        scale1 = entry_scale((code >> 8) & 255)
        w0, w1, w2, w3 = four_of(raw, fours)
        k0 = entry_words(w0, scale0, squares)
        put(k0, area, g, t, 0, fours, squares)
        k1 = entry_words(w1, scale0, squares)
        put(k1, area, g, t, 1, fours, squares)
        k2 = entry_words(w2, scale1, squares)
        put(k2, area, g, t, 2, fours, squares)
        k3 = entry_words(w3, scale1, squares)
        put(k3, area, g, t, 3, fours, squares)
    if SETTLED:
        put_query(q, q8, cos, sin, turns, left, left2, fours)
    barrier()
    s = gl.full([W, 32, 4, 4], 0.0, gl.float32, squares)
    s = score(k0, query + g * 2048, quad, g, t, s, 0, fours, squares)
    s = score(k1, query + g * 2048, quad, g, t, s, 1, fours, squares)
    s = score(k2, query + g * 2048, quad, g, t, s, 2, fours, squares)
    s = score(k3, query + g * 2048, quad, g, t, s, 3, fours, squares)
    place = along(scores + (16 * quarter + g) * ROW + 128 * team + 8 * t, 2, fours) + 32 * numbers(4, fours)
    gl.inline_asm_elementwise(
        keep(ROW), "=r,=r,=r,=r,r,r,r,r,f,f,f,f", [along(place, 3, squares) + 0 * slot, s], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip
    barrier()
    # softmax: a thread has four keys of a head
    head = warp * (4 // T) + lane // (8 * T)
    own = 4 * (lane % (8 * T))
    s4 = gl.inline_asm_elementwise(
        quarters(16 * ROW), "=f,=f,=f,=f,r,r,r,r",
        [along(scores + head * ROW + 4 * own, 2, fours) + 0 * numbers(4, fours)], dtype=gl.float32,
        is_pure=False, pack=4,
    )  # fmt: skip
    s4 = gl.where(get(names + 4 * own, fours) >= 0, s4 * (scale * 128.0), float("-inf"))
    top = gl.inline_asm_elementwise(
        among("max", 8 * T),
        "=&f,f",
        [same(gl.max(s4, axis=2), ones)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    top = gl.maximum(top, -1e30)
    p = gl.exp2(s4 - along(top, 2, fours))
    total = gl.inline_asm_elementwise(
        among("add", 8 * T), "=&f,f", [same(gl.sum(p, axis=2), ones)], dtype=gl.float32, is_pure=True, pack=1
    )
    some = total > 0
    total = gl.where(some, total, 1.0)
    inverse = gl.where(some, 128.0 / total, 0.0)
    lse = gl.where(some, top + gl.log2(total), float("-inf"))
    low, high = gl.split(gl.reshape(p, [W, 32, 2, 2]))
    pairs = gl.inline_asm_elementwise(HALVES, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    pairs = same(pairs, twos)
    gl.inline_asm_elementwise(
        PUT_TWO, "=r,=r,r,r,r,r", [along(chances + head * P_ROW + 2 * own, 2, twos) + pairs * 0, pairs],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        PUT_ONE, "=r,r,f", [inverses + 4 * head, inverse], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.store(lse_ptr + block * 64 + 4 * head + (own >> 2), lse, mask=(own < 16) & (first + head < heads))
    barrier()
    inverse, inverse8 = gl.split(
        gl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=f,r", [along(inverses + 4 * g, 2, twos) + 32 * numbers(2, twos)],
            dtype=gl.float32, is_pure=False, pack=1,
        )
    )  # fmt: skip
    inverse, inverse8 = along(same(inverse, ones), 2, fours), along(same(inverse8, ones), 2, fours)
    part = part_ptr + block * (16 * WORDS)
    for b in gl.static_range(4 // T):  # four chunks of eight channels, whose sums of a row become neighbours
        chunks = warp * (16 // T) + 4 * b
        acc = gl.full([W, 32, 4, 4], 0.0, gl.float32, squares)
        for u in gl.static_range(T):
            p_at = chances + (lane & 15) * P_ROW + (lane >> 4) * 16 + 64 * u
            from_at = along(base + (4 * u + (chunks >> 4)) * 8192, 2, fours)
            from_at += offset(along(lane, 2, fours), along(chunks & 15, 2, fours) + numbers(4, fours))
            acc = product(
                ldmatrix(from_at, True, squares), ldmatrix(p_at, False, fours),
                ldmatrix(p_at + 32, False, fours), acc, squares,
            )  # fmt: skip
        low, high = gl.split(gl.reshape(acc, [W, 32, 4, 2, 2]))
        low, low8 = gl.split(low)
        high, high8 = gl.split(high)
        head_at = part + g * WORDS + 4 * (chunks + t)
        head_at = along(head_at, 2, fours) + numbers(4, fours)
        real = along(first + g, 2, fours)
        gl.store(head_at, halves(low, high, inverse, fours), mask=real < heads)
        gl.store(head_at + 8 * WORDS, halves(low8, high8, inverse8, fours), mask=real + 8 < heads)
    for one in range(split * T, 16, SPLITS * T):
        if first + one < heads:
            join(
                part_ptr, lse_ptr, sink_ptr, cos_at, sin_at, out_ptr, block - split, token, first, one,
                heads, HALF_ROPE, SPLITS,
            )  # fmt: skip
