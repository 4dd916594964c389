# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Packed keys on their way into shared tiles of 64 keys of 512 channels in fp16, on Hopper (spec §3, §4).

Rows come by asynchronous copies; four warps expand them. fp16 holds every FP4 entry and every FP8 window key
exactly once scaled by 2^-7.

In a tile the channels of each 32 lie in another order: word 4 k + i, two channels, has 8 i + k and
8 i + k + 4. So a thread of a product's operand or sums, which of each 16 words has i, 4 + i, 8 + i and
12 + i, has eight neighbours; and the codes that share a word of the tile are 16 bits apart in the packed one,
which takes eleven integer instructions for eight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy


def _linear(registers, lanes, warps, shape):
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], shape))


_ROWS8 = [[1, 0], [2, 0], [4, 0]]
# Raw words of half the channels of 32 entries [32, 32]: a thread takes four neighbours of a row, eight lanes
# eight rows.
_ENTRY = _linear([[0, 1], [0, 2], [0, 16]], [*_ROWS8, [0, 4], [0, 8]], [[8, 0], [16, 0]], [32, 32])
_ENTRY3 = _linear(
    [[0, 0, 1], [0, 1, 0], [0, 8, 0]],
    [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 2, 0], [0, 4, 0]],
    [[8, 0, 0], [16, 0, 0]],
    [32, 16, 2],
)
# Raw words of half the channels of window rows [64, 64], pairs of them [64, 32], and their scales' spread.
_NEAR = _linear(
    [[0, 1], [0, 2], [0, 4], [0, 32], [32, 0]], [*_ROWS8, [0, 8], [0, 16]], [[8, 0], [16, 0]], [64, 64]
)
_NEAR_PAIR = _linear(
    [[0, 1], [0, 2], [0, 16], [32, 0]], [*_ROWS8, [0, 4], [0, 8]], [[8, 0], [16, 0]], [64, 32]
)
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
_COPY_NEAR_S = _linear([], [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [64, 2])
COPY_WIDE = _linear(
    [[0, 1], [0, 2], [8, 0], [16, 0], [32, 0]],
    [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]],
    [[2, 0], [4, 0]],
    [64, 64],
)
RAW = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # of rows of 128 bytes
RAW_WIDE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # of rows of 256
RAW_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))

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
def _part_of(tile, PARTS: gl.constexpr, part):
    """One of the equal parts of a tile's channels, as words [64, 256 / PARTS]."""
    return tile._reinterpret(gl.int32, [PARTS, 64, 256 // PARTS], TILE_WORDS).index(part)


@gluon.jit
def _in_place(a, b, c, d):
    """Four pairs of each of [M, N] words of eight channels as words [M, 4 N] of a tile."""
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    four = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 1, 3, 2))
    four = gl.permute(gl.reshape(four, [M, N // 4, 4, 4]), (0, 1, 3, 2))
    return gl.reshape(four, [M, 4 * N])


@gluon.jit
def ask_entries(pages, keys, raw, raw_s, ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr,
                 SCALES: gl.constexpr):  # fmt: skip
    """Asks for the rows of 64 entries: payload to raw, scales to raw_s."""
    halves = raw._reinterpret(gl.int32, [2, 64, 32], RAW)
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
def expand_entries(raw, raw_s, tile, part: gl.constexpr):
    """32 of 64 raw entries as fp16·2^-7 in a tile."""
    halves = raw._reinterpret(gl.int32, [2, 64, 32], RAW)
    codes_space = raw_s._reinterpret(gl.uint8, [64, 32], RAW_SCALES).slice(32 * part, 32, dim=0)
    for h in gl.static_range(2):
        words = halves.index(h).slice(32 * part, 32, dim=0).load(_ENTRY)
        codes = codes_space.slice(16 * h, 16, dim=1).load(gl.SliceLayout(2, _ENTRY3)).to(gl.int32)
        bits = codes * 0x00800080  # E4M3's bits as two fp16: value·2^-8
        power = gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x78007800], dtype=gl.int32, is_pure=True, pack=1
        )
        wide = power[:, :, None] + gl.full([32, 16, 2], 0, gl.int32, _ENTRY3)
        scale = gl.convert_layout(gl.reshape(wide, [32, 32]), _ENTRY, assert_trivial=True)
        a, b, c, d = gl.inline_asm_elementwise(
            _FP4_WORDS, "=&r,=&r,=&r,=&r,r,r", [words, scale],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        _part_of(tile, 2, h).slice(32 * part, 32, dim=0).store(_in_place(a, b, c, d))


@gluon.jit
def _wait_place(tile, h: gl.constexpr):
    """Where half h of the channels of a tile's window rows waits, in the place that it is expanded to: its
    words [64, 64] and room of the same size, of which its scales take the beginning.
    """
    quarters = tile._reinterpret(gl.int32, [4, 64, 64], RAW_WIDE)
    return quarters.index(2 * h), quarters.index(2 * h + 1)


@gluon.jit
def ask_window(window, keys, tile, h: gl.constexpr):
    """Asks for half h of the channels of 64 window rows and their scales."""
    raw, rest = _wait_place(tile, h)
    row = gl.maximum(keys.load(gl.SliceLayout(1, COPY_WIDE)), 0)
    start = window + (row.to(gl.int64) * 528 + h * 256)
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY_WIDE))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(raw, source)
    row = gl.maximum(keys.load(gl.SliceLayout(1, _COPY_NEAR_S)), 0)
    start = window + (row.to(gl.int64) * 528 + (512 + 8 * h))
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, _COPY_NEAR_S))
    source = start.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    raw_s = rest._reinterpret(gl.int32, [32, 64, 2], RAW_SCALES).index(0)
    async_copy.async_copy_global_to_shared(raw_s, source)


@gluon.jit
def expand_window(tile, h: gl.constexpr):
    """What `ask_window` brought as fp16·2^-7 where it lay."""
    raw, rest = _wait_place(tile, h)
    words = raw.load(_NEAR)
    codes_space = rest._reinterpret(gl.uint8, [32, 64, 8], RAW_SCALES).index(0)
    code = codes_space.load(gl.SliceLayout(2, _NEAR3)).to(gl.int32)
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
