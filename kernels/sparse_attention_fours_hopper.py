# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention for Hopper's matrix units, 64 heads of 512: four trades of warps around shared tiles."""

from __future__ import annotations

from cedar.kernels.grid_hopper import COUNTER_STEP, SINGLES, arrive, barrier, goal_of, grid_release, grid_wait, wait_for
from cedar.kernels.sparse_attention_join_hopper import bf16_words, join_share
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Registers a thread of those who weigh (twice) and produce; those who score have what is left.
WEIGH_REGISTERS, PRODUCE_REGISTERS = 160, 64
SLACK = gl.constexpr(8.0)  # powers of two by which a probability may exceed one before all are shrunk


def _linear(registers, lanes, warps, shape):
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], shape))


_ROWS8 = [[1, 0], [2, 0], [4, 0]]
# Raw words of half the channels of 32 entries [32, 32]: a thread takes four neighbours of a row, eight lanes
# eight rows.
_RAW = _linear([[0, 1], [0, 2], [0, 16]], [*_ROWS8, [0, 4], [0, 8]], [[8, 0], [16, 0]], [32, 32])
_RAW3 = _linear(
    [[0, 0, 1], [0, 1, 0], [0, 8, 0]],
    [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 2, 0], [0, 4, 0]],
    [[8, 0, 0], [16, 0, 0]],
    [32, 16, 2],
)
# Raw words of half the channels of window rows [64, 64], pairs of them [64, 32], and their scales' spread.
_NEAR = _linear(
    [[0, 1], [0, 2], [0, 4], [0, 32], [32, 0]], [*_ROWS8, [0, 8], [0, 16]], [[8, 0], [16, 0]], [64, 64]
)
_NEAR_PAIR = _linear([[0, 1], [0, 2], [0, 16], [32, 0]], [*_ROWS8, [0, 4], [0, 8]], [[8, 0], [16, 0]], [64, 32])
_NEAR3 = _linear(
    [[0, 0, 1], [0, 0, 2], [0, 4, 0], [32, 0, 0]],
    [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 1, 0], [0, 2, 0]],
    [[8, 0, 0], [16, 0, 0]],
    [64, 8, 4],
)
# Rows on their way from memory, 16 bytes a thread.
_COPY = _linear(
    [[0, 1], [0, 2], [16, 0], [32, 0]],
    [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
    [[4, 0], [8, 0]],
    [64, 32],
)
_COPY_S = _linear([[0, 1], [0, 2]], [[0, 4], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [64, 8])
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_RING = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SCORE, 2))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_FOUR = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [4]))
_EACH = gl.constexpr(
    gl.DistributedLinearLayout([[32]], [[1], [2], [4], [8], [16]], [[0], [0]], [], [64])
)  # all 64 in every warp
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
# Words [64, 128] of q's first half as the left operand wants them: a thread loads eight channels at a time.
_Q_WORDS = _linear(
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
    [[0, 4], [0, 8], *_ROWS8],
    [[16, 0], [32, 0]],
    [64, 128],
)
# Words [64, 64] of a quarter of q for shared memory: a thread has 32 neighbouring channels.
_Q_PART = _linear(
    [[0, 1], [0, 2], [0, 4], [0, 8], [32, 0]], [*_ROWS8, [0, 16], [0, 32]], [[8, 0], [16, 0]], [64, 64]
)

# Barriers: how many tiles are used is known; a tile is ready, two of them; half a tile's keys are free again, two
# of each; p and its shrinking factors are ready, and free again; the second half of q is ready.
_NAMED, _READY, _FREE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(3)
_P_READY, _P_FREE, _Q_READY = gl.constexpr(7), gl.constexpr(8), gl.constexpr(9)

