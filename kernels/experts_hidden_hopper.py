# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What `experts_trades_hopper` makes of a trade's sums: SwiGLU, FP8 round trip, and where they go (spec §3).

Sums are pieces of one register a thread, as wgmma leaves them: of 32 rows of each of two weights, 80 columns.
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import barrier, half
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A register a thread: rows g of warp w at 8w + g, a column or word of four lanes.
PIECE = gl.constexpr(
    gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4])
)
# [32 channels, slots]: eight channels a thread.
_EIGHTS = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))
_TEN = gl.constexpr((gl.int32,) * 10)


# Gate and up of two slots and their routing weights to two hidden bf16. The sums are 2^-32 of what they stand
# for: rounding, limits (the eighth operand) and products are scaled alike, exactly; weights are times 2^64.
_SWIGLU = gl.constexpr("""{
.reg .b32 g, u;
.reg .f32 a, b, c, d, m, s;
cvt.rn.bf16x2.f32 g, $2, $1;
cvt.rn.bf16x2.f32 u, $4, $3;
shl.b32 a, g, 16;
and.b32 b, g, 0xFFFF0000;
shl.b32 c, u, 16;
and.b32 d, u, 0xFFFF0000;
neg.f32 m, $7;
min.f32 a, a, $7;
min.f32 b, b, $7;
max.f32 c, c, m;
min.f32 c, c, $7;
max.f32 d, d, m;
min.f32 d, d, $7;
mul.rn.f32 s, a, 0fCFB8AA3B;
ex2.approx.ftz.f32 s, s;
add.rn.f32 s, s, 0f3F800000;
rcp.approx.ftz.f32 s, s;
mul.rn.f32 a, a, s;
mul.rn.f32 a, a, c;
mul.rn.f32 a, a, $5;
mul.rn.f32 s, b, 0fCFB8AA3B;
ex2.approx.ftz.f32 s, s;
add.rn.f32 s, s, 0f3F800000;
rcp.approx.ftz.f32 s, s;
mul.rn.f32 b, b, s;
mul.rn.f32 b, b, d;
mul.rn.f32 b, b, $6;
cvt.rn.bf16x2.f32 $0, b, a;
}""")
# The greatest magnitudes of a warp's eight rows, of two bf16.
_MOST = gl.constexpr("""{
.reg .b32 o;
and.b32 $0, $1, 0x7FFF7FFF;
shfl.sync.bfly.b32 o, $0, 4, 0x1F, 0xFFFFFFFF;
max.u16x2 $0, $0, o;
shfl.sync.bfly.b32 o, $0, 8, 0x1F, 0xFFFFFFFF;
max.u16x2 $0, $0, o;
shfl.sync.bfly.b32 o, $0, 16, 0x1F, 0xFFFFFFFF;
max.u16x2 $0, $0, o;
}""")
# The FP8 round trip of two bf16, their groups' greatest magnitudes given: the scale's code is the exponent of
# amax / 448, rounded up (of 1e-4 at least); then two slots of a channel are traded for two channels of a slot
# (m and m + 4, as they stand beside each other), by the selector of bytes.
_BACK = gl.constexpr("""{
.reg .b32 c, d, h;
.reg .f32 a, b;
.reg .b16 e, l, u;
add.u32 c, $2, 0x001F001F;
shr.u32 c, c, 7;
and.b32 c, c, 0x01FF01FF;
mov.b32 h, 0x00710071;
max.u16x2 c, c, h;
sub.u32 c, c, 0x00080008;
sub.u32 d, 0x00FE00FE, c;
shl.b32 d, d, 7;
mul.rn.bf16x2 d, $1, d;
shl.b32 a, d, 16;
and.b32 b, d, 0xFFFF0000;
cvt.rn.satfinite.e4m3x2.f32 e, b, a;
cvt.rn.f16x2.e4m3x2 h, e;
mov.b32 {l, u}, h;
cvt.f32.f16 a, l;
cvt.f32.f16 b, u;
cvt.rn.bf16x2.f32 d, b, a;
shl.b32 c, c, 7;
mul.rn.bf16x2 d, d, c;
shfl.sync.bfly.b32 h, d, 16, 0x1F, 0xFFFFFFFF;
prmt.b32 $0, d, h, $3;
}""")
_KEEP = gl.constexpr("""{
.reg .pred p;
setp.lt.s32 p, $12, 4;
@p st.shared.v4.b32 [$1], {$2, $3, $4, $5};
@p st.shared.v4.b32 [$1 + 16], {$6, $7, $8, $9};
@p st.shared.v2.b32 [$1 + 32], {$10, $11};
mov.b32 $0, 0;
}""")


