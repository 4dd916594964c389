# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention for Hopper's matrix units, 64 heads of 512: three trades of warps around shared tiles.

One program holds one query's 64 heads, or a split of its keys; those who share a query meet at the end.
Eight warps expand packed keys, 64 a tile, to fp16 in one of two shared tiles (`_produce`). Four multiply them
with q, take the softmax, and hold half of the output's channels (`_score`); four hold the other half
(`_follow`). They meet at mbarriers, so that bits move while the matrix units work. The product of q and a
tile keeps shared memory busy by itself: what the expansion needs meanwhile is in registers already.
fp16 holds every FP4 entry and every FP8 window key exactly once scaled by 2^-7, and p to 11 bits.
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import COUNTER_STEP, goal_of, grid_release, grid_wait
from cedar.kernels.sparse_attention_join_hopper import (
    bf16_words,
    channels_of,
    half_words,
    join_share,
    most_used,
    span_of,
)
from cedar.kernels.sparse_attention_operands_hopper import FP4_WORDS, FP8_WORDS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Registers a thread of those who follow and produce; those who score have what is left of a multiprocessor's.
FOLLOW_REGISTERS, PRODUCE_REGISTERS = 168, 72


def _linear(registers, lanes, warps, shape):
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], shape))


_LANES, _LANES3 = [[1, 0], [2, 0], [4, 0]], [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
_WARPS, _WARPS3 = [[8, 0], [16, 0], [32, 0]], [[8, 0, 0], [16, 0, 0], [32, 0, 0]]
# In eight warps four lanes hold a row, four neighbouring words at a time, so that loads and stores are 16
# bytes wide
# and eight rows' stores meet no bank twice. Words [64, 64] of entries; as [64, 32, 2] for scales.
_WORDS = [[0, 1], [0, 2], [0, 16], [0, 32]]
_TILE = _linear(_WORDS, [[0, 4], [0, 8], *_LANES], _WARPS, [64, 64])
_TILE3 = _linear(
    [[0, 0, 1], [0, 1, 0], [0, 8, 0], [0, 16, 0]], [[0, 2, 0], [0, 4, 0], *_LANES3], _WARPS3, [64, 32, 2]
)
# The same of half the channels of window rows, whose scales are those of eight words, [64, 8, 8].
_WIDE3 = _linear(
    [[0, 0, 1], [0, 0, 2], [0, 2, 0], [0, 4, 0]], [[0, 0, 4], [0, 1, 0], *_LANES3], _WARPS3, [64, 8, 8]
)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_QUERY = gl.constexpr(
    gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
)  # words [64, 32], a block of 64 channels
_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))

# Barriers: how many tiles are used is known; a tile is ready, and free again (both halves of the output
# have it), two
# of each; p and its shrinking factors are ready, and free again; the second half of q is ready.
_NAMED, _READY, _FREE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(3)
_P_READY, _P_FREE, _Q_READY = gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
# Words [64, 128] of an accumulator's pairs, two neighbours a thread.
_OUT = _linear(
    [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64], [8, 0]],
    [[0, 4], [0, 2], [1, 0], [2, 0], [4, 0]],
    [[16, 0], [32, 0]],
    [64, 128],
)


@gluon.jit
def _here(SPLITS: gl.constexpr):
    """The token and split of this program."""
    if SPLITS == 1:
        token = gl.program_id(0)
        split = 0
    else:
        place = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        token = place // SPLITS
        split = place % SPLITS
    return token.to(gl.int64), split


@gluon.jit
def _halves_of(tile):
    """A tile of words [64, 256] as its two halves of 256 channels [2, 64, 128]."""
    return tile._reinterpret(gl.int32, [2, 64, 128], _SHARED_WORDS)


@gluon.jit
def _sources(pages, place, place_s, UNIT: gl.constexpr):
    """Where the payloads and scales of 64 entries lie, from their byte offsets over UNIT."""
    start = pages + place.load(gl.SliceLayout(1, _TILE)) * UNIT
    start_s = pages + place_s.load(gl.SliceLayout(1, gl.SliceLayout(2, _TILE3))) * UNIT
    return start.to(gl.pointer_type(gl.int32), bitcast=True), start_s


@gluon.jit
def _load_entries(start, start_s):
    """Raw words [64, 64] and scale bytes [64, 32] of 64 entries."""
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, _TILE))
    group = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, _TILE3)))
    return gl.load(start[:, None] + word[None, :]), gl.load(start_s[:, None] + group[None, :]).to(gl.int32)