# Eight packed channels and their scale (two fp16) to words of (0, 4), (1, 5), (2, 6), (3, 7).
_FP4_WORDS = gl.constexpr("""{
.reg .b32 u, v, a, b;
shr.b32 u, $4, 3;
and.b32 u, u, 0x0E0E0E0E;
lop3.b32 u, $4, 0x80808080, u, 0xEA;
shl.b32 a, $4, 4;
shl.b32 v, $4, 1;
and.b32 v, v, 0x0E0E0E0E;
lop3.b32 v, a, 0x80808080, v, 0xEA;
prmt.b32 a, v, 0, 0x2404;
mul.rn.f16x2 $0, a, $5;
prmt.b32 a, u, 0, 0x2404;
mul.rn.f16x2 $1, a, $5;
and.b32 b, v, 0xFF00FF00;
mul.rn.f16x2 $2, b, $5;
and.b32 b, u, 0xFF00FF00;
mul.rn.f16x2 $3, b, $5;
}""")
# The same of eight E4M3 channels in two words.
_FP8_WORDS = gl.constexpr(
    "{\n.reg .b32 t, a;\n"
    + "".join(
        f"""
prmt.b32 t, $4, $5, {((4 + k) << 12) | (k << 4):#06x};
shr.b32 a, t, 1;
and.b32 a, a, 0x3F803F80;
lop3.b32 a, t, 0x80008000, a, 0xEA;
mul.rn.f16x2 ${k}, a, $6;
"""
        for k in range(4)
    )
    + "}\n"
)


@gluon.jit
def _here(SPLITS: gl.constexpr):
    """The token and split of this program."""
    if SPLITS == 1:
        token = gl.program_id(0)
        split = gl.program_id(1)  # none, which the compiler may not know: it fails otherwise
    else:
        place = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        token = place // SPLITS
        split = place % SPLITS
    return token.to(gl.int64), split


@gluon.jit
def _span(split, used, TILES: gl.constexpr, SPLITS: gl.constexpr):
    """A split's first tile and how many it takes: the first has the window's two, then its share of
    entries.
    """
    if SPLITS == 1:
        base = 0
        count = 2 + used
    else:
        share: gl.constexpr = (TILES + 2 + SPLITS - 1) // SPLITS
        beside: gl.constexpr = share - 2 if share > 2 else 0
        each: gl.constexpr = (TILES - beside + SPLITS - 2) // (SPLITS - 1)
        base = gl.where(split == 0, 0, 2 + beside + (split - 1) * each)
        count = gl.maximum(gl.minimum(gl.where(split == 0, 2 + beside, each), 2 + used - base), 0)
    return base, count


@gluon.jit
def _used(used_space):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(used_space.load(layout), axis=0)


