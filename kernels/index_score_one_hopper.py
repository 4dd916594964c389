# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Index scores of one query a sequence: products as in `index_scores_fp8_triton`, keys' scales relative to
the first group's, and four rows' sums exchanged among four lanes, so that each ends with one key.

A tile is 128 keys, 32 a warp. A warp copies and reads its own keys, so no barrier stands between its tiles;
products keep the four of a program in step. What a warp has in shared memory is therefore not Gluon's, which
would put barriers in, but an area of its own: STAGES payloads [128, 64] (rows' four groups of 16 bytes
swizzled), STAGES scale words [128], ratios [128, 4].

Keys, page table and `seq` are older than the launch before (`index_scores` says so to its callers), so every
program's first STAGES tiles are asked for before `grid_wait`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.index_scores_fp8_triton import (
    _ACC64,
    _RAW64,
    _SHARED,
    _groups,
    _held,
    _named,
    _query,
    _start,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

KEYS = gl.constexpr(128)  # of a tile
STAGES = 4
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_KEY_REGISTERS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))

# A warp's keys on their way: $1 and $2 where payload and scale words go, $3 and $4 whence, $5 whether.
_COPY = gl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $5, 0;
@p cp.async.cg.shared.global [$1], [$3], 16;
@p cp.async.cg.shared.global [$1+512], [$3+512], 16;
@p cp.async.cg.shared.global [$1+1024], [$3+1024], 16;
@p cp.async.cg.shared.global [$1+1536], [$3+1536], 16;
@p cp.async.ca.shared.global [$2], [$4], 4;
cp.async.commit_group;
mov.b32 $0, 0;
}""")


def fits(pages: torch.Tensor, planes: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether a warp's 32 keys lie in one page and in whole pieces of 16 bytes."""
    places = (pages.data_ptr(), pages.stride(0), planes[0][0], planes[1][0])
    return planes[0][2] % 32 == 0 and not any(place % 16 for place in places)


