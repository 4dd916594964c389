# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention for Hopper's matrix units, 64 heads of 512: one trade scores, two expand and weigh."""

from __future__ import annotations

from cedar.kernels.grid_hopper import (
    COUNTER_STEP,
    SINGLES,
    arrive,
    barrier,
    goal_of,
    grid_release,
    grid_wait,
    wait_for,
)
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

# Registers a thread of those who weigh (twice); those who score have what is left.
WEIGH_REGISTERS = 160
AHEAD = gl.constexpr(2)  # parts of a tile that are expanded before the product starts beside which the rest is
SLACK = gl.constexpr(8.0)  # by so many powers of two a probability may exceed one before all are shrunk


def _linear(registers, lanes, warps, shape):
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], shape))


_ROWS8 = [[1, 0], [2, 0], [4, 0]]
# Raw words of half the channels of 16 entries [16, 32]: a thread takes four neighbours of a row, eight lanes
# eight rows.
_RAW = _linear([[0, 1], [0, 2]], [*_ROWS8, [0, 4], [0, 8]], [[8, 0], [0, 16]], [16, 32])
_RAW3 = _linear(
    [[0, 0, 1], [0, 1, 0]],
    [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 2, 0], [0, 4, 0]],
    [[8, 0, 0], [0, 8, 0]],
    [16, 16, 2],
)
# A quarter's raw words of window rows [64, 32], pairs of them [64, 16], and their scales' spread [64, 4, 4].
_NEAR = _linear([[0, 1], [0, 2], [0, 4], [32, 0]], [*_ROWS8, [0, 8], [0, 16]], [[8, 0], [16, 0]], [64, 32])
_NEAR_PAIR = _linear([[0, 1], [0, 2], [32, 0]], [*_ROWS8, [0, 4], [0, 8]], [[8, 0], [16, 0]], [64, 16])
_NEAR3 = _linear(
    [[0, 0, 1], [0, 0, 2], [32, 0, 0]],
    [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 1, 0], [0, 2, 0]],
    [[8, 0, 0], [16, 0, 0]],
    [64, 4, 4],
)
# A row's four words of scales, and rows on their way from memory, 16 bytes a thread.
_CODES = _linear([[0, 1], [0, 2], [32, 0]], [*_ROWS8, [0, 0], [0, 0]], [[8, 0], [16, 0]], [64, 4])
_COPY = _linear([[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [16, 32])
_COPY_S = _linear([[0, 1], [0, 2]], [[1, 0], [2, 0], [4, 0], [8, 0], [0, 0]], [[0, 0], [0, 0]], [16, 4])
_COPY_NEAR = _linear(
    [[0, 1], [0, 2], [16, 0], [32, 0]],
    [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
    [[4, 0], [8, 0]],
    [64, 32],
)
_COPY_NEAR_S = _linear(
    [[0, 1], [0, 2]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0], [0, 0]], [64, 4]
)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_RING = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SCORE, 2))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_FOUR = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [4]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
# Words [64, 128] of q's first half as the left operand wants them: a thread loads eight channels at a time.
_Q_WORDS = _linear(
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
    [[0, 4], [0, 8], *_ROWS8],
    [[16, 0], [32, 0]],
    [64, 128],
)
_Q_SHARED = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))