@gluon.constexpr_function
def _all_warps():
    """Ten words from the address given, the greatest of four warps'."""
    lines = ["{", ".reg .b32 a<10>;"]
    for warp in range(4):
        to = [f"${i}" if warp == 0 else f"a{i}" for i in range(10)]
        for first, size in ((0, 4), (4, 4), (8, 2)):
            words = ", ".join(to[first : first + size])
            lines.append(f"ld.shared.v{size}.b32 {{{words}}}, [$10 + {48 * warp + 4 * first}];")
        if warp:
            lines += [f"max.u16x2 ${i}, ${i}, a{i};" for i in range(10)]
    return "\n".join([*lines, "}"])


@gluon.jit
def join(sums, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """[32, 8 GROUPS] of every fourth pair of sums from FIRST on: a weight's rows, eight slots a group."""
    parts = ()
    for j in gl.static_range(GROUPS):
        parts += (gl.join(sums[4 * j + FIRST], sums[4 * j + FIRST + 1]),)  # type: ignore[assignment]
    if GROUPS == 8:
        even = gl.join(gl.join(parts[0], parts[4]), gl.join(parts[2], parts[6]))  # type: ignore[misc]
        both = gl.join(even, gl.join(gl.join(parts[1], parts[5]), gl.join(parts[3], parts[7])))  # type: ignore[misc]
        out = gl.reshape(gl.permute(both, (0, 3, 4, 5, 1, 2)), [32, 64])
    else:
        out = gl.reshape(gl.permute(gl.join(parts[0], parts[1]), (0, 3, 1, 2)), [32, 16])  # type: ignore[misc]
    return out


@gluon.jit
def _swiglu(sums, routing, most):
    """Hidden values, two slots a word: ten words of a thread. routing: the address of their weights."""
    words = ()
    for j in gl.static_range(10):
        even, odd = gl.inline_asm_elementwise(
            "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [routing + 32 * j],
            dtype=(gl.float32, gl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        word = gl.inline_asm_elementwise(
            _SWIGLU, "=r,f,f,f,f,f,f,f",
            [sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3], even, odd, most],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        words += (word,)  # type: ignore[assignment]
    return words


@gluon.jit
def _greatest(words, area):
    """The greatest magnitudes of a trade's 32 channels, of each of ten words of two slots."""
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, PIECE))[:, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, PIECE))[None, :] + row * 0
    most = ()
    for j in gl.static_range(10):
        one = gl.inline_asm_elementwise(_MOST, "=&r,r", [words[j]], dtype=gl.int32, is_pure=False, pack=1)
        most += (one,)  # type: ignore[assignment]
    area = area + lane * 192
    barrier()  # everybody has read what was there
    gl.inline_asm_elementwise(
        _KEEP, "=r" + ",r" * 12, (area + row // 8 * 48,) + most + (row % 8 * 4 + lane,),  # noqa: RUF005
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    barrier()
    return gl.inline_asm_elementwise(
        _all_warps(), "=&r" + ",=&r" * 9 + ",r", [area], dtype=_TEN, is_pure=False, pack=1
    )


@gluon.jit
def write_hidden(
    sums, count, routing, area, out_ptr, place, first, inner, limit, TRADE: gl.constexpr
):  # fmt: skip
    """SwiGLU of a trade's 32 channels: rounds, clamps, routing weight, FP8 round trip; as w2 meets it.

    routing: the address of the slots' routing weights in shared memory; area: of 768 bytes for the trade.
    """
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, PIECE))[:, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, PIECE))[None, :] + row * 0
    routing = routing + lane * 8
    most = gl.full([32, 4], limit * 2.3283064365386963e-10, gl.float32, PIECE)
    words = _swiglu(sums, routing, most)
    greatest = _greatest(words, area)
    odd = row % 8 // 4  # this thread's slot of two, when they are traded for channels
    selector = gl.where(odd == 0, 0x5410, 0x3276)
    column = lane * 2 + odd
    at = (place + column).to(gl.int64) * (inner // 2) + ((row // 8 * 4 + row % 4) * 4 + TRADE + first // 2)
    to = out_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at
    for j in gl.static_range(10):
        word = gl.inline_asm_elementwise(
            _BACK, "=r,r,r,r", [words[j], greatest[j], selector], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.store(to + j * 4 * inner, word, mask=column + 8 * j < count)


@gluon.jit
def write(sums, slots, out, outputs, N: gl.constexpr):
    """[32, N] to their slots' rows."""
    y = gl.convert_layout(half(sums * 4294967296.0), _EIGHTS)
    mine = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(0, _EIGHTS)))
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, _EIGHTS))
    at = gl.maximum(mine, 0)[None, :].to(gl.int64) * outputs + row[:, None]
    gl.store(out + at, y, mask=(mine >= 0)[None, :])
