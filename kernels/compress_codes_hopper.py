# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP4 of the compressor's entries on Hopper: E2M1 codes by rounding pairs of fp16, E4M3 scales, one a lane.

A slab is 128 channels [8, 128] of eight rows, a row a warp, four neighbours a lane; an entry has four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def near(x):
    """x to 13 bits: what an inexact reciprocal put beside a tie returns to it."""
    return ((x.to(gl.int32, bitcast=True) + 0x200) & -1024).to(gl.float32, bitcast=True)


# Four values, times 2^-14, to four E2M1 codes: an fp16 below 2^-12 has their exponent, and its mantissa is
# rounded to one bit, nearest even. A quotient of eight bits by four lies on a tie or 2^-9 of it away: fp16
# keeps these apart, and returns to the tie what an inexact reciprocal put beside it. NaN counts as 6.
_CODES = gl.constexpr("""{
.reg .b32 u, v, a, b, s, t;
cvt.rn.f16x2.f32 u, $2, $1;
cvt.rn.f16x2.f32 v, $4, $3;
abs.f16x2 a, u;
abs.f16x2 b, v;
min.f16x2 a, a, $5;
min.f16x2 b, b, $5;
shr.u32 s, a, 9;
shr.u32 t, b, 9;
and.b32 s, s, 0x00010001;
and.b32 t, t, 0x00010001;
add.u32 a, a, s;
add.u32 b, b, t;
add.u32 a, a, 0x00FF00FF;
add.u32 b, b, 0x00FF00FF;
lop3.b32 a, a, u, 0x80008000, 0xD8;
lop3.b32 b, b, v, 0x80008000, 0xD8;
prmt.b32 a, a, b, 0x7351;
shr.u32 s, a, 1;
shr.u32 t, a, 4;
lop3.b32 a, s, t, 0x08080808, 0xD8;
shr.u32 s, a, 12;
lop3.b32 a, a, s, 0x0F0F0F0F, 0xE4;
cvt.u16.u32 $0, a;
}""")


@gluon.jit
def codes(scaled):
    """E2M1 codes [ROWS, n / 4], four of neighbours a word, of values times 2^-14 [ROWS, n / 4, 2, 2]."""
    even, odd = gl.split(scaled)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    most = gl.full(x0.type.shape, 0x0E000E00, gl.int32, x0.type.layout)  # 6, twice
    return gl.inline_asm_elementwise(
        _CODES, "=h,f,f,f,f,r", [x0, x1, x2, x3, most], dtype=gl.int16, is_pure=True, pack=1
    )


@gluon.jit
def words(pointer):
    """A pointer to bytes as one to words of 16 bits."""
    return pointer.to(gl.pointer_type(gl.int16), bitcast=True)


@gluon.jit
def inverse_of(scale):
    """2^-14 / scale within an ulp or two, scale normal."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 r; rcp.approx.ftz.f32 r, $1; mul.rn.f32 $0, r, 0f38800000; }", "=f,f", [scale],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def lanes_of(x):
    """A slab [8, 128] as [8, 8 groups of 16, 4 lanes, 4]."""
    return gl.reshape(x, [8, 8, 4, 4])


@gluon.jit
def greater(mine, others, LANES: gl.constexpr):
    """The greater of `mine` and what the lane LANES further holds as `others`."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; shfl.sync.bfly.b32 t, $2, " + LANES + ", 31, -1; max.f32 $0, $1, t; }", "=f,f,f",
        [mine, others], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def write_scales(x0, x1, x2, x3, scales, mask):
    """E4M3 scales over 16 of entries' four slabs, at pointers [8]; a group's four lanes make one slab's each.

    Returns their inverses times 2^-14, as `write_codes` wants them.
    """
    a0 = gl.max(gl.abs(lanes_of(x0)), axis=3)
    a1 = gl.max(gl.abs(lanes_of(x1)), axis=3)
    a2 = gl.max(gl.abs(lanes_of(x2)), axis=3)
    a3 = gl.max(gl.abs(lanes_of(x3)), axis=3)
    L: gl.constexpr = a0.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    odd = lane % 2 == 1
    even = greater(gl.where(odd, a1, a0), gl.where(odd, a0, a1), "1")
    late = greater(gl.where(odd, a3, a2), gl.where(odd, a2, a3), "1")
    amax = greater(gl.where(lane >= 2, late, even), gl.where(lane >= 2, even, late), "2")
    scale = gl.minimum(near(gl.maximum(amax, 0.01171875) * 0.16666667163372040), 448.0).to(gl.float8e4nv)
    at = gl.convert_layout(scales, ROW, assert_trivial=True)[:, None, None] + (lane * 8 + group)
    here = gl.convert_layout(mask, ROW, assert_trivial=True)[:, None, None]
    gl.store(at, scale.to(gl.uint8, bitcast=True), mask=here)
    return inverse_of(scale.to(gl.float32))


@gluon.jit
def write_codes(x, inverse, payload, mask, S: gl.constexpr, LANE: gl.constexpr):
    """FP4 of slab S of entries at pointers [8]; a group's lane LANE (S, for PTX) has its inverse scale."""
    mine = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, " + LANE + ", 0x1C1F, -1;", "=f,f", [inverse],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    code = codes(gl.reshape(lanes_of(x) * mine[:, :, :, None], [8, 32, 2, 2]))
    ROW: gl.constexpr = gl.SliceLayout(1, code.type.layout)
    c = S * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, code.type.layout))
    at = words(gl.convert_layout(payload, ROW, assert_trivial=True))[:, None] + c[None, :]
    gl.store(at, code, mask=gl.convert_layout(mask, ROW, assert_trivial=True)[:, None])