@gluon.jit
def _part_of(tile, PARTS: gl.constexpr, part):
    """One of the equal parts of a tile's channels, as words [64, 256 / PARTS]."""
    return tile._reinterpret(gl.int32, [PARTS, 64, 256 // PARTS], _SHARED_WORDS).index(part)


@gluon.jit
def _in_place(a, b, c, d):
    """Four pairs of each of [M, N] words of eight channels as words [M, 4 N] of a tile."""
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    four = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 1, 3, 2))
    four = gl.permute(gl.reshape(four, [M, N // 4, 4, 4]), (0, 1, 3, 2))
    return gl.reshape(four, [M, 4 * N])


@gluon.jit
def _ask_entries(pages, keys, raw, raw_s, ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr,
                 SCALES: gl.constexpr):  # fmt: skip
    """Asks for the rows of 64 entries: payload to raw, scales to raw_s."""
    halves = raw._reinterpret(gl.int32, [2, 64, 32], _RING)
    place = gl.maximum(keys.load(gl.SliceLayout(1, _COPY)), 0)
    start = pages + ((place // ROWS).to(gl.int64) * PAGE + PAYLOAD + (place % ROWS) * 256)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, _COPY))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(halves.index(0), source)
    async_copy.async_copy_global_to_shared(halves.index(1), source + 32)
    place = gl.maximum(keys.load(gl.SliceLayout(1, _COPY_S)), 0)
    start = pages + ((place // ROWS).to(gl.int64) * PAGE + SCALES + (place % ROWS) * 32)
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, _COPY_S))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(raw_s, source)


@gluon.jit
def _expand_entries(raw, raw_s, tile, part: gl.constexpr):
    """32 of 64 raw entries as fp16·2^-7 in a tile."""
    halves = raw._reinterpret(gl.int32, [2, 64, 32], _RING)
    codes_space = raw_s._reinterpret(gl.uint8, [64, 32], _PLAIN2).slice(32 * part, 32, dim=0)
    for h in gl.static_range(2):
        words = halves.index(h).slice(32 * part, 32, dim=0).load(_RAW)
        codes = codes_space.slice(16 * h, 16, dim=1).load(gl.SliceLayout(2, _RAW3)).to(gl.int32)
        bits = codes * 0x00800080  # E4M3's bits as two fp16: value·2^-8
        power = gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x78007800], dtype=gl.int32, is_pure=True, pack=1
        )
        wide = power[:, :, None] + gl.full([32, 16, 2], 0, gl.int32, _RAW3)
        scale = gl.convert_layout(gl.reshape(wide, [32, 32]), _RAW, assert_trivial=True)
        a, b, c, d = gl.inline_asm_elementwise(
            _FP4_WORDS, "=&r,=&r,=&r,=&r,r,r", [words, scale],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        _part_of(tile, 2, h).slice(32 * part, 32, dim=0).store(_in_place(a, b, c, d))


@gluon.jit
def _load_window(window, here, h: gl.constexpr):
    """Half h of the raw words [64, 64] and scale bytes [64, 8] of 64 window rows."""
    row = gl.maximum(here.load(gl.SliceLayout(1, _NEAR)), 0)
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, _NEAR))
    start = (window + (row.to(gl.int64) * 528 + h * 256)).to(gl.pointer_type(gl.int32), bitcast=True)
    words = gl.load(start[:, None] + word[None, :])
    layout: gl.constexpr = gl.SliceLayout(2, _NEAR3)
    row = gl.maximum(here.load(gl.SliceLayout(1, layout)), 0)
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))
    return words, gl.load((window + (row.to(gl.int64) * 528 + 512 + h * 8))[:, None] + group[None, :]).to(gl.int32)