# Barriers: how many tiles are used is known; a tile is ready, three of them; p and its shrinking factors are
# ready, and free again.
_NAMED, _READY, _P_READY, _P_FREE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(4), gl.constexpr(5)

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
def _ask_entries(
    pages, keys, raw, raw_s, more, h: gl.constexpr, part: gl.constexpr,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Asks for half h of the channels of 16 of 64 entries, if any more are wanted."""
    keys = keys.slice(16 * part, 16, dim=0)
    place = gl.maximum(keys.load(gl.SliceLayout(1, _COPY)), 0)
    start = pages + ((place // ROWS).to(gl.int64) * PAGE + PAYLOAD + h * 128 + (place % ROWS) * 256)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, _COPY))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(
        raw.slice(16 * part, 16, dim=0), source, mask=gl.full([16, 32], 0, gl.int32, _COPY) < more
    )
    place = gl.maximum(keys.load(gl.SliceLayout(1, _COPY_S)), 0)
    start = pages + ((place // ROWS).to(gl.int64) * PAGE + SCALES + h * 16 + (place % ROWS) * 32)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, _COPY_S))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(
        raw_s.slice(16 * part, 16, dim=0), source, mask=gl.full([16, 4], 0, gl.int32, _COPY_S) < more
    )


@gluon.jit
def _ask_window(window, keys, raw, raw_s, quarter):
    """Asks for a quarter of the channels of 64 window rows."""
    row = gl.maximum(keys.load(gl.SliceLayout(1, _COPY_NEAR)), 0)
    start = window + (row.to(gl.int64) * 528 + quarter * 128)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, _COPY_NEAR))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(raw, source)
    row = gl.maximum(keys.load(gl.SliceLayout(1, _COPY_NEAR_S)), 0)
    start = window + (row.to(gl.int64) * 528 + 512)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, _COPY_NEAR_S))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(raw_s, source)


@gluon.jit
def _expand_entries(raw, raw_s, tile, h: gl.constexpr, part: gl.constexpr):
    """Half the channels of 16 raw entries as fp16·2^-7 in a tile."""
    words = raw.slice(16 * part, 16, dim=0).load(_RAW)
    codes_space = raw_s._reinterpret(gl.uint8, [64, 16], _PLAIN2).slice(16 * part, 16, dim=0)
    codes = codes_space.load(gl.SliceLayout(2, _RAW3)).to(gl.int32)
    bits = codes * 0x00800080  # E4M3's bits as two fp16: value·2^-8
    power = gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x78007800], dtype=gl.int32, is_pure=True, pack=1
    )
    wide = power[:, :, None] + gl.full([16, 16, 2], 0, gl.int32, _RAW3)
    scale = gl.convert_layout(gl.reshape(wide, [16, 32]), _RAW, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        _FP4_WORDS, "=&r,=&r,=&r,=&r,r,r", [words, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    _part_of(tile, 2, h).slice(16 * part, 16, dim=0).store(_in_place(a, b, c, d))


@gluon.jit
def _expand_window(raw, raw_s, tile, quarter):
    """The same of a quarter of the channels of 64 window rows."""
    words = raw.load(_NEAR)
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, _CODES))
    four = gl.sum(gl.where(column[None, :] == quarter, raw_s.load(_CODES), 0), axis=1)
    four = gl.convert_layout(four, gl.SliceLayout(1, gl.SliceLayout(2, _NEAR3)), assert_trivial=True)
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _NEAR3)))
    code = (four[:, None] >> (8 * group)[None, :]) & 255
    normal = (gl.minimum(code, 141) - 111) << 10
    power = (
        gl.where(code >= 112, normal, gl.where(code >= 102, 1 << (gl.maximum(code, 102) - 102), 0))
        * 0x00010001
    )
    wide = power[:, :, None] + gl.full([64, 4, 4], 0, gl.int32, _NEAR3)
    scale = gl.convert_layout(gl.reshape(wide, [64, 16]), _NEAR_PAIR, assert_trivial=True)
    low, high = gl.split(gl.reshape(words, [64, 16, 2]))
    low = gl.convert_layout(low, _NEAR_PAIR, assert_trivial=True)
    high = gl.convert_layout(high, _NEAR_PAIR, assert_trivial=True)
    a, b, c, d = gl.inline_asm_elementwise(
        _FP8_WORDS, "=&r,=&r,=&r,=&r,r,r,r", [low, high, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    _part_of(tile, 4, quarter).store(_in_place(a, b, c, d))


@gluon.jit
def _expand_and_ask(
    pages, following, raw, raw_s, tile, ready, more, h: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Parts FIRST to LAST of a tile from raw rows to fp16, and asks for the same of the following tile."""
    for part in gl.static_range(FIRST, LAST):
        if part % 2 == 0:
            async_copy.wait_group(1)
            barrier()
        _expand_entries(raw, raw_s, tile, h, part)
        _ask_entries(pages, following, raw, raw_s, more, h, part, ROWS, PAGE, PAYLOAD, SCALES)
        if part % 2 == 1:
            async_copy.commit_group()
    if FIRST < 4 and LAST == 4:
        mbarrier.arrive(ready, count=1)


@gluon.jit
def _near_raw(tiles, u, h: gl.constexpr):
    """Where unit u of the window waits: in the place of the tile after its own."""
    place = tiles.index(1 + (u >> 1))
    raw = place._reinterpret(gl.int32, [8, 64, 32], _RING).index(4 * h + (u & 1))
    return raw, place._reinterpret(gl.int32, [64, 64, 4], _PLAIN2).index(32 * h + 16)


@gluon.jit
def _prepare(
    pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count,
    near_space, keys_space, used_space, raw, raw_s, tiles, bars, h: gl.constexpr,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Names all keys, asks for the first entries, and expands half h of the window's two tiles."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token, split = _here(SPLITS)
    near = gl.arange(0, 128, layout=line)
    row = gl.load(rows_ptr + token * row_count + near, mask=near < row_count, other=-1)
    if TILES > 0:
        lane = gl.arange(0, NAMES, layout=line)
        entry = gl.load(entries_ptr + token * entry_count + lane, mask=lane < entry_count, other=-1)
        sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
    row = gl.maximum(gl.minimum(row, window_count - 1), -1).to(gl.int32)
    near_space._reinterpret(gl.int32, [128], _FLAT).store(row)
    used = 0
    if TILES > 0:
        used = (gl.max(gl.where(entry >= 0, lane + 1, 0), axis=0) + 63) // 64
    if h == 0:
        used_space.store(gl.full([32], 0, gl.int32, line) + used)
        mbarrier.arrive(bars.index(_NAMED), count=1)
    base, count = _span(split, used, TILES, SPLITS)
    if split == 0:
        for u in range(2):
            near_raw, near_raw_s = _near_raw(tiles, u, h)
            _ask_window(window_ptr, near_space.index(0), near_raw, near_raw_s, 2 * h + u)
            async_copy.commit_group()
    if TILES > 0:
        column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column, mask=entry >= 0, other=0).to(gl.int32)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1)
        place = gl.where(entry >= 0, page * ROWS + gl.maximum(entry, 0) % ROWS, -1)
        far = keys_space._reinterpret(gl.int32, [NAMES], _FLAT)
    if split == 0:
        for u in range(4):
            async_copy.wait_group(1)
            barrier()
            if u < 2:
                near_raw, near_raw_s = _near_raw(tiles, u + 2, h)
                _ask_window(window_ptr, near_space.index(1), near_raw, near_raw_s, 2 * h + u)
            if TILES > 0:  # noqa: SIM102
                if u == 3:
                    far.store(place)
                    barrier()
                    for part in gl.static_range(4):
                        _ask_entries(
                            pages_ptr, keys_space.index(0), raw, raw_s, count - 2, h, part,
                            ROWS, PAGE, PAYLOAD, SCALES,
                        )  # fmt: skip
                        if part == 1:
                            async_copy.commit_group()
            async_copy.commit_group()
            near_raw, near_raw_s = _near_raw(tiles, u, h)
            _expand_window(near_raw, near_raw_s, tiles.index(u >> 1), 2 * h + (u & 1))
            if (u & 1) == 1:
                mbarrier.arrive(bars.index(_READY + (u >> 1)), count=1)
    else:
        if TILES > 0:
            far.store(place)
            barrier()
            for part in gl.static_range(4):
                _ask_entries(
                    pages_ptr, keys_space.index(gl.minimum(base - 2, TILES - 1)), raw, raw_s, count, h, part,
                    ROWS, PAGE, PAYLOAD, SCALES,
                )  # fmt: skip
                if part % 2 == 1:
                    async_copy.commit_group()
    return base, count


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


