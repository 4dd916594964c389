# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Operands of `mma.sync` in warps' own hands: q, keys and p of `sparse_attention_teams_hopper`.

Values are [W, 32, …], a register a thread and last axes' place. fp16 holds every FP4 entry and every FP8
window key exactly once scaled by 2^-7.

Eight channels are four words: (0, 2), (4, 6), (1, 3), (5, 7), as an entry's nibbles become the bytes of two
words of E4M3, which the card converts by pairs.
"""

from __future__ import annotations

from cedar.kernels.sparse_attention_operands_hopper import along, numbers, same, shaped
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ZEROS = "".join(f"mov.b32 ${i}, 0;\n" for i in range(4))
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
# $0-3 sums of two columns of rows g and g + 8; $4-7 the right operand of two steps, $8-11 and $12-15 the left
# one of each; $16-19 sums so far.
_PRODUCT = gl.constexpr(f"""{{
.reg .f32 a<4>;
{_MMA}{{a0,a1,a2,a3}}, {{$8,$9,$10,$11}}, {{$4,$5}}, {{$16,$17,$18,$19}};
{_MMA}{{$0,$1,$2,$3}}, {{$12,$13,$14,$15}}, {{$6,$7}}, {{a0,a1,a2,a3}};
}}""")
_PUT = gl.constexpr("st.shared.v4.b32 [$4], {$8, $9, $10, $11};\n" + _ZEROS)
_GET = gl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
PUT_TWO = gl.constexpr("st.shared.v2.b32 [$2], {$4, $5};\nmov.b32 $0, 0;\nmov.b32 $1, 0;\n")
PUT_ONE = gl.constexpr("st.shared.b32 [$1], $2;\nmov.b32 $0, 0;")
# Four words of two rows ($12-15, $16-19) as two left operands at $4 and $8.
_PUT_LEFT = gl.constexpr(
    "st.shared.v4.b32 [$4], {$12, $16, $13, $17};\nst.shared.v4.b32 [$8], {$14, $18, $15, $19};\n" + _ZEROS
)
_TAKE = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];")
_TAKE_TURNED = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];")
HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_SCALED = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")
# Eight E2M1 and their scale (two fp16, value / 2), times 2^-7: moved to E4M3's place a value is 2^-6 of
# itself.
_ENTRY = gl.constexpr(
    """{
.reg .b32 e, a;
.reg .b16 l, h;
shl.b32 e, $4, 4;
shl.b32 a, $4, 2;
and.b32 a, a, 0x1C1C1C1C;
lop3.b32 a, e, 0x80808080, a, 0xEA;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
shr.b32 a, $4, 2;
and.b32 a, a, 0x1C1C1C1C;
lop3.b32 a, $4, 0x80808080, a, 0xEA;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 $2, l;
cvt.rn.f16x2.e4m3x2 $3, h;
"""
    + "".join(f"mul.rn.f16x2 ${i}, ${i}, $5;\n" for i in range(4))
    + "}"
)
# Four E4M3 and their scale (two fp16, value·2), times 2^-7: (0, 2), (1, 3).
_NEAR = gl.constexpr("""{
.reg .b16 l, h;
.reg .b32 e, a;
mov.b32 e, 0x1C001C00;
prmt.b32 a, $2, $2, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
mul.rn.f16x2 $0, $0, e;
mul.rn.f16x2 $1, $1, e;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}""")


def _turns(i: int, turned: bool) -> str:
    """Word $(4 + i) of two bf16 as fp32 x_i and y_i, turned by the angles $(8 + i), $(12 + i) and rounded."""
    text = f"shl.b32 e, ${4 + i}, 16;\nand.b32 o, ${4 + i}, 0xFFFF0000;\nmov.b32 x{i}, e;\nmov.b32 y{i}, o;\n"
    if turned:
        text += f"""mul.f32 a, y{i}, ${12 + i};
neg.f32 a, a;
fma.rn.f32 a, x{i}, ${8 + i}, a;
mul.f32 b, y{i}, ${8 + i};
fma.rn.f32 b, x{i}, ${12 + i}, b;
cvt.rn.bf16x2.f32 e, b, a;
and.b32 o, e, 0xFFFF0000;
shl.b32 e, e, 16;
mov.b32 x{i}, e;
mov.b32 y{i}, o;
"""
    return text


# Four words of a query as fp16, turned where $16 is not 0, in the order of channels above.
_QUERY = gl.constexpr(
    "{\n.reg .b32 e, o;\n.reg .f32 a, b, x<4>, y<4>;\n.reg .pred p;\nsetp.ne.b32 p, $16, 0;\n@p bra TURNED;\n"
    + "".join(_turns(i, False) for i in range(4))
    + "bra DONE;\nTURNED:\n"
    + "".join(_turns(i, True) for i in range(4))
    + """DONE:
cvt.rn.f16x2.f32 $0, x1, x0;
cvt.rn.f16x2.f32 $1, x3, x2;
cvt.rn.f16x2.f32 $2, y1, y0;
cvt.rn.f16x2.f32 $3, y3, y2;
}"""
)


@gluon.constexpr_function
def held(warps, *registers):
    """[warps, 32, *registers]: every thread has that many registers."""
    inner = [1] * len(registers)
    order = list(range(len(registers) + 1, -1, -1))
    return gl.BlockedLayout([1, 1, *registers], [1, 32, *inner], [warps, 1, *inner], order)


@gluon.constexpr_function
def keep(row):
    """Sums of rows g and g + 8, `row` bytes each."""
    return f"st.shared.v2.b32 [$4], {{$8, $9}};\nst.shared.v2.b32 [$4 + {8 * row}], {{$10, $11}};\n" + _ZEROS


@gluon.constexpr_function
def quarters(step):
    """Sums over the quarters of the channels, `step` bytes apart."""
    text = "{\n"
    for i in range(4):
        names = ", ".join(f"a{i}_{j}" for j in range(4))
        text += f".reg .f32 {names};\nld.shared.v4.f32 {{{names}}}, [$4 + {i * step}];\n"
    for j in range(4):
        text += f"add.f32 a0_{j}, a0_{j}, a1_{j};\nadd.f32 a2_{j}, a2_{j}, a3_{j};\n"
        text += f"add.f32 ${j}, a0_{j}, a2_{j};\n"
    return text + "}"


@gluon.constexpr_function
def among(operation, lanes):
    """`operation` over neighbouring lanes."""
    text, step = "{\n.reg .f32 a, b;\nmov.f32 a, $1;\n", 1
    while step < lanes:
        text += f"shfl.sync.bfly.b32 b, a, {step}, 31, -1;\n{operation}.f32 a, a, b;\n"
        step *= 2
    return text + "mov.f32 $0, a;\n}"


@gluon.jit
def slots(N: gl.constexpr, layout: gl.constexpr):
    """0 to N - 1 as the last of four axes."""
    return gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[
        None, None, None, :
    ]


@gluon.jit
def offset(key, chunk):
    """Bytes to eight channels of a key in a warp's area: neither eight threads that store nor eight keys that
    are taken meet a bank twice.
    """
    return key * 256 + ((chunk ^ (key & 7) ^ ((chunk >> 2) & 2)) << 4)


@gluon.jit
def _stack(a, b, c, d, layout: gl.constexpr):
    """Four [W, 32] or [W, 32, 4] side by side in a last axis."""
    both = gl.join(gl.join(a, b), gl.join(c, d))
    if len(a.shape) == 2:
        both = shaped(gl.permute(both, (0, 1, 3, 2)), [a.shape[0], 32, 4], layout)
    else:
        both = shaped(gl.permute(both, (0, 1, 2, 4, 3)), [a.shape[0], 32, 4, 4], layout)
    return both


@gluon.jit
def four_of(x, layout: gl.constexpr):
    """The four [W, 32, 4] of [W, 32, 4, 4]."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], 32, 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return same(a, layout), same(b, layout), same(c, layout), same(d, layout)