@gluon.jit
def _expand_window(words, code, tile, h: gl.constexpr):
    """The same of half the channels of 64 window rows."""
    normal = (gl.minimum(code, 141) - 111) << 10
    power = (
        gl.where(code >= 112, normal, gl.where(code >= 102, 1 << (gl.maximum(code, 102) - 102), 0))
        * 0x00010001
    )
    wide = power[:, :, None] + gl.full([64, 8, 4], 0, gl.int32, _NEAR3)
    scale = gl.convert_layout(gl.reshape(wide, [64, 32]), _NEAR_PAIR, assert_trivial=True)
    low, high = gl.split(gl.reshape(words, [64, 32, 2]))
    low = gl.convert_layout(low, _NEAR_PAIR, assert_trivial=True)
    high = gl.convert_layout(high, _NEAR_PAIR, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        _FP8_WORDS, "=&r,=&r,=&r,=&r,r,r,r", [low, high, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    _part_of(tile, 2, h).store(_in_place(a, b, c, d))


@gluon.jit
def _window(
    q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, window_count, row_count, near_space, q_tile, tiles, bars,
    h: gl.constexpr, token, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """Half h of the channels of the window's two tiles, and a quarter of q while they are on their way."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    near = gl.arange(0, 128, layout=line)
    row = gl.load(rows_ptr + token * row_count + near, mask=near < row_count, other=-1)
    row = gl.maximum(gl.minimum(row, window_count - 1), -1).to(gl.int32)
    near_space._reinterpret(gl.int32, [128], _FLAT).store(row)
    words, code = _load_window(window_ptr, near_space.index(0), h)
    mbarrier.wait(bars.index(_NAMED), 0)
    _query_shared(q_ptr, cos_ptr, sin_ptr, q_tile, token, h, HALF_ROPE)
    mbarrier.arrive(bars.index(_Q_READY), count=1)
    more, more_code = _load_window(window_ptr, near_space.index(1), h)
    _expand_window(words, code, tiles.index(0), h)
    mbarrier.arrive(bars.index(_READY), count=1)
    _expand_window(more, more_code, tiles.index(1), h)
    mbarrier.arrive(bars.index(_READY + 1), count=1)


@gluon.jit
def _produce(
    pages_ptr, table_ptr, seq_ptr, entries_ptr, page_count, sequences, table_width, entry_count,
    keys_space, used_space, ring, ring_s, tiles, bars,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Fetches entries two tiles ahead and expands them into shared memory, 32 keys a turn."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token, split = _here(SPLITS)
    used = 0
    if TILES > 0:
        lane = gl.arange(0, NAMES, layout=line)
        entry = gl.load(entries_ptr + token * entry_count + lane, mask=lane < entry_count, other=-1)
        sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
        used = (gl.max(gl.where(entry >= 0, lane + 1, 0), axis=0) + 63) // 64
    used_space.store(gl.full([32], 0, gl.int32, line) + used)
    mbarrier.arrive(bars.index(_NAMED), count=1)
    base, count = _span(split, used, TILES, SPLITS)
    if TILES > 0:
        column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column, mask=entry >= 0, other=0).to(gl.int32)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1)
        place = gl.where(entry >= 0, page * ROWS + gl.maximum(entry, 0) % ROWS, -1)
        keys_space._reinterpret(gl.int32, [NAMES], _FLAT).store(place)
        barrier()
        first = gl.where(split == 0, 2, 0)
        at = 0
        after = 0
        for t in range(first - 2, count):
            if t >= first:
                async_copy.wait_group(1)
                barrier()
            if t + 2 < count:
                _ask_entries(
                    pages_ptr, keys_space.index(base + t), ring.index(after), ring_s.index(after),
                    ROWS, PAGE, PAYLOAD, SCALES,
                )  # fmt: skip
            async_copy.commit_group()
            after = gl.where(after == 2, 0, after + 1)
            if t >= first:
                slot = t & 1
                for part in gl.static_range(2):
                    mbarrier.wait(bars.index(_FREE + 2 * slot + part), ((t >> 1) & 1) ^ 1)
                    _expand_entries(ring.index(at), ring_s.index(at), tiles.index(slot), part)
                mbarrier.arrive(bars.index(_READY + slot), count=2)
                at = gl.where(at == 2, 0, at + 1)
    async_copy.wait_group(0)


@gluon.jit
def _half_tile(words):
    return words._reinterpret(gl.float16, [64, 512], _SHARED)


@gluon.jit
def _pack_half(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(words):
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _turned(words, pair, cos_ptr, sin_ptr, token, COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr):
    """Words of two bf16 channels as two fp32, turned; COLUMN: one past the last pair."""
    even, odd = _unpack(words)
    if COLUMN > 256 - HALF_ROPE:
        turn = pair - (256 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        even, odd = _unpack(bf16_words(even * cos - odd * sin, even * sin + odd * cos))
    return even, odd


@gluon.jit
def _far_pairs(x, N: gl.constexpr):
    """[64, N], a channel of each pair, as those of channels 0 to 3 of each eight and those of 4 to 7."""
    x = gl.permute(gl.reshape(x, [64, N // 16, 4, 2, 2]), (0, 1, 2, 4, 3))
    return gl.split(x)


@gluon.jit
def _query_left(q_ptr, cos_ptr, sin_ptr, token, HALF_ROPE: gl.constexpr):
    """The first 256 channels of q, in the tile's order, as a left operand in registers."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _Q_WORDS))
    pair = gl.arange(0, 128, layout=gl.SliceLayout(0, _Q_WORDS))
    start = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    words = gl.load(start + head[:, None] * 256 + pair[None, :])
    even, odd = _turned(words, pair, cos_ptr, sin_ptr, token, 128, HALF_ROPE)
    even_low, even_high = _far_pairs(even, 128)
    odd_low, odd_high = _far_pairs(odd, 128)
    both = gl.join(_pack_half(even_low, even_high), _pack_half(odd_low, odd_high))
    both = gl.permute(both, (0, 1, 3, 4, 2))  # [64, 8, 2, 2, 4]
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [both], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, 256]), _LEFT, assert_trivial=True)


