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

Each of the programs of 16 heads then joins the parts of some of them. Parts lie in memory that holds all ones
where nothing was written, which no fp16 result is (a NaN is 0x7FFF): who joins reads a part over and over
until it is there, and leaves all ones behind for the next launch. No counter, no fence. Programs that wait
are neighbours in launch order, so those that wait are never all that run.

fp16 holds every FP4 entry and every FP8 window key exactly once scaled by 2^-7, and p to 11 bits.

Eight channels are four words: (0, 2), (4, 6), (1, 3), (5, 7), as an entry's nibbles become the bytes of two
words of E4M3, which the card converts by pairs.
"""

from __future__ import annotations

from functools import cache

import torch
from cedar.kernels.grid_hopper import SINGLES, barrier, grid_release, grid_wait
from cedar.kernels.sparse_attention_operands_hopper import (
    along,
    numbers,
    same,
    shaped,
    window_scale,
    words_at,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCKS = 1024  # parts of 16 heads that there is memory for: 16 MiB
MOST = 20  # parts of a query
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
_PUT_TWO = gl.constexpr("st.shared.v2.b32 [$2], {$4, $5};\nmov.b32 $0, 0;\nmov.b32 $1, 0;\n")
_PUT_ONE = gl.constexpr("st.shared.b32 [$1], $2;\nmov.b32 $0, 0;")
# Four words of two rows ($12-15, $16-19) as two left operands at $4 and $8.
_PUT_LEFT = gl.constexpr(
    "st.shared.v4.b32 [$4], {$12, $16, $13, $17};\nst.shared.v4.b32 [$8], {$14, $18, $15, $19};\n" + _ZEROS
)
_TAKE = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];")
_TAKE_TURNED = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];")
_HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
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
# A thread has two channels ($4 and $6, $5 and $7) of two chunks, the one four lanes on their neighbours: one
# takes the even ones ($0, $1) and odd ones ($2, $3) of the first, the upper ($8) those of the second.
_TRADE = gl.constexpr("""{
.reg .f32 s, u, a, b;
.reg .pred p;
setp.ne.b32 p, $8, 0;
selp.f32 s, $4, $5, p;
selp.f32 u, $6, $7, p;
shfl.sync.bfly.b32 a, s, 4, 31, -1;
shfl.sync.bfly.b32 b, u, 4, 31, -1;
selp.f32 $0, a, $4, p;
selp.f32 $1, b, $6, p;
selp.f32 $2, $5, a, p;
selp.f32 $3, $7, b, p;
}""")


@cache
def parts(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of CUDA device `index` for parts, two fp16 a word [BLOCKS, 16, 256], and for their sums' logs,
    fp32 [BLOCKS, 16, 4], a copy for each of four warps. All ones between launches; calls share them, so one
    stream at a time.
    """
    device = f"cuda:{index}"
    words = torch.full((BLOCKS * 16 * 256,), -1, dtype=torch.int32, device=device)
    logs = torch.full((BLOCKS * 64,), -1, dtype=torch.int32, device=device)
    return words, logs.view(torch.float32)


@gluon.constexpr_function
def _held(warps, *registers):
    """[warps, 32, *registers]: every thread has that many registers."""
    inner = [1] * len(registers)
    order = list(range(len(registers) + 1, -1, -1))
    return gl.BlockedLayout([1, 1, *registers], [1, 32, *inner], [warps, 1, *inner], order)


@gluon.constexpr_function
def _keep(row):
    """Sums of rows g and g + 8, `row` bytes each."""
    return f"st.shared.v2.b32 [$4], {{$8, $9}};\nst.shared.v2.b32 [$4 + {8 * row}], {{$10, $11}};\n" + _ZEROS


@gluon.constexpr_function
def _quarters(step):
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
def _among(operation, lanes):
    """`operation` over neighbouring lanes."""
    text, step = "{\n.reg .f32 a, b;\nmov.f32 a, $1;\n", 1
    while step < lanes:
        text += f"shfl.sync.bfly.b32 b, a, {step}, 31, -1;\n{operation}.f32 a, a, b;\n"
        step *= 2
    return text + "mov.f32 $0, a;\n}"