@gluon.constexpr_function
def _query_layout(N):
    """Of words [64, N / 2] of N channels of q, as a left operand has them."""
    groups = [[0, 16 << i] for i in range((N // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *groups], [[0, 4], [0, 8], *_ROWS8], [[16, 0], [32, 0]], [], [64, N // 2]
    )


@gluon.jit
def _query(q_ptr, cos_ptr, sin_ptr, token, COLUMN: gl.constexpr, N: gl.constexpr, HALF_ROPE: gl.constexpr):
    """N channels of q from COLUMN on, in the tile's order, as a left operand in registers."""
    layout: gl.constexpr = _query_layout(N)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    pair = COLUMN // 2 + gl.arange(0, N // 2, layout=gl.SliceLayout(0, layout))
    start = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    words = gl.load(start + head[:, None] * 256 + pair[None, :])
    even, odd = _turned(words, pair, cos_ptr, sin_ptr, token, (COLUMN + N) // 2, HALF_ROPE)
    even_low, even_high = _far_pairs(even, N // 2)
    odd_low, odd_high = _far_pairs(odd, N // 2)
    both = gl.join(_pack_half(even_low, even_high), _pack_half(odd_low, odd_high))
    both = gl.permute(both, (0, 1, 3, 4, 2))  # [64, N / 32, 2, 2, 4]
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [both], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, N]), _LEFT, assert_trivial=True)


@gluon.jit
def _score(
    q_ptr, cos_ptr, sin_ptr, sink_ptr, scale,
    near_space, keys_space, used_space, q_rest, tiles, p_shared, shrink_shared, raised_shared, lse_shared, bars,
    TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Scores and softmax."""
    token, split = _here(SPLITS)
    mbarrier.wait(bars.index(_NAMED), 0)
    q_rest.store(_query(q_ptr, cos_ptr, sin_ptr, token, 480, 32, HALF_ROPE))
    q0 = _query(q_ptr, cos_ptr, sin_ptr, token, 0, 256, HALF_ROPE)
    q1 = _query(q_ptr, cos_ptr, sin_ptr, token, 256, 128, HALF_ROPE)
    q2 = _query(q_ptr, cos_ptr, sin_ptr, token, 384, 64, HALF_ROPE)
    q3 = _query(q_ptr, cos_ptr, sin_ptr, token, 448, 32, HALF_ROPE)
    fence_async_shared()
    base, count = _span(split, _used(used_space), TILES, SPLITS)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, _SCORE))
    slot = 0
    turn = 0
    for t in range(count):
        mbarrier.wait(bars.index(_READY + slot), turn)
        fence_async_shared()
        tile = _half_tile(tiles.index(slot))
        s = gl.full([64, 64], 0.0, gl.float32, _SCORE)
        s = warpgroup_mma(q_rest, tile.slice(480, 32, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q0, tile.slice(0, 256, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q1, tile.slice(256, 128, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q2, tile.slice(384, 64, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q3, tile.slice(448, 32, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        near = near_space.index(gl.minimum(base + t, 1)).load(gl.SliceLayout(0, _SCORE))
        if TILES > 0:
            far = keys_space.index(gl.maximum(base + t - 2, 0)).load(gl.SliceLayout(0, _SCORE))
            present = gl.where(base + t < 2, near, far) >= 0
        else:
            present = near >= 0
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
        turn = gl.where(slot == 2, turn ^ 1, turn)
        slot = gl.where(slot == 2, 0, slot + 1)
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
def join_share(
    part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
    COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Writes 256 channels from COLUMN on of this program's share of the heads, once all parts are there.

    For four warps, two of such trades a program: COLUMN 0 and COLUMN 256.
    part fp16 [tokens, SPLITS, 64, 512], lse fp32 [tokens, SPLITS, 64].
    """
    SHARE: gl.constexpr = (64 + SPLITS - 1) // SPLITS
    HEADS: gl.constexpr = 8 if SPLITS > 4 else 16 if SPLITS > 2 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    pair = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    words = part_ptr.to(gl.pointer_type(gl.int32)) + token * SPLITS * 16384 + pair[None, :]
    last = gl.minimum((split + 1) * SHARE, 64)
    TURNED: gl.constexpr = HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE
    if TURNED:
        turn = pair - (256 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
    first = split * SHARE + gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    first_sink = gl.load(sink_ptr + first, mask=first < last, other=0.0)
    arrive(spot, gl.where(split == 0, 65 - 2 * SPLITS, 1) if COLUMN == 0 else 1)
    wait_for(spot, goal)
    for beginning in range(split * SHARE, last, HEADS):
        head = beginning + gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
        real = head < last
        sink = first_sink
        if SHARE > HEADS:
            sink = gl.load(sink_ptr + head, mask=real, other=0.0)
        sink = sink * 1.4426950408889634
        lse = lse_ptr + token * SPLITS * 64 + head
        even = gl.full([HEADS, 128], 0.0, gl.float32, layout)
        odd = gl.full([HEADS, 128], 0.0, gl.float32, layout)
        if SPLITS == 2:
            one = gl.load(lse, mask=real, other=0.0)
            two = gl.load(lse + 64, mask=real, other=0.0)
            some = gl.load(words + (head * 256)[:, None], mask=real[:, None], other=0)
            more = gl.load(words + (16384 + head * 256)[:, None], mask=real[:, None], other=0)
            peak = gl.maximum(gl.maximum(one, two), sink)
            one = gl.exp2(one - peak)
            two = gl.exp2(two - peak)
            total = gl.exp2(sink - peak) + one + two
            a, b = _singles(some)
            c, d = _singles(more)
            even = one[:, None] * a + two[:, None] * c
            odd = one[:, None] * b + two[:, None] * d
        else:
            peak = sink
            for i in gl.static_range(SPLITS):
                peak = gl.maximum(peak, gl.load(lse + i * 64, mask=real, other=0.0))
            total = gl.exp2(sink - peak)
            for i in gl.static_range(SPLITS):
                weight = gl.exp2(gl.load(lse + i * 64, mask=real, other=0.0) - peak)
                total += weight
                a, b = _singles(
                    gl.load(words + (i * 16384 + head * 256)[:, None], mask=real[:, None], other=0)
                )
                even += weight[:, None] * a
                odd += weight[:, None] * b
        inverse = (1.0 / total)[:, None]
        even = even * inverse
        odd = odd * inverse
        if TURNED:
            out = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
        else:
            out = bf16_words(even, odd)
        start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
        gl.store(start + (head * 256)[:, None] + pair[None, :], out, mask=real[:, None])


@gluon.jit
def _weigh(
    cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr, part_ptr, lse_ptr, count_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count,
    near_space, keys_space, used_space, ring, ring_s, tiles, p_shared, shrink_shared, raised_shared, lse_shared, angles,
    bars, PART: gl.constexpr,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """256 channels from 256 PART on: of the keys, expanded two tiles ahead, and of the output.

    A tile is expanded while the next one's scores are taken and weighed while their softmax is, so that
    the matrix units have one product at a time.
    """
    token, split = _here(SPLITS)
    spot = count_ptr + COUNTER_STEP * token
    goal = goal_of(spot) if SPLITS > 1 else 0
    raw = ring.index(PART)
    raw_s = ring_s.index(PART)
    base, count = _prepare(
        pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
        page_count, sequences, table_width, window_count, entry_count, row_count,
        near_space, keys_space, used_space, raw, raw_s, tiles, bars, PART,
        ROWS, PAGE, PAYLOAD, SCALES, TILES, NAMES, SPLITS,
    )  # fmt: skip
    if SPLITS == 1 and PART == 1 and HALF_ROPE > 0 and HALF_ROPE <= 32:
        _keep_angles(angles, cos_ptr, sin_ptr, token, HALF_ROPE)
    o = gl.full([64, 256], 0.0, gl.float32, _ACC)
    later = gl.where(split == 0, 2, 0)
    for t in range(gl.where(split == 0, 0, -2), count):
        if t >= 0:
            mbarrier.wait(bars.index(_P_READY), t & 1)
        if TILES > 0:  # noqa: SIM102
            if t + 2 < count:
                _expand_and_ask(
                    pages_ptr, keys_space.index(gl.minimum(base + t + 1, TILES - 1)), raw, raw_s,
                    tiles.index(later), bars.index(_READY + later), count - t - 3,
                    PART, 0, AHEAD, ROWS, PAGE, PAYLOAD, SCALES,
                )  # fmt: skip
        slot = gl.where(later == 2, 0, later + 1)
        if t >= 0:
            if gl.max(raised_shared.load(_FOUR), axis=0) > 0:
                o = o * shrink_shared.load(gl.SliceLayout(1, _ACC))[:, None]
            tile = _half_tile(tiles.index(slot))
            o = warpgroup_mma(p_shared, tile.slice(256 * PART, 256, dim=1), o, is_async=True)
            if TILES > 0:  # noqa: SIM102
                if t + 2 < count:
                    _expand_and_ask(
                        pages_ptr, keys_space.index(gl.minimum(base + t + 1, TILES - 1)), raw, raw_s,
                        tiles.index(later), bars.index(_READY + later), count - t - 3,
                        PART, AHEAD, 4, ROWS, PAGE, PAYLOAD, SCALES,
                    )  # fmt: skip
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(bars.index(_P_FREE), count=1)
        else:
            if TILES > 0:  # noqa: SIM102
                if t + 2 < count:
                    _expand_and_ask(
                        pages_ptr, keys_space.index(gl.minimum(base + t + 1, TILES - 1)), raw, raw_s,
                        tiles.index(later), bars.index(_READY + later), count - t - 3,
                        PART, AHEAD, 4, ROWS, PAGE, PAYLOAD, SCALES,
                    )  # fmt: skip
        later = slot
    async_copy.wait_group(0)
    mbarrier.wait(bars.index(_P_READY), count & 1)
    factor = shrink_shared.load(gl.SliceLayout(1, _ACC))
    if SPLITS > 1 and PART == 0:
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
        gl.store(lse_ptr + (token * SPLITS + split) * 64 + head, lse_shared.load(gl.SliceLayout(1, _ACC)))
    _write(o, factor, angles, out_ptr, part_ptr, cos_ptr, sin_ptr, 256 * PART, HALF_ROPE, SPLITS)
    if SPLITS > 1:
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
    WEIGH_REGISTERS: gl.constexpr,
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
    ring = gl.allocate_shared_memory(gl.int32, [2, 64, 32], _RING)
    ring_s = gl.allocate_shared_memory(gl.int32, [2, 64, 4], _PLAIN2)
    tiles = gl.allocate_shared_memory(gl.int32, [3, 64, 256], _SHARED_WORDS)
    q_rest = gl.allocate_shared_memory(gl.float16, [64, 32], _Q_SHARED)
    p_shared = gl.allocate_shared_memory(gl.float16, [64, 64], _SHARED)
    shrink_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    raised_shared = gl.allocate_shared_memory(gl.int32, [4], _FLAT)
    lse_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    angles = gl.allocate_shared_memory(gl.float32, [2, 32], _FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(6):
        mbarrier.init(bars.index(b), count=1 if b == _NAMED or b == _P_READY else 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score, (
                q_ptr, cos_ptr, sin_ptr, sink_ptr, scale,
                near_space, keys_space, used_space, q_rest, tiles, p_shared, shrink_shared, raised_shared, lse_shared, bars,
                TILES, HALF_ROPE, SPLITS,
            )),
            (_weigh, (
                cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
                out_ptr, part_ptr, lse_ptr, count_ptr,
                page_count, sequences, table_width, window_count, entry_count, row_count,
                near_space, keys_space, used_space, ring, ring_s, tiles, p_shared, shrink_shared, raised_shared, lse_shared, angles,
                bars, 0, ROWS, PAGE, PAYLOAD, SCALES, TILES, NAMES, HALF_ROPE, SPLITS,
            )),
            (_weigh, (
                cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
                out_ptr, part_ptr, lse_ptr, count_ptr,
                page_count, sequences, table_width, window_count, entry_count, row_count,
                near_space, keys_space, used_space, ring, ring_s, tiles, p_shared, shrink_shared, raised_shared, lse_shared, angles,
                bars, 1, ROWS, PAGE, PAYLOAD, SCALES, TILES, NAMES, HALF_ROPE, SPLITS,
            )),
        ],
        [4, 4], [WEIGH_REGISTERS, WEIGH_REGISTERS],
    )  # fmt: skip