@gluon.jit
def _query_shared(q_ptr, cos_ptr, sin_ptr, q_tile, token, PART: gl.constexpr, HALF_ROPE: gl.constexpr):
    """128 channels from 256 + 128 PART on to shared memory."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _Q_PART))
    pair = 128 + 64 * PART + gl.arange(0, 64, layout=gl.SliceLayout(0, _Q_PART))
    start = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    words = gl.load(start + head[:, None] * 256 + pair[None, :])
    even, odd = _turned(words, pair, cos_ptr, sin_ptr, token, 192 + 64 * PART, HALF_ROPE)
    even_low, even_high = _far_pairs(even, 64)
    odd_low, odd_high = _far_pairs(odd, 64)
    both = gl.join(_pack_half(even_low, even_high), _pack_half(odd_low, odd_high))
    both = gl.permute(both, (0, 1, 3, 4, 2))  # [64, 4, 2, 2, 4]
    parts = q_tile._reinterpret(gl.int32, [2, 64, 64], _SHARED_WORDS)
    parts.index(PART).store(gl.reshape(both, [64, 64]))
    fence_async_shared()


@gluon.constexpr_function
def _query_layout(N):
    """Of words [64, N / 2] of N channels of q, as a left operand has them."""
    groups = [[0, 16 << i] for i in range((N // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *groups], [[0, 4], [0, 8], *_ROWS8], [[16, 0], [32, 0]], [], [64, N // 2]
    )


@gluon.jit
def _present(near_space, keys_space, tile, TILES: gl.constexpr, layout: gl.constexpr):
    """A number for each key of a tile, below zero where it is absent."""
    present = near_space.index(gl.minimum(tile, 1)).load(layout)
    if TILES > 0:
        far = keys_space.index(gl.maximum(tile - 2, 0)).load(layout)
        present = gl.where(tile < 2, present, far)
    return present


@gluon.jit
def _score(
    q_ptr, cos_ptr, sin_ptr, sink_ptr, scale,
    near_space, keys_space, used_space, q_tile, tiles, p_shared, shrink_shared, raised_shared, lse_shared, bars,
    TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Scores and softmax."""
    token, split = _here(SPLITS)
    mbarrier.wait(bars.index(_NAMED), 0)
    left = _query_left(q_ptr, cos_ptr, sin_ptr, token, HALF_ROPE)
    base, count = _span(split, _used(used_space), TILES, SPLITS)
    mbarrier.wait(bars.index(_Q_READY), 0)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, _SCORE))
    right = q_tile._reinterpret(gl.float16, [64, 256], _SHARED)
    for t in range(count):
        slot = t & 1
        mbarrier.wait(bars.index(_READY + slot), (t >> 1) & 1)
        fence_async_shared()
        tile = _half_tile(tiles.index(slot))
        s = gl.full([64, 64], 0.0, gl.float32, _SCORE)
        s = warpgroup_mma(
            left, tile.slice(0, 256, dim=1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma(right, tile.slice(256, 256, dim=1).permute((1, 0)), s, is_async=True)
        least = gl.min(_present(near_space, keys_space, base + t, TILES, _EACH), axis=0)
        s = warpgroup_mma_wait(0, deps=[s])
        if least < 0:
            present = _present(near_space, keys_space, base + t, TILES, gl.SliceLayout(0, _SCORE)) >= 0
            s = gl.where(present[None, :], s, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, axis=1) * scale)
        raised = new_top > top + SLACK
        new_top = gl.where(raised, new_top, top)
        raised = gl.max(gl.reshape(raised.to(gl.int32), [4, 16]), axis=1)
        p = gl.exp2(s * scale - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        top = new_top
        total = total * shrink + gl.sum(p, axis=1)
        half = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=False, pack=2
        )
        mbarrier.wait(bars.index(_P_FREE), (t & 1) ^ 1)
        p_shared.store(half)
        shrink_shared.store(shrink)
        raised_shared.store(raised)
        fence_async_shared()
        mbarrier.arrive(bars.index(_P_READY), count=1)
    if SPLITS > 1:
        alive = total > 0
        factor = gl.where(alive, 128.0 / gl.where(alive, total, 1.0), 0.0)
        lse = gl.where(alive, top + gl.log2(gl.where(alive, total, 1.0)), float("-inf"))
    else:
        sink = gl.load(sink_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE))) * 1.4426950408889634
        peak = gl.maximum(top, sink)
        factor = gl.exp2(top - peak) * 128.0 / (total * gl.exp2(top - peak) + gl.exp2(sink - peak))
        lse = top
    mbarrier.wait(bars.index(_P_FREE), (count & 1) ^ 1)
    shrink_shared.store(factor)
    lse_shared.store(lse)
    mbarrier.arrive(bars.index(_P_READY), count=1)