@gluon.constexpr_function
def _until(splits):
    """Reads the parts of two words and their logs until none is all ones, and leaves all ones behind. Outputs
    two words a part, then twice the log a part; inputs the first words' address twice, the first log's, and
    whether this warp has anything to read.
    """
    words, logs, at = range(2 * splits), range(2 * splits, 4 * splits, 2), 4 * splits
    text = f"""{{
.reg .pred p;
.reg .b32 m, t;
setp.eq.b32 p, ${at + 4}, 0;
@p bra NONE;
AGAIN:
"""
    for i in range(splits):
        text += f"ld.relaxed.gpu.global.v2.b32 {{${2 * i}, ${2 * i + 1}}}, [${at} + {i * 16384}];\n"
    for i, log in enumerate(logs):
        text += f"ld.relaxed.gpu.global.b32 ${log}, [${at + 2} + {i * 256}];\n"
    text += "mov.b32 m, 0;\n"
    text += "".join(f"max.u32 m, m, ${word};\n" for word in words)
    text += "".join(f"mov.b32 t, ${log};\nmax.u32 m, m, t;\n" for log in logs)
    text += (
        "setp.eq.u32 p, m, 0xFFFFFFFF;\n@p bra AGAIN;\nbar.warp.sync 0xFFFFFFFF;\nmov.b32 m, 0xFFFFFFFF;\n"
    )
    for i, log in enumerate(logs):
        text += f"st.relaxed.gpu.global.v2.b32 [${at} + {i * 16384}], {{m, m}};\n"
        text += f"st.relaxed.gpu.global.b32 [${at + 2} + {i * 256}], m;\nmov.b32 ${log + 1}, ${log};\n"
    text += "bra DONE;\nNONE:\n" + "".join(f"mov.b32 ${i}, 0;\n" for i in range(4 * splits))
    return text + "DONE:\n}"


@gluon.constexpr_function
def _until_types(splits):
    return (gl.int32,) * splits + (gl.float32,) * splits


@gluon.constexpr_function
def _until_constraints(splits):
    return ",".join(["=&r"] * (2 * splits) + ["=&f"] * (2 * splits) + ["l"] * 4 + ["r"] * 2)


@gluon.constexpr_function
def _bytes(teams):
    """Shared memory: keys, four quarters' scores, p, inverse sums, names and q, and a spare line."""
    keys = 32 * teams
    scores, chances = 256 * (keys + 8), 16 * (2 * keys + 16)
    return (1024 * keys + scores + chances + 64 + 4 * keys + 16384 + 1024) // 512 * 512


@gluon.jit
def _slots(N: gl.constexpr, layout: gl.constexpr):
    """0 to N - 1 as the last of four axes."""
    return gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[
        None, None, None, :
    ]


