# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Queries and packed keys in the registers of threads, as `mma.sync` takes them (spec §3, §4).

A tensor [4, 32, ...] of a program of four warps is what each of its threads holds: everything after the first
two axes lies in one thread, so reshaping, splitting and permuting there move nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Eight packed channels and their scale (two fp16, value·2^7) to words of (0, 1), (2, 3), (4, 5), (6, 7),
# times 2^-7.
FP4_WORDS = gl.constexpr(
    """
{
.reg .b32 y, t, a;
shl.b32 y, $4, 4;
"""
    + "".join(
        f"""
prmt.b32 t, $4, y, {(j << 12) | ((4 + j) << 4):#06x};
shr.b32 a, t, 3;
and.b32 a, a, 0x0E000E00;
lop3.b32 a, t, 0x80008000, a, 0xEA;
mul.rn.f16x2 ${j}, a, $5;
"""
        for j in range(4)
    )
    + "}\n"
)

# Four E4M3 channels and their scale (two fp16, value·2) to words of (0, 1) and (2, 3), times 2^-7 (the bits
# alone: 2^-8).
FP8_WORDS = gl.constexpr("""
{
.reg .b32 t, a;
prmt.b32 t, $2, 0, 0x1404;
shr.b32 a, t, 1;
and.b32 a, a, 0x3F803F80;
lop3.b32 a, t, 0x80008000, a, 0xEA;
mul.rn.f16x2 $0, a, $3;
prmt.b32 t, $2, 0, 0x3424;
shr.b32 a, t, 1;
and.b32 a, a, 0x3F803F80;
lop3.b32 a, t, 0x80008000, a, 0xEA;
mul.rn.f16x2 $1, a, $3;
}
""")
# Two bf16 channels, turned by (cos, sin) and rounded to bf16, as fp16; and as they are.
_TURN = gl.constexpr("""{
.reg .b32 e, o, r;
.reg .f32 x, y, a, b;
shl.b32 e, $1, 16;
and.b32 o, $1, 0xFFFF0000;
mov.b32 x, e;
mov.b32 y, o;
mul.f32 a, y, $3;
neg.f32 a, a;
fma.rn.f32 a, x, $2, a;
mul.f32 b, y, $2;
fma.rn.f32 b, x, $3, b;
cvt.rn.bf16x2.f32 r, b, a;
shl.b32 e, r, 16;
and.b32 o, r, 0xFFFF0000;
mov.b32 x, e;
mov.b32 y, o;
cvt.rn.f16x2.f32 $0, y, x;
}""")
# Two bf16 channels as fp16.
PLAIN_WORDS = gl.constexpr("""{
.reg .b32 e, o;
.reg .f32 x, y;
shl.b32 e, $1, 16;
and.b32 o, $1, 0xFFFF0000;
mov.b32 x, e;
mov.b32 y, o;
cvt.rn.f16x2.f32 $0, y, x;
}""")


def threads(*registers):
    """[4 warps, 32 lanes, *registers]: every thread has that many registers."""
    inner = [1] * len(registers)
    order = list(range(len(registers) + 1, -1, -1))
    return gl.constexpr(gl.BlockedLayout([1, 1, *registers], [1, 32, *inner], [4, 1, *inner], order))


ONE, ONES, TWOS, FOURS, SIXTEENS = threads(), threads(1), threads(2), threads(4), threads(16)
FOURS_OF_TWO, FOURS_OF_FOUR, TWOS_OF_EIGHT = threads(4, 2), threads(4, 4), threads(2, 8)


@gluon.jit
def same(x, layout: gl.constexpr):
    """x in another name of its layout."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def shaped(x, SHAPE: gl.constexpr, layout: gl.constexpr):
    """x reshaped without moving anything."""
    return gl.convert_layout(gl.reshape(x, SHAPE), layout, assert_trivial=True)


@gluon.jit
def along(x, axis: gl.constexpr, layout: gl.constexpr):
    """x with a new axis of one, in `layout`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(axis, layout), assert_trivial=True), axis)


@gluon.jit
def numbers(N: gl.constexpr, layout: gl.constexpr):
    """0 to N - 1 as the last of three axes."""
    return gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def words_at(pointer):
    """A pointer to int32."""
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def stack(a, b, c, d):
    """Four [4, 32, 4] as [4, 32, 4, 4], side by side in the last axis."""
    both = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 1, 2, 4, 3))
    return shaped(both, [4, 32, 4, 4], FOURS_OF_FOUR)


@gluon.jit
def entry_scale(code):
    """Two fp16 of value·2^7 of E4M3 bytes."""
    bits = code * 0x00800080  # value·2^-8
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x78007800], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def window_scale(code):
    """Two fp16 of 2^(code - 126)."""
    power = ((code + 1) << 23).to(gl.float32, bitcast=True)
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [power], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def entry_block(word, scale):
    """Eight channels of four keys [4, 32, 4] as words [4, 32, 4, 4]."""
    a, b, c, d = gl.inline_asm_elementwise(
        FP4_WORDS, "=r,=r,=r,=r,r,r", [word, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return stack(a, b, c, d)


@gluon.jit
def window_block(low, high, scale):
    """The same of window rows, two words of four channels a key."""
    a, b = gl.inline_asm_elementwise(
        FP8_WORDS, "=r,=r,r,r", [low, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    c, d = gl.inline_asm_elementwise(
        FP8_WORDS, "=r,=r,r,r", [high, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return stack(a, b, c, d)


@gluon.jit
def angles(start, turn, BLOCK: gl.constexpr, other: gl.constexpr, HALF_ROPE: gl.constexpr):
    """cos or sin [4, 32, 4] of the pairs of a block of eight channels."""
    out = other
    if HALF_ROPE > 0:
        pair = turn + (4 * BLOCK + numbers(4, FOURS))
        out = gl.load(start + pair, mask=pair >= 0, other=other)
    return out


@gluon.jit
def turned(words, cos, sin, HALF_ROPE: gl.constexpr):
    """Words of two bf16 channels turned by their angles, as fp16."""
    if HALF_ROPE > 0:
        out = gl.inline_asm_elementwise(
            _TURN, "=r,r,f,f", [words, cos, sin], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        out = gl.inline_asm_elementwise(PLAIN_WORDS, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    return out