@gluon.jit
def ldmatrix(places, TURNED: gl.constexpr, layout: gl.constexpr):
    """Four matrices whose rows have the addresses `places`, read turned over or as they lie."""
    a, b, c, d = gl.inline_asm_elementwise(
        _TAKE_TURNED if TURNED else _TAKE, "=r,=r,=r,=r,r", [places],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return _stack(a, b, c, d, layout)


@gluon.jit
def get(place, layout: gl.constexpr):
    """Four words from `place` [W, 32] on."""
    return gl.inline_asm_elementwise(
        _GET, "=r,=r,=r,=r,r,r,r,r", [along(place, 2, layout) + 0 * numbers(4, layout)], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def entry_words(word, scale, layout: gl.constexpr):
    """Eight channels of four entries [W, 32, 4] as words [W, 32, 4, 4]."""
    a, b, c, d = gl.inline_asm_elementwise(
        _ENTRY, "=&r,=&r,=&r,=&r,r,r", [word, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return _stack(a, b, c, d, layout)


@gluon.jit
def near_words(low, high, scale, layout: gl.constexpr):
    """The same of window rows, two words of four channels a key."""
    a, c = gl.inline_asm_elementwise(
        _NEAR, "=&r,=&r,r,r", [low, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    b, d = gl.inline_asm_elementwise(
        _NEAR, "=&r,=&r,r,r", [high, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return _stack(a, b, c, d, layout)


@gluon.jit
def put(keys, area, g, t, BLOCK: gl.constexpr, fours: gl.constexpr, squares: gl.constexpr):
    """Leaves a block of eight channels of four keys in the warp's area."""
    key = along(along(g, 2, fours) + 8 * numbers(4, fours), 3, squares)
    place = along(along(area, 2, fours), 3, squares)
    place += offset(key, along(along(4 * t + BLOCK, 2, fours), 3, squares))
    gl.inline_asm_elementwise(
        _PUT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [place + keys * 0, keys], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def product(keys, left, left2, acc, squares: gl.constexpr):
    """acc [W, 32, 4 tiles of eight columns, 2 rows × 2 columns] and two steps' products."""
    return gl.inline_asm_elementwise(
        _PRODUCT, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [keys, along(left, 2, squares), along(left2, 2, squares), acc],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def score(keys, query, quad, g, t, acc, BLOCK: gl.constexpr, fours: gl.constexpr, squares: gl.constexpr):
    """acc and q·kᵀ of a block of eight channels a thread, q as `put_query` left it."""
    unit = 8 * quad + 2 * BLOCK
    flip = t ^ ((g & 1) << 2)
    left = get(query + ((unit ^ flip) << 4), fours)
    left2 = get(query + (((unit + 1) ^ flip) << 4), fours)
    return product(keys, left, left2, acc, squares)


@gluon.jit
def put_query(q, q8, cos, sin, turns, at, at8, fours: gl.constexpr):
    """Words of eight channels of two heads, turned, as left operands."""
    q, q8 = (
        gl.inline_asm_elementwise(
            _QUERY, "=&r,=&r,=&r,=&r,r,r,r,r,f,f,f,f,f,f,f,f,r,r,r,r", [q, cos, sin, turns],
            dtype=gl.int32, is_pure=True, pack=4,
        ),
        gl.inline_asm_elementwise(
            _QUERY, "=&r,=&r,=&r,=&r,r,r,r,r,f,f,f,f,f,f,f,f,r,r,r,r", [q8, cos, sin, turns],
            dtype=gl.int32, is_pure=True, pack=4,
        ),
    )  # fmt: skip
    gl.inline_asm_elementwise(
        _PUT_LEFT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [at + q * 0, at8 + q * 0, q, q8],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def entry_scale(code):
    """Two fp16 of half the value of E4M3 bytes."""
    bits = code * 0x00800080  # value·2^-8
    return gl.inline_asm_elementwise(
        _SCALED, "=r,r,r", [bits, 0x58005800], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def halves(low, high, factor, layout: gl.constexpr):
    """Two fp32 a word, times a factor, as fp16."""
    return gl.inline_asm_elementwise(
        HALVES, "=r,f,f", [same(low, layout) * factor, same(high, layout) * factor], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