@gluon.jit
def _expand_entries(payload, scales, tile):
    """Writes raw entries as fp16·2^-7."""
    bits = scales * 0x00800080  # E4M3's bits as two fp16: value·2^-8
    power = gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x78007800], dtype=gl.int32, is_pure=True, pack=1
    )
    wide = power[:, :, None] + gl.full([64, 32, 2], 0, gl.int32, _TILE3)
    scale = gl.convert_layout(gl.reshape(wide, [64, 64]), _TILE, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        FP4_WORDS, "=r,=r,=r,=r,r,r", [payload, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    both = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 1, 3, 2))
    tile.store(gl.reshape(both, [64, 256]))


@gluon.jit
def _load_window(window, here, h):
    """Half h of the raw words [64, 64] and scale bytes [64, 8] of 64 window rows."""
    flat = gl.maximum(here.load(gl.SliceLayout(1, _TILE)), 0)
    word = h * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, _TILE))
    words = gl.load(window.to(gl.pointer_type(gl.int32)) + (flat.to(gl.int64) * 132)[:, None] + word[None, :])
    flat = gl.maximum(here.load(gl.SliceLayout(1, gl.SliceLayout(2, _WIDE3))), 0)
    group = 512 + h * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, _WIDE3)))
    return words, gl.load(window + (flat.to(gl.int64) * 528)[:, None] + group[None, :]).to(gl.int32)


@gluon.jit
def _expand_window(words, scales, half):
    """The same of window rows."""
    code = scales.to(gl.int32)
    normal = (gl.minimum(code, 141) - 111) << 10
    power = (
        gl.where(code >= 112, normal, gl.where(code >= 102, 1 << (gl.maximum(code, 102) - 102), 0))
        * 0x00010001
    )
    wide = power[:, :, None] + gl.full([64, 8, 8], 0, gl.int32, _WIDE3)
    scale = gl.convert_layout(gl.reshape(wide, [64, 64]), _TILE, assert_trivial=True)
    a, b = gl.inline_asm_elementwise(
        FP8_WORDS, "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    half.store(gl.reshape(gl.join(a, b), [64, 128]))


@gluon.jit
def _produce(
    pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count,
    present_space, rows, names, places, places_s, used_space, tiles, bars,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Expands tiles into shared memory, half a tile a turn, two tiles ahead of those who use them."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    UNIT: gl.constexpr = 16 if PAGE % 16 + PAYLOAD % 16 + SCALES % 16 == 0 else 4
    token, split = _here(SPLITS)
    near = gl.arange(0, 128, layout=line)
    row = gl.load(rows_ptr + token * row_count + near, mask=near < row_count, other=-1)
    if TILES > 0:
        lane = gl.arange(0, NAMES, layout=line)
        entry = gl.load(entries_ptr + token * entry_count + lane, mask=lane < entry_count, other=-1)
        sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
    row = gl.maximum(gl.minimum(row, window_count - 1), -1).to(gl.int32)  # of 64 bits, they may be far below
    rows._reinterpret(gl.int32, [128], _FLAT).store(row)
    words, codes = _load_window(window_ptr, rows.index(0), 0)
    used = 0
    if TILES > 0:
        column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column, mask=entry >= 0, other=0).to(gl.int32)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1)
        first_byte = page.to(gl.int64) * PAGE
        line_of = gl.maximum(entry, 0) % ROWS
        names._reinterpret(gl.int32, [NAMES], _FLAT).store(entry)
        places._reinterpret(gl.int64, [NAMES], _FLAT).store((first_byte + PAYLOAD + line_of * 256) // UNIT)
        places_s._reinterpret(gl.int64, [NAMES], _FLAT).store((first_byte + SCALES + line_of * 32) // UNIT)
        used = (gl.max(gl.where(entry >= 0, lane + 1, 0), axis=0) + 63) // 64
    used_space.store(gl.full([32], 0, gl.int32, line) + used)
    mbarrier.arrive(bars.index(_NAMED), count=1)
    base, count = span_of(split, used, TILES, SPLITS)
    first = 0
    if split == 0:
        first = 2
        for u in range(4):
            after = gl.minimum(u + 1, 3)
            next_words, next_codes = _load_window(window_ptr, rows.index(after >> 1), after & 1)
            _expand_window(words, codes, _halves_of(tiles.index(u >> 1)).index(u & 1))
            words, codes = next_words, next_codes
            if (u & 1) == 1:
                present_space.index(u >> 1).store(rows.index(u >> 1).load(line))
                fence_async_shared()
                mbarrier.arrive(bars.index(_READY + (u >> 1)), count=1)
    if TILES > 0:  # noqa: SIM102 (decided when compiled, unlike the next)
        if first < count:
            at = base + first - 2
            payload, scales = _load_entries(*_sources(pages_ptr, places.index(at), places_s.index(at), UNIT))
            for t in range(first, count):
                slot = t & 1
                mbarrier.wait(bars.index(_FREE + slot), ((t >> 1) & 1) ^ 1)
                _expand_entries(payload, scales, tiles.index(slot))
                present_space.index(slot).store(names.index(base + t - 2).load(line))
                # The fence would wait for loads on their way, and the product that follows keeps shared
                # memory
                # busy: addresses are read before both, loads start after the fence.
                at = base + gl.minimum(t + 1, count - 1) - 2
                start, start_s = _sources(pages_ptr, places.index(at), places_s.index(at), UNIT)
                fence_async_shared()
                mbarrier.arrive(bars.index(_READY + slot), count=1)
                payload, scales = _load_entries(start, start_s)


@gluon.jit
def _half_tile(words):
    return words._reinterpret(gl.float16, [64, 512], _SHARED)


@gluon.jit
def _load_query(q_ptr, cos_ptr, sin_ptr, q_tile, token, BLOCK: gl.constexpr, HALF_ROPE: gl.constexpr):
    """Four blocks of 64 channels of a token's q, from BLOCK on, rotated, as fp16 in shared memory."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _QUERY))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, _QUERY))
    start = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    blocks = q_tile._reinterpret(gl.int32, [8, 64, 32], _SHARED_WORDS)
    for b in gl.static_range(BLOCK, BLOCK + 4):
        words = gl.load(start + b * 32 + head[:, None] * 256 + pair[None, :])
        even, odd = channels_of(words)
        if (b + 1) * 32 > 256 - HALF_ROPE:
            turn = b * 32 + pair - (256 - HALF_ROPE)
            cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
            sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
            even, odd = channels_of(bf16_words(even * cos - odd * sin, even * sin + odd * cos))
        blocks.index(b).store(half_words(even, odd))
    fence_async_shared()


@gluon.jit
def _shrink(x, shrink):
    return x * gl.convert_layout(shrink, gl.SliceLayout(1, _ACC), assert_trivial=True)[:, None]


@gluon.jit
def _write(
    o, factor, out_ptr, part_ptr, cos_ptr, sin_ptr,
    COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Writes 256 channels from COLUMN on."""
    token, split = _here(SPLITS)
    even, odd = gl.split(gl.reshape(o * factor[:, None], [64, 128, 2]))
    if SPLITS > 1:
        words = half_words(even, odd)
        start = part_ptr.to(gl.pointer_type(gl.int32)) + (token * SPLITS + split) * 16384
    else:
        start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
        if HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE:
            turn = (
                COLUMN // 2
                + gl.arange(0, 128, layout=gl.SliceLayout(0, even.type.layout))
                - (256 - HALF_ROPE)
            )
            cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
            sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
            words = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
        else:
            words = bf16_words(even, odd)
    words = gl.convert_layout(words, _OUT)  # neighbours of a row to one thread
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _OUT))
    pair = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, _OUT))
    gl.store(start + head[:, None] * 256 + pair[None, :], words)