@gluon.jit
def _last_half(x, layout: gl.constexpr):
    """The last half of the columns of [64, N]."""
    _, x = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _keep_angles(angles, cos_ptr, sin_ptr, token, HALF_ROPE: gl.constexpr):
    """The angles of the last 32 pairs to shared memory; 1 and 0 where nothing turns."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turn = gl.arange(0, 32, layout=line) - (32 - HALF_ROPE)
    angles.index(0).store(gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0))
    angles.index(1).store(gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0))


@gluon.jit
def _write(
    o, factor, angles, out_ptr, part_ptr, cos_ptr, sin_ptr,
    COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Writes 256 channels from COLUMN on, eight neighbours a thread."""
    token, split = _here(SPLITS)
    TURNED: gl.constexpr = SPLITS == 1 and HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE
    o = gl.permute(gl.reshape(o * factor[:, None], [64, 8, 2, 2, 4, 2]), (0, 1, 4, 5, 2, 3))
    even, odd = gl.split(o)  # [64, 8 groups, 4, 2, 2]
    even = gl.convert_layout(gl.reshape(even, [64, 128]), _Q_WORDS, assert_trivial=True)
    odd = gl.convert_layout(gl.reshape(odd, [64, 128]), _Q_WORDS, assert_trivial=True)
    if SPLITS > 1:
        words = _pack_half(even, odd)
        start = part_ptr.to(gl.pointer_type(gl.int32)) + (token * SPLITS + split) * 16384
    else:
        words = bf16_words(even, odd)
        start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    if TURNED and HALF_ROPE > 32:
        turn = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, _Q_WORDS)) - (256 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        words = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
    if TURNED and HALF_ROPE <= 32:
        half: gl.constexpr = _query_layout(128)
        last: gl.constexpr = _query_layout(64)
        cos = angles.index(0).load(gl.SliceLayout(0, last))[None, :]
        sin = angles.index(1).load(gl.SliceLayout(0, last))[None, :]
        even = _last_half(_last_half(even, half), last)
        odd = _last_half(_last_half(odd, half), last)
        turned = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
        first, second = gl.split(gl.permute(gl.reshape(words, [64, 2, 64]), (0, 2, 1)))
        third, _ = gl.split(gl.permute(gl.reshape(second, [64, 2, 32]), (0, 2, 1)))
        second = gl.permute(gl.join(gl.convert_layout(third, last, assert_trivial=True), turned), (0, 2, 1))
        second = gl.convert_layout(gl.reshape(second, [64, 64]), half, assert_trivial=True)
        first = gl.convert_layout(first, half, assert_trivial=True)
        words = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [64, 128])
        words = gl.convert_layout(words, _Q_WORDS, assert_trivial=True)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _Q_WORDS))
    pair = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, _Q_WORDS))
    gl.store(start + head[:, None] * 256 + pair[None, :], words)