def launch(arguments: tuple[Any, ...], place: tuple[Any, ...], *, early: bool) -> None:
    """Starts `score_one` with its arguments up to best_width and its constants up to BLOCKS; `early`: before
    the launch before has ended.
    """
    tokens, width = arguments[0].shape[0], arguments[-2]
    tiles = triton.cdiv(width, KEYS.value)
    programs = 132 * (2 if tiles * tokens <= 2048 else 4)
    score_one[(min(tiles, max(1, programs // tokens)), tokens)](
        *arguments, tiles, *place, STAGES, num_warps=4, maxnreg=128, launch_pdl=early
    )


@gluon.constexpr_function
def _area(stages):
    size = (stages * 8704 + 2048 + 1023) // 1024 * 1024
    return f".shared .align 1024 .b8 score_area[{size}];\nmov.u32 $0, score_area;"


@gluon.constexpr_function
def _there(pending):
    """A warp waits for its copies but for the last `pending`."""
    return f"cp.async.wait_group {pending};\nbar.warp.sync -1;\nmov.b32 $0, 0;"


@gluon.constexpr_function
def _expanded(offset):
    """A row's payload and that of the row eight further on, as E5M2: four bytes of each of the four groups'
    lower ($0 .. $7) and upper nibbles ($8 .. $15); $16 the address for ldmatrix.
    """
    lines = []
    for i in range(8):
        if i % 4 == 0:
            lines.append(
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{w0, w1, w2, w3}}, [$16+{offset + 128 * i}];"
            )
        lines.append(f"""shl.b32 b, w{i % 4}, 4;
shr.b32 a, w{i % 4}, 3;
and.b32 a, a, 0x0E0E0E0E;
lop3.b32 ${8 + i}, w{i % 4}, 0x80808080, a, 0xEA;
shl.b32 c, w{i % 4}, 1;
and.b32 c, c, 0x0E0E0E0E;
lop3.b32 ${i}, b, 0x80808080, c, 0xEA;""")
    return "{\n.reg .b32 a, b, c, w<4>;\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _made(stages):
    """Of the scale word of a thread's key, in stage $1 of the area $2, four fp32."""
    return f"""{{
.reg .b32 t, a, b, c, d, m;
mov.u32 t, %tid.x;
shl.b32 m, $1, 7;
add.s32 m, m, t;
mad.lo.s32 m, m, 4, $2;
ld.shared.b32 d, [m+{8192 * stages}];
mad.lo.s32 t, t, 16, $2;
and.b32 a, d, 255;
bfe.u32 b, d, 8, 8;
bfe.u32 c, d, 16, 8;
shr.u32 d, d, 24;
max.s32 m, b, c;
max.s32 m, m, d;
sub.s32 m, m, 60;
max.s32 a, a, m;
sub.s32 m, 127, a;
add.s32 b, b, m;
add.s32 c, c, m;
add.s32 d, d, m;
max.s32 b, b, 0;
max.s32 c, c, 0;
max.s32 d, d, 0;
shl.b32 a, a, 23;
shl.b32 b, b, 23;
shl.b32 c, c, 23;
shl.b32 d, d, 23;
bar.warp.sync -1;
st.shared.v4.b32 [t+{8704 * stages}], {{b, c, d, a}};
bar.warp.sync -1;
mov.b32 $0, 0;
}}"""


@gluon.constexpr_function
def _two(offset):
    return f"""ld.shared.v4.f32 {{$0, $2, $4, $6}}, [$8+{offset}];
ld.shared.v4.f32 {{$1, $3, $5, $7}}, [$8+{offset + 128}];"""


@gluon.jit
def _copy(
    to, word_to, pages, page, page_count, tile, inside,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Starts the copy of every warp's 32 keys of a tile, of which `page` is the warp's, if `inside`."""
    thread = gl.arange(0, 128, layout=_LINE)
    at = pages + _held(page, page_count).to(gl.int64) * PAGE
    if ROWS % KEYS == 0:
        row = (tile.to(gl.uint32) * KEYS % ROWS).to(gl.int32)
        source = at + (PAYLOAD + row * 64) + thread * 16 + thread // 32 * 1536
        scale = at + (SCALES + row * 4) + thread * 4
    else:
        row = (tile * KEYS + thread // 32 * 32) % ROWS
        source = at + PAYLOAD + row * 64 + thread % 32 * 16
        scale = at + SCALES + row * 4 + thread % 32 * 4
    gl.inline_asm_elementwise(
        _COPY, "=r,r,r,l,l,r", [to, word_to, source, scale, inside.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _keys(address, HALF: gl.constexpr):
    """The four groups of half of each warp's keys as left operands."""
    low, high = gl.inline_asm_elementwise(
        _expanded(1024 * HALF), _KEY_REGISTERS, [address], dtype=(gl.float8e5, gl.float8e5), is_pure=False,
        pack=32,
    )  # fmt: skip
    both = gl.permute(gl.reshape(gl.join(low, high), [64, 4, 16, 2]), (0, 1, 3, 2))
    g0, g1, g2, g3 = _groups(gl.reshape(both, [64, 4, 32]), 64)
    operand: gl.constexpr = gl.DotOperandLayout(0, _ACC64, 4)
    return (
        gl.convert_layout(g0, operand), gl.convert_layout(g1, operand),
        gl.convert_layout(g2, operand), gl.convert_layout(g3, operand),
    )  # fmt: skip


@gluon.jit
def _make_ratios(stage, area, STAGES: gl.constexpr):
    """Of the scale words of a stage: the other groups' scales in units of the first's, and that itself.

    So the first group's sums need no multiplication, and the keys' scores one. A first group that is more
    than 2^60 below another is taken for 2^60 below it: nothing, in fp32.
    """
    gl.inline_asm_elementwise(_made(STAGES), "=&r,r,r", [stage, area], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _read_ratios(address, OFFSET: gl.constexpr):
    """What `_make_ratios` made, as columns of the products of half of each warp's keys."""
    b, c, d, a = gl.inline_asm_elementwise(
        _two(OFFSET), "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r", [address],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip
    return b[:, None], c[:, None], d[:, None], a[:, None]


@gluon.jit
def _weights(weight_ptr, q_scale_ptr, token):
    """Head weights times the head's greatest scale, as columns of a product."""
    head = token.to(gl.int64) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, _ACC64))
    code = gl.load(q_scale_ptr.to(gl.pointer_type(gl.int32)) + head)
    low = gl.maximum(code & 255, (code >> 8) & 255)
    most = gl.maximum(low, gl.maximum((code >> 16) & 255, (code >> 24) & 255))
    return gl.load(weight_ptr + head).to(gl.float32) * (most << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _parts(s, ratios, weight):
    """Four lanes' parts of 64 keys' scores, of keys and of those eight further on [4, 8, 4].

    x + |x| is twice the relu, and the products carry a half.
    """
    x = s[0] + s[1] * ratios[0]
    x = x + s[2] * ratios[1]
    x = x + s[3] * ratios[2]
    x = (x + gl.abs(x)) * weight[None, :]
    x = gl.reshape(gl.permute(gl.reshape(x, [64, 4, 4, 2]), (0, 2, 1, 3)), [64, 4, 8])
    x = gl.sum(x, axis=2)
    x = x * gl.convert_layout(ratios[3], x.type.layout, assert_trivial=True)
    return gl.split(gl.permute(gl.reshape(x, [4, 2, 8, 4]), (0, 2, 3, 1)))


@gluon.jit
def _exchanged(mine, others, LANES: gl.constexpr):
    """`mine` and what the lane LANES further holds as `others`."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; shfl.sync.bfly.b32 t, $2, " + LANES + ", 31, -1; add.rn.f32 $0, $1, t; }", "=f,f,f",
        [mine, others], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _greatest(x):
    """The greatest over lanes of equal number modulo four."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 s, t;
shfl.sync.bfly.b32 t, $1, 4, 31, -1; max.f32 s, $1, t;
shfl.sync.bfly.b32 t, s, 8, 31, -1; max.f32 s, s, t;
shfl.sync.bfly.b32 t, s, 16, 31, -1; max.f32 $0, s, t; }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _write(a, b, c, d, out, best_out, first, reach, width, best_width, BLOCKS: gl.constexpr):
    """Four lanes' parts of 128 keys' scores, added and written."""
    # Of a group of four lanes the first adds up a, then b, c, d.
    layout: gl.constexpr = a.type.layout
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    odd = (warp + row + lane >= 0) & (lane % 2 == 1)
    upper = (warp + row + lane >= 0) & (lane >= 2)
    x = _exchanged(gl.where(odd, b, a), gl.where(odd, a, b), "1")
    y = _exchanged(gl.where(odd, d, c), gl.where(odd, c, d), "1")
    x = _exchanged(gl.where(upper, y, x), gl.where(upper, x, y), "2")
    key = warp * 32 + row + lane % 2 * 8 + lane // 2 * 16
    block = warp * 4 + lane % 2 + lane // 2 * 2
    x = gl.where(key < reach - first, x, float("-inf"))
    gl.store(out + first + key, x, mask=key < width - first)
    if BLOCKS:
        mask = (row == 0) & (block < best_width - first // 8)
        gl.store(best_out + first // 8 + block + row * 0, _greatest(x), mask=mask)


@gluon.jit(do_not_specialize=["page_count", "sequences", "table_width", "tiles"])
def score_one(
    q_ptr, q_scale_ptr, weight_ptr, pages_ptr, table_ptr, seq_ptr, visible_ptr, out_ptr, best_ptr,
    page_count, sequences, table_width, width, best_width, tiles,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (at most tiles, tokens): program p scores tiles p, p + programs, ... of one token.

    BLOCKS also writes the greatest score of every 8 keys to best [tokens, best_width]. For `launch_pdl`, with
    128 registers: four programs a multiprocessor.
    """
    token = gl.program_id(1)
    me = gl.program_id(0)
    programs = gl.num_programs(0)
    queries = gl.allocate_shared_memory(gl.float8e5, [4, 32, 32], _SHARED)
    area = gl.inline_asm_elementwise(_area(STAGES), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # Nobody waits for the number of the only sequence.
    sequence = gl.load(seq_ptr + token, mask=sequences > 1, other=0).to(gl.int32)
    sequence = gl.minimum(gl.maximum(sequence, 0), sequences - 1)
    table = table_ptr + sequence.to(gl.int64) * table_width
    pages = pages_ptr.to(gl.int64, bitcast=True)
    thread = gl.arange(0, 128, layout=_LINE)
    to = area + thread // 32 * 2048 + thread % 32 // 4 * 64 + (thread % 4 ^ thread % 32 // 8) * 16
    word_to = area + STAGES * 8192 + thread * 4
    first = 0 if ROWS % KEYS == 0 else thread // 32 * 32  # of a warp's keys
    named = ()
    for i in gl.static_range(STAGES + 1):
        named += (_named(table, (me + i * programs) * KEYS + first, table_width, ROWS),)  # type: ignore[assignment]
    for i in gl.static_range(STAGES):
        early = me + i * programs
        _copy(
            to + i * 8192, word_to + i * 512, pages, named[i], page_count, early, early < tiles,
            ROWS, PAGE, PAYLOAD, SCALES,
        )  # fmt: skip
    page = named[STAGES]  # type: ignore[var-annotated]
    grid_wait()
    grid_release()
    reach = gl.load(visible_ptr + token).to(gl.int32)
    low, high, _ = _query(q_ptr, q_scale_ptr, token)
    weight = _weights(weight_ptr, q_scale_ptr, token)
    seen = gl.minimum(tiles, (gl.maximum(reach, 0) + (KEYS - 1)) // KEYS)
    out = out_ptr + token.to(gl.int64) * width
    best_out = best_ptr + token.to(gl.int64) * best_width
    both = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 2)), [32, 4, 32])
    g0, g1, g2, g3 = _groups(both, 32)
    queries.index(0).store(g0)
    queries.index(1).store(g1)
    queries.index(2).store(g2)
    queries.index(3).store(g3)
    fence_async_shared()
    barrier()
    q = (queries.index(0), queries.index(1), queries.index(2), queries.index(3))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC64))
    ratio_at = area + (row // 16 * 32 + row % 8) * 16
    # For ldmatrix, lane 4 (row % 8) + byte // 4 % 4 names row lane % 8 of group lane // 8.
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _RAW64))
    byte = gl.arange(0, 64, layout=gl.SliceLayout(0, _RAW64))
    lane = (row % 8 * 4)[:, None] + (byte // 4 % 4)[None, :]
    keys_at = area + (row // 16 * 2048)[:, None] + lane % 8 * 64 + ((lane // 8) ^ (lane % 8 // 2)) * 16
    z = gl.full([64, 32], 0.0, gl.float32, _ACC64)
    stage = 0
    for tile in range(me, seen, programs):
        gl.inline_asm_elementwise(_there(STAGES - 1), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        here = keys_at + stage * 8192
        s = _start(_keys(here, 0), q[0], q[1], q[2], q[3], (z, z, z, z))
        next = tile + STAGES * programs
        after = _named(table, (next + programs) * KEYS + first, table_width, ROWS)
        _make_ratios(stage, area, STAGES)
        s = warpgroup_mma_wait(0, deps=s)
        a, b = _parts(s, _read_ratios(ratio_at, STAGES * 8704), weight)
        s = _start(_keys(here, 1), q[0], q[1], q[2], q[3], (z, z, z, z))
        _copy(
            to + stage * 8192, word_to + stage * 512, pages, page, page_count, next, next < seen,
            ROWS, PAGE, PAYLOAD, SCALES,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=s)
        c, d = _parts(s, _read_ratios(ratio_at, STAGES * 8704 + 256), weight)
        _write(a, b, c, d, out, best_out, tile * KEYS, reach, width, best_width, BLOCKS)
        page = after
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    gl.inline_asm_elementwise(_there(0), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    block = gl.arange(0, 16, layout=_LINE)
    for rest in range(me + (seen - me + programs - 1) // programs * programs, tiles, programs):
        nothing = gl.full([KEYS], float("-inf"), gl.float32, _LINE)
        gl.store(out + rest * KEYS + thread, nothing, mask=thread < width - rest * KEYS)
        if BLOCKS:
            none = gl.full([16], float("-inf"), gl.float32, _LINE)
            gl.store(best_out + rest * 16 + block, none, mask=block < best_width - rest * 16)