@gluon.jit
def _offset(key, chunk):
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
def _four_of(x, layout: gl.constexpr):
    """The four [W, 32, 4] of [W, 32, 4, 4]."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], 32, 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return same(a, layout), same(b, layout), same(c, layout), same(d, layout)


@gluon.jit
def _ldmatrix(places, TURNED: gl.constexpr, layout: gl.constexpr):
    a, b, c, d = gl.inline_asm_elementwise(
        _TAKE_TURNED if TURNED else _TAKE, "=r,=r,=r,=r,r", [places],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return _stack(a, b, c, d, layout)


@gluon.jit
def _get(place, layout: gl.constexpr):
    """Four words from `place` [W, 32] on."""
    return gl.inline_asm_elementwise(
        _GET, "=r,=r,=r,=r,r,r,r,r", [along(place, 2, layout) + 0 * numbers(4, layout)], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _entry(word, scale, layout: gl.constexpr):
    """Eight channels of four entries [W, 32, 4] as words [W, 32, 4, 4]."""
    a, b, c, d = gl.inline_asm_elementwise(
        _ENTRY, "=&r,=&r,=&r,=&r,r,r", [word, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return _stack(a, b, c, d, layout)


@gluon.jit
def _near(low, high, scale, layout: gl.constexpr):
    """The same of window rows, two words of four channels a key."""
    a, c = gl.inline_asm_elementwise(
        _NEAR, "=&r,=&r,r,r", [low, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    b, d = gl.inline_asm_elementwise(
        _NEAR, "=&r,=&r,r,r", [high, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return _stack(a, b, c, d, layout)


@gluon.jit
def _put(keys, area, g, t, BLOCK: gl.constexpr, fours: gl.constexpr, squares: gl.constexpr):
    """Leaves a block of eight channels of four keys in the warp's area."""
    key = along(along(g, 2, fours) + 8 * numbers(4, fours), 3, squares)
    place = along(along(area, 2, fours), 3, squares)
    place += _offset(key, along(along(4 * t + BLOCK, 2, fours), 3, squares))
    gl.inline_asm_elementwise(
        _PUT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [place + keys * 0, keys], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def _product(keys, left, left2, acc, squares: gl.constexpr):
    """acc [W, 32, 4 tiles of eight columns, 2 rows × 2 columns] and two steps' products."""
    return gl.inline_asm_elementwise(
        _PRODUCT, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [keys, along(left, 2, squares), along(left2, 2, squares), acc],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _score(keys, query, quad, g, t, acc, BLOCK: gl.constexpr, fours: gl.constexpr, squares: gl.constexpr):
    unit = 8 * quad + 2 * BLOCK
    flip = t ^ ((g & 1) << 2)
    left = _get(query + ((unit ^ flip) << 4), fours)
    left2 = _get(query + (((unit + 1) ^ flip) << 4), fours)
    return _product(keys, left, left2, acc, squares)


@gluon.jit
def _put_query(q, q8, cos, sin, turns, at, at8, fours: gl.constexpr):
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
    ones: gl.constexpr = _held(W)
    twos: gl.constexpr = _held(W, 2)
    fours: gl.constexpr = _held(W, 4)
    squares: gl.constexpr = _held(W, 4, 4)
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
    slot = _slots(4, squares)
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
    unit = along(32 * warp + lane, 2, _held(W, 4 // T)) + 32 * W * numbers(4 // T, _held(W, 4 // T))
    turns = unit < 8 * TURNS
    if TURNS == 0 or TURNS == 64:
        row = unit >> 6
        chunk = unit & 63
    else:
        row = gl.where(turns, unit // TURNS, (unit - 8 * TURNS) // (64 - TURNS))
        chunk = gl.where(turns, unit % TURNS + (64 - TURNS), (unit - 8 * TURNS) % (64 - TURNS))
    units: gl.constexpr = _held(W, 4 // T, 4)
    word = along(4 * chunk, 3, units) + _slots(4, units)
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
        _PUT_ONE, "=r,r,r", [names + key * 4, found], dtype=gl.int32, is_pure=False, pack=1
    )
    if not SETTLED:
        _put_query(q, q8, cos, sin, turns, left, left2, fours)
    code = gl.where(there, code, 0)  # a row that is not there may hold anything
    area = base + (4 * team + quarter) * 8192
    if split < NEAR:
        scale0 = window_scale(code)
        w0, w1, w2, w3 = _four_of(raw, fours)
        w4, w5, w6, w7 = _four_of(more, fours)
        k0 = _near(w0, w1, scale0, squares)
        _put(k0, area, g, t, 0, fours, squares)
        k1 = _near(w2, w3, scale0, squares)
        _put(k1, area, g, t, 1, fours, squares)
        k2 = _near(w4, w5, scale0, squares)
        _put(k2, area, g, t, 2, fours, squares)
        k3 = _near(w6, w7, scale0, squares)
        _put(k3, area, g, t, 3, fours, squares)
    else:
        scale0 = _entry_scale(code & 255)
        scale1 = _entry_scale((code >> 8) & 255)
        w0, w1, w2, w3 = _four_of(raw, fours)
        k0 = _entry(w0, scale0, squares)
        _put(k0, area, g, t, 0, fours, squares)
        k1 = _entry(w1, scale0, squares)
        _put(k1, area, g, t, 1, fours, squares)
        k2 = _entry(w2, scale1, squares)
        _put(k2, area, g, t, 2, fours, squares)
        k3 = _entry(w3, scale1, squares)
        _put(k3, area, g, t, 3, fours, squares)
    if SETTLED:
        _put_query(q, q8, cos, sin, turns, left, left2, fours)
    barrier()
    s = gl.full([W, 32, 4, 4], 0.0, gl.float32, squares)
    s = _score(k0, query + g * 2048, quad, g, t, s, 0, fours, squares)
    s = _score(k1, query + g * 2048, quad, g, t, s, 1, fours, squares)
    s = _score(k2, query + g * 2048, quad, g, t, s, 2, fours, squares)
    s = _score(k3, query + g * 2048, quad, g, t, s, 3, fours, squares)
    place = along(scores + (16 * quarter + g) * ROW + 128 * team + 8 * t, 2, fours) + 32 * numbers(4, fours)
    gl.inline_asm_elementwise(
        _keep(ROW), "=r,=r,=r,=r,r,r,r,r,f,f,f,f", [along(place, 3, squares) + 0 * slot, s], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip
    barrier()
    # softmax: a thread has four keys of a head
    head = warp * (4 // T) + lane // (8 * T)
    own = 4 * (lane % (8 * T))
    s4 = gl.inline_asm_elementwise(
        _quarters(16 * ROW), "=f,=f,=f,=f,r,r,r,r",
        [along(scores + head * ROW + 4 * own, 2, fours) + 0 * numbers(4, fours)], dtype=gl.float32,
        is_pure=False, pack=4,
    )  # fmt: skip
    s4 = gl.where(_get(names + 4 * own, fours) >= 0, s4 * (scale * 128.0), float("-inf"))
    top = gl.inline_asm_elementwise(
        _among("max", 8 * T),
        "=&f,f",
        [same(gl.max(s4, axis=2), ones)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    top = gl.maximum(top, -1e30)
    p = gl.exp2(s4 - along(top, 2, fours))
    total = gl.inline_asm_elementwise(
        _among("add", 8 * T), "=&f,f", [same(gl.sum(p, axis=2), ones)], dtype=gl.float32, is_pure=True, pack=1
    )
    some = total > 0
    total = gl.where(some, total, 1.0)
    inverse = gl.where(some, 128.0 / total, 0.0)
    lse = gl.where(some, top + gl.log2(total), float("-inf"))
    low, high = gl.split(gl.reshape(p, [W, 32, 2, 2]))
    pairs = gl.inline_asm_elementwise(_HALVES, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    pairs = same(pairs, twos)
    gl.inline_asm_elementwise(
        _PUT_TWO, "=r,=r,r,r,r,r", [along(chances + head * P_ROW + 2 * own, 2, twos) + pairs * 0, pairs],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        _PUT_ONE, "=r,r,f", [inverses + 4 * head, inverse], dtype=gl.int32, is_pure=False, pack=1
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
            from_at += _offset(along(lane, 2, fours), along(chunks & 15, 2, fours) + numbers(4, fours))
            acc = _product(
                _ldmatrix(from_at, True, squares), _ldmatrix(p_at, False, fours),
                _ldmatrix(p_at + 32, False, fours), acc, squares,
            )  # fmt: skip
        low, high = gl.split(gl.reshape(acc, [W, 32, 4, 2, 2]))
        low, low8 = gl.split(low)
        high, high8 = gl.split(high)
        head_at = part + g * WORDS + 4 * (chunks + t)
        head_at = along(head_at, 2, fours) + numbers(4, fours)
        real = along(first + g, 2, fours)
        gl.store(head_at, _halves(low, high, inverse, fours), mask=real < heads)
        gl.store(head_at + 8 * WORDS, _halves(low8, high8, inverse8, fours), mask=real + 8 < heads)
    for one in range(split * T, 16, SPLITS * T):
        if first + one < heads:
            _join(
                part_ptr, lse_ptr, sink_ptr, cos_at, sin_at, out_ptr, block - split, token, first, one,
                heads, HALF_ROPE, SPLITS,
            )  # fmt: skip


@gluon.jit
def _entry_scale(code):
    """Two fp16 of half the value of E4M3 bytes."""
    bits = code * 0x00800080  # value·2^-8
    return gl.inline_asm_elementwise(
        _SCALED, "=r,r,r", [bits, 0x58005800], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(low, high, factor, layout: gl.constexpr):
    return gl.inline_asm_elementwise(
        _HALVES, "=r,f,f", [same(low, layout) * factor, same(high, layout) * factor], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _join(
    part_ptr, lse_ptr, sink_ptr, cos_at, sin_at, out_ptr, block, token, first, one,
    heads: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Waits for the parts of a head a team, from `block` on, and writes them weighted by their sums, with the
    sink, turned back.
    """
    W: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = 256
    ones: gl.constexpr = _held(W)
    twos: gl.constexpr = _held(W, 2)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, ones))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, ones))[None, :]
    warp, lane = warp + lane * 0, lane + warp * 0
    local = one + (warp >> 2)
    mine = (local < 16) & (first + local < heads)
    local = gl.where(mine, local, one)
    head = first + local
    place = along(2 * (32 * (warp & 3) + lane), 2, twos) + numbers(2, twos)
    upper = (lane >> 2) & 1
    word = 2 * (32 * (warp & 3) + (lane & -8)) + 4 * (2 * (lane & 1) + upper) + (lane & 2)
    word = along(word, 2, twos) + numbers(2, twos)
    sink = gl.load(sink_ptr + head) * 1.4426950408889634
    if HALF_ROPE > 0:
        turn = word - (WORDS - HALF_ROPE)
        cos = gl.load(cos_at + turn, mask=turn >= 0, other=1.0)
        sin = gl.load(sin_at + turn, mask=turn >= 0, other=0.0)
    at = part_ptr + block * (16 * WORDS) + (along(local, 2, twos) * WORDS + place)
    log_at = along(lse_ptr + block * 64 + (4 * local + (warp & 3)), 2, twos) + 0 * place
    found = gl.inline_asm_elementwise(
        _until(SPLITS), _until_constraints(SPLITS),
        [at.to(gl.int64, bitcast=True), log_at.to(gl.int64, bitcast=True),
         along(mine.to(gl.int32), 2, twos) + 0 * place],
        dtype=_until_types(SPLITS), is_pure=False, pack=2,
    )  # fmt: skip
    sink = along(sink, 2, twos) + 0.0 * place
    peak = sink
    for i in gl.static_range(SPLITS):
        peak = gl.maximum(peak, found[SPLITS + i])
    total = gl.exp2(sink - peak)
    even = gl.full([W, 32, 2], 0.0, gl.float32, twos)
    odd = even
    for i in gl.static_range(SPLITS):
        weight = gl.exp2(found[SPLITS + i] - peak)
        total += weight
        a, b = gl.inline_asm_elementwise(
            SINGLES, "=f,=f,r", [found[i]], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        even += weight * a
        odd += weight * b
    total = 1.0 / total
    even, odd = gl.inline_asm_elementwise(
        _TRADE, "=&f,=&f,=&f,=&f,f,f,f,f,r,r", [even * total, odd * total, along(upper, 2, twos) + 0 * place],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip
    if HALF_ROPE > 0:
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    out = gl.inline_asm_elementwise(_PAIR, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    at = words_at(out_ptr) + (token * heads + along(head, 2, twos)) * WORDS + word
    gl.store(at, out, mask=along(mine, 2, twos))