@gluon.jit
def _singles(words):
    """The two fp16 of words, fp32."""
    return gl.inline_asm_elementwise(
        SINGLES, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """The two halves of the columns of [64, N]."""
    first, second = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(
        second, layout, assert_trivial=True
    )


@gluon.jit
def _swap(
    o, factor, lse_shared, part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
    COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """For a query that two programs share: each gives the other half of its 256 channels from COLUMN on, and joins
    and writes the other half, which it keeps in registers.
    """
    layout: gl.constexpr = _query_layout(128)
    o = gl.permute(gl.reshape(o * factor[:, None], [64, 8, 2, 2, 4, 2]), (0, 1, 4, 5, 2, 3))
    even, odd = gl.split(o)
    even_first, even_second = _halves(gl.reshape(even, [64, 128]), layout)
    odd_first, odd_second = _halves(gl.reshape(odd, [64, 128]), layout)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    pair = COLUMN // 2 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    here = split * 64
    there = 64 - here
    words = part_ptr.to(gl.pointer_type(gl.int32)) + token * 32768 + (head * 256)[:, None] + pair[None, :]
    given = _pack_half(gl.where(split == 0, even_second, even_first), gl.where(split == 0, odd_second, odd_first))
    gl.store(words + (split * 16384 + there), given)
    own = lse_shared.load(gl.SliceLayout(1, layout))
    if COLUMN == 0:
        gl.store(lse_ptr + (token * 2 + split) * 64 + head, own)
    sink = gl.load(sink_ptr + head) * 1.4426950408889634
    TURNED: gl.constexpr = HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE
    if TURNED:
        turn = pair + (here - 256 + HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
    even = gl.where(split == 0, even_first, even_second)
    odd = gl.where(split == 0, odd_first, odd_second)
    arrive(spot, gl.where(split == 0, 61, 1) if COLUMN == 0 else 1)
    wait_for(spot, goal)
    other = gl.load(lse_ptr + (token * 2 + 1 - split) * 64 + head)
    a, b = _singles(gl.load(words + ((1 - split) * 16384 + here)))
    peak = gl.maximum(gl.maximum(own, other), sink)
    own = gl.exp2(own - peak)
    other = gl.exp2(other - peak)
    inverse = 1.0 / (gl.exp2(sink - peak) + own + other)
    own = (own * inverse)[:, None]
    other = (other * inverse)[:, None]
    even = own * even + other * a
    odd = own * odd + other * b
    if TURNED:
        out = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
    else:
        out = bf16_words(even, odd)
    start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384 + (head * 256)[:, None] + pair[None, :]
    gl.store(start + here, out)


@gluon.jit
def _weigh(
    q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr,
    window_count, row_count,
    near_space, used_space, q_tile, tiles, p_shared, shrink_shared, raised_shared, lse_shared, angles, bars,
    PART: gl.constexpr, TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """256 channels from 256 PART on: of the window's keys, and of the output."""
    token, split = _here(SPLITS)
    spot = count_ptr + COUNTER_STEP * token
    goal = goal_of(spot) if SPLITS > 1 else 0
    if split == 0:
        _window(
            q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, window_count, row_count, near_space, q_tile, tiles, bars,
            PART, token, HALF_ROPE,
        )  # fmt: skip
    else:
        mbarrier.wait(bars.index(_NAMED), 0)
        _query_shared(q_ptr, cos_ptr, sin_ptr, q_tile, token, PART, HALF_ROPE)
        mbarrier.arrive(bars.index(_Q_READY), count=1)
    if SPLITS == 1 and PART == 1 and HALF_ROPE > 0 and HALF_ROPE <= 32:
        _keep_angles(angles, cos_ptr, sin_ptr, token, HALF_ROPE)
    _, count = _span(split, _used(used_space), TILES, SPLITS)
    o = gl.full([64, 256], 0.0, gl.float32, _ACC)
    for t in range(count):
        slot = t & 1
        mbarrier.wait(bars.index(_P_READY), t & 1)
        fence_async_shared()
        if gl.max(raised_shared.load(_FOUR), axis=0) > 0:
            o = o * shrink_shared.load(gl.SliceLayout(1, _ACC))[:, None]
        tile = _half_tile(tiles.index(slot)).slice(256 * PART, 256, dim=1)
        o = warpgroup_mma(p_shared.slice(0, 32, dim=1), tile.slice(0, 32, dim=0), o, is_async=True)
        o = warpgroup_mma(p_shared.slice(32, 32, dim=1), tile.slice(32, 32, dim=0), o, is_async=True)
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(bars.index(_FREE + 2 * slot), count=1)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(bars.index(_P_FREE), count=1)
        mbarrier.arrive(bars.index(_FREE + 2 * slot + 1), count=1)
    mbarrier.wait(bars.index(_P_READY), count & 1)
    factor = shrink_shared.load(gl.SliceLayout(1, _ACC))
    if SPLITS == 2:
        _swap(
            o, factor, lse_shared, part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
            256 * PART, HALF_ROPE,
        )  # fmt: skip
    if SPLITS > 2 and PART == 0:
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
        gl.store(lse_ptr + (token * SPLITS + split) * 64 + head, lse_shared.load(gl.SliceLayout(1, _ACC)))
    if SPLITS != 2:
        _write(o, factor, angles, out_ptr, part_ptr, cos_ptr, sin_ptr, 256 * PART, HALF_ROPE, SPLITS)
    if SPLITS > 2:
        join_share(
            part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
            256 * PART, HALF_ROPE, SPLITS,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["page_count", "sequences", "table_width", "window_count", "entry_count", "row_count"]
)
def attend_trades(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr, part_ptr, lse_ptr, count_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, scale,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
    WEIGH_REGISTERS: gl.constexpr, PRODUCE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (tokens, SPLITS). SPLITS (at most 32) neighbours in launch order share a query's keys, wait for
    each other and join a share of the heads each. NAMES: entries, rounded up to a power of two. Launched with
    `launch_pdl`.
    """
    grid_wait()
    grid_release()
    near_space = gl.allocate_shared_memory(gl.int32, [2, 64], _FLAT)
    keys_space = gl.allocate_shared_memory(gl.int32, [NAMES // 64, 64], _FLAT)
    used_space = gl.allocate_shared_memory(gl.int32, [32], _FLAT)
    ring = gl.allocate_shared_memory(gl.int32, [3, 64, 64], _RING)
    ring_s = gl.allocate_shared_memory(gl.int32, [3, 64, 8], _PLAIN2)
    q_tile = gl.allocate_shared_memory(gl.int32, [64, 128], _SHARED_WORDS)
    tiles = gl.allocate_shared_memory(gl.int32, [2, 64, 256], _SHARED_WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [64, 64], _SHARED)
    shrink_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    lse_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    raised_shared = gl.allocate_shared_memory(gl.int32, [4], _FLAT)
    angles = gl.allocate_shared_memory(gl.float32, [2, 32], _FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(10):
        mbarrier.init(bars.index(b), count=1 if b == _NAMED or b == _P_READY else 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score, (
                q_ptr, cos_ptr, sin_ptr, sink_ptr, scale,
                near_space, keys_space, used_space, q_tile, tiles, p_shared, shrink_shared, raised_shared,
                lse_shared, bars, TILES, HALF_ROPE, SPLITS,
            )),
            (_weigh, (
                q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr,
                window_count, row_count,
                near_space, used_space, q_tile, tiles, p_shared, shrink_shared, raised_shared, lse_shared, angles,
                bars, 0, TILES, HALF_ROPE, SPLITS,
            )),
            (_weigh, (
                q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, count_ptr,
                window_count, row_count,
                near_space, used_space, q_tile, tiles, p_shared, shrink_shared, raised_shared, lse_shared, angles,
                bars, 1, TILES, HALF_ROPE, SPLITS,
            )),
            (_produce, (
                pages_ptr, table_ptr, seq_ptr, entries_ptr, page_count, sequences, table_width, entry_count,
                keys_space, used_space, ring, ring_s, tiles, bars,
                ROWS, PAGE, PAYLOAD, SCALES, TILES, NAMES, SPLITS,
            )),
        ],
        [4, 4, 4], [WEIGH_REGISTERS, WEIGH_REGISTERS, PRODUCE_REGISTERS],
    )  # fmt: skip