@gluon.jit
def _score(
    q_ptr, cos_ptr, sin_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr, scale,
    present_space, used_space, q_tile, tiles, p_shared, shrink_shared, bars,
    TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, and the first 256 channels of the output."""
    token, split = _here(SPLITS)
    spot = count_ptr + COUNTER_STEP * token
    goal = goal_of(spot) if SPLITS > 1 else 0
    _load_query(q_ptr, cos_ptr, sin_ptr, q_tile, token, 0, HALF_ROPE)
    mbarrier.wait(bars.index(_NAMED), 0)
    _, count = span_of(split, most_used(used_space), TILES, SPLITS)
    mbarrier.wait(bars.index(_Q_READY), 0)
    o = gl.full([64, 256], 0.0, gl.float32, _ACC)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, _SCORE))
    for t in range(count):
        slot = t & 1
        mbarrier.wait(bars.index(_READY + slot), (t >> 1) & 1)
        tile = _half_tile(tiles.index(slot))
        s = gl.full([64, 64], 0.0, gl.float32, _SCORE)
        s = warpgroup_mma(_half_tile(q_tile), tile.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        present = present_space.index(slot).load(gl.SliceLayout(0, _SCORE)) >= 0
        s = gl.where(present[None, :], s, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, axis=1) * scale)
        p = gl.exp2(s * scale - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        top = new_top
        total = total * shrink + gl.sum(p, axis=1)
        mbarrier.wait(bars.index(_P_FREE), (t & 1) ^ 1)
        p_shared.store(p.to(gl.float16))
        shrink_shared.store(shrink)
        fence_async_shared()
        mbarrier.arrive(bars.index(_P_READY), count=1)
        o = warpgroup_mma(p_shared, tile.slice(0, 256, dim=1), _shrink(o, shrink), is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(bars.index(_FREE + slot), count=1)
    if SPLITS > 1:
        alive = total > 0
        factor = gl.where(alive, 128.0 / gl.where(alive, total, 1.0), 0.0)
        lse = gl.where(alive, top + gl.log2(gl.where(alive, total, 1.0)), float("-inf"))
        cell = (token * SPLITS + split) * 64
        gl.store(lse_ptr + cell + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE)), lse)
    else:
        sink = gl.load(sink_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE))) * 1.4426950408889634
        peak = gl.maximum(top, sink)
        factor = gl.exp2(top - peak) * 128.0 / (total * gl.exp2(top - peak) + gl.exp2(sink - peak))
    mbarrier.wait(bars.index(_P_FREE), (count & 1) ^ 1)
    shrink_shared.store(factor)
    mbarrier.arrive(bars.index(_P_READY), count=1)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, _ACC), assert_trivial=True)
    _write(o, factor, out_ptr, part_ptr, cos_ptr, sin_ptr, 0, HALF_ROPE, SPLITS)
    if SPLITS > 1:
        join_share(
            part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
            0, HALF_ROPE, SPLITS,
        )  # fmt: skip


@gluon.jit
def _follow(
    q_ptr, cos_ptr, sin_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr,
    used_space, q_tile, tiles, p_shared, shrink_shared, bars,
    TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """The other 256 channels of the output."""
    token, split = _here(SPLITS)
    spot = count_ptr + COUNTER_STEP * token
    goal = goal_of(spot) if SPLITS > 1 else 0
    _load_query(q_ptr, cos_ptr, sin_ptr, q_tile, token, 4, HALF_ROPE)
    mbarrier.arrive(bars.index(_Q_READY), count=1)
    mbarrier.wait(bars.index(_NAMED), 0)
    _, count = span_of(split, most_used(used_space), TILES, SPLITS)
    o = gl.full([64, 256], 0.0, gl.float32, _ACC)
    for t in range(count):
        slot = t & 1
        mbarrier.wait(bars.index(_P_READY), t & 1)
        shrink = shrink_shared.load(gl.SliceLayout(1, _ACC))
        tile = _half_tile(tiles.index(slot))
        o = warpgroup_mma(p_shared, tile.slice(256, 256, dim=1), o * shrink[:, None], is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(bars.index(_P_FREE), count=1)
        mbarrier.arrive(bars.index(_FREE + slot), count=1)
    mbarrier.wait(bars.index(_P_READY), count & 1)
    factor = shrink_shared.load(gl.SliceLayout(1, _ACC))
    _write(o, factor, out_ptr, part_ptr, cos_ptr, sin_ptr, 256, HALF_ROPE, SPLITS)
    if SPLITS > 1:
        join_share(
            part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
            256, HALF_ROPE, SPLITS,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["page_count", "sequences", "table_width", "window_count", "entry_count", "row_count"]
)
def attend_hopper(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr, part_ptr, lse_ptr, count_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, scale,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
    FOLLOW_REGISTERS: gl.constexpr, PRODUCE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (tokens, SPLITS). SPLITS (at most 32) neighbours in launch order share a query's keys, wait for
    each other and join a share of the heads each. NAMES: entries, rounded up to a power of two. Launched with
    `launch_pdl`.
    """
    grid_wait()
    grid_release()
    present_space = gl.allocate_shared_memory(gl.int32, [2, 64], _FLAT)
    rows_space = gl.allocate_shared_memory(gl.int32, [2, 64], _FLAT)
    names_space = gl.allocate_shared_memory(gl.int32, [NAMES // 64, 64], _FLAT)
    places = gl.allocate_shared_memory(gl.int64, [NAMES // 64, 64], _FLAT)
    places_s = gl.allocate_shared_memory(gl.int64, [NAMES // 64, 64], _FLAT)
    used_space = gl.allocate_shared_memory(gl.int32, [32], _FLAT)
    q_tile = gl.allocate_shared_memory(gl.int32, [64, 256], _SHARED_WORDS)
    tiles = gl.allocate_shared_memory(gl.int32, [2, 64, 256], _SHARED_WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [64, 64], _SHARED)
    shrink_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(8):
        mbarrier.init(bars.index(b), count=2 if b == _FREE or b == _FREE + 1 else 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score, (
                q_ptr, cos_ptr, sin_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr, scale,
                present_space, used_space, q_tile, tiles, p_shared, shrink_shared, bars,
                TILES, HALF_ROPE, SPLITS,
            )),
            (_follow, (
                q_ptr, cos_ptr, sin_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr,
                used_space, q_tile, tiles, p_shared, shrink_shared, bars,
                TILES, HALF_ROPE, SPLITS,
            )),
            (_produce, (
                pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
                page_count, sequences, table_width, window_count, entry_count, row_count,
                present_space, rows_space, names_space, places, places_s, used_space, tiles, bars,
                ROWS, PAGE, PAYLOAD, SCALES, TILES, NAMES, SPLITS,
            )),
        ],
        [4, 8], [FOLLOW_REGISTERS, PRODUCE_REGISTERS],
    )  # fmt: skip
