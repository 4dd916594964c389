# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Index scores for Hopper's matrix units, 32 heads of 128: a few queries of a sequence, or a gathered pool.

Packed keys go from memory to wgmma's registers directly, as bf16. `index_score_one_hopper` has one
query, `index_scores_fp8_triton` prefill.

A key is the left operand. Its 64 payload bytes are loaded by four threads, 16 bytes each: one scale group
a thread. Which of
a thread's 32 channels meets which step of the product does not matter so long as the queries are permuted
alike, so channels
are named such that expanded bytes already lie where wgmma wants them: no shared memory, no shuffle.
Keys and queries carry 2^-32 each (see `packed_triton`); the head weights give 2^64 back.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Eight packed channels and their scale (two bf16, value·2^126) to eight bf16, by nibbles (3, 7), (2, 6),
# (1, 5), (0, 4):
# E2M1's three magnitude bits land on bf16's bits 6 to 8, value·2^-126.
_FP4_ASM = gl.constexpr("""
{
.reg .b32 a, b, c, d, s;
shr.b32 a, $8, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 a, $8, 0x80008000, a, 0xEA;
mul.rn.bf16x2 a, a, $9;
mov.b32 {$0, $1}, a;
shr.b32 b, $8, 2;
and.b32 b, b, 0x01C001C0;
shl.b32 s, $8, 4;
lop3.b32 b, s, 0x80008000, b, 0xEA;
mul.rn.bf16x2 b, b, $9;
mov.b32 {$2, $3}, b;
shl.b32 c, $8, 2;
and.b32 c, c, 0x01C001C0;
shl.b32 s, $8, 8;
lop3.b32 c, s, 0x80008000, c, 0xEA;
mul.rn.bf16x2 c, c, $9;
mov.b32 {$4, $5}, c;
shl.b32 d, $8, 6;
and.b32 d, d, 0x01C001C0;
shl.b32 s, $8, 12;
lop3.b32 d, s, 0x80008000, d, 0xEA;
mul.rn.bf16x2 d, d, $9;
mov.b32 {$6, $7}, d;
}
""")

_LANES = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
_WORDS = [[0, 1], [0, 2]]
_LANES3 = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
_WORDS3 = [[0, 0, 1], [0, 0, 2]]
_WARPS4, _WARPS4_3 = [[16, 0], [32, 0]], [[16, 0, 0], [32, 0, 0]]


def _linear(registers, lanes, warps, shape):
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], shape))


# Words of keys [64 or 128, 16] in four warps, [128, 16] in eight, of queries [32, 16] in four; as [rows, 4
# groups, 4] for scales.
_RAW64 = _linear([*_WORDS, [8, 0]], _LANES, _WARPS4, [64, 16])
_RAW64_3 = _linear([*_WORDS3, [8, 0, 0]], _LANES3, _WARPS4_3, [64, 4, 4])
_RAW128 = _linear([*_WORDS, [8, 0], [64, 0]], _LANES, _WARPS4, [128, 16])
_RAW128_3 = _linear([*_WORDS3, [8, 0, 0], [64, 0, 0]], _LANES3, _WARPS4_3, [128, 4, 4])
_QUERY = _linear(_WORDS, _LANES, [[8, 0], [16, 0]], [32, 16])
_QUERY_3 = _linear(_WORDS3, _LANES3, [[8, 0, 0], [16, 0, 0]], [32, 4, 4])
_ACC32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _expand(payload, scales, ROWS: gl.constexpr, RAW: gl.constexpr, RAW3: gl.constexpr):
    """bf16·2^-32 [ROWS, 128] of payload words [ROWS, 16] and E8M0 bytes [ROWS, 4], channels in wgmma's
    order.
    """
    power = gl.minimum(scales.to(gl.int32) + 94, 254) * 0x00800080
    wide = power[:, :, None] + gl.full([ROWS, 4, 4], 0, gl.int32, RAW3)
    scale = gl.convert_layout(gl.reshape(wide, [ROWS, 16]), RAW)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _FP4_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [payload, scale], is_pure=True, pack=1,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        gl.bfloat16),
    )  # fmt: skip
    front = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    both = gl.join(front, gl.join(gl.join(c0, c1), gl.join(d0, d1)))  # [ROWS, group·word, pair, 2, 2]
    both = gl.permute(gl.reshape(both, [ROWS, 4, 4, 2, 2, 2]), (0, 2, 5, 4, 1, 3))
    return gl.reshape(both, [ROWS, 128])


@gluon.jit
def _place(
    pages, page, row, ROWS: gl.constexpr, PAGE: gl.constexpr, OFFSET: gl.constexpr, WIDTH: gl.constexpr
):
    return pages + page.to(gl.int64) * PAGE + OFFSET + (row * WIDTH).to(gl.int64)


@gluon.jit
def _load_keys(
    pages, table, entries, page_count, table_width, first, limit,
    KEYS: gl.constexpr, RAW: gl.constexpr, RAW3: gl.constexpr,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Raw bytes of keys first .. first+KEYS of the sequence whose table row is `table` (GATHER: of the
    entries named).
    """
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, RAW))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, RAW3)))
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, RAW))
    key3 = gl.arange(0, KEYS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RAW3)))
    if ROWS % KEYS == 0 and not GATHER:
        column = gl.minimum(first // ROWS, table_width - 1)
        page = gl.minimum(gl.maximum(gl.load(table + column).to(gl.int32), 0), page_count - 1)
        row = first % ROWS
        at = _place(pages, page, row + key, ROWS, PAGE, PAYLOAD, 64)
        at3 = _place(pages, page, row + key3, ROWS, PAGE, SCALES, 4)
    else:
        if GATHER:
            entry = gl.maximum(gl.load(entries + first + key, mask=first + key < limit, other=0), 0).to(
                gl.int32
            )
            entry3 = gl.maximum(gl.load(entries + first + key3, mask=first + key3 < limit, other=0), 0).to(
                gl.int32
            )
        else:
            entry = first + key
            entry3 = first + key3
        page = gl.load(table + gl.minimum(entry // ROWS, table_width - 1)).to(gl.int32)
        page3 = gl.load(table + gl.minimum(entry3 // ROWS, table_width - 1)).to(gl.int32)
        at = _place(
            pages, gl.minimum(gl.maximum(page, 0), page_count - 1), entry % ROWS, ROWS, PAGE, PAYLOAD, 64
        )
        at3 = _place(
            pages, gl.minimum(gl.maximum(page3, 0), page_count - 1), entry3 % ROWS, ROWS, PAGE, SCALES, 4
        )
    words = at.to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + word[None, :]
    return gl.load(words), gl.load(at3[:, None] + group[None, :])


@gluon.jit
def _product(keys, queries, j: gl.constexpr, KEYS: gl.constexpr):
    """Starts keys·queries[j]."""
    s = gl.full([KEYS, 32], 0.0, gl.float32, _ACC32)
    return warpgroup_mma(keys, queries.index(j).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _head_weights(weight_ptr, token, ACC: gl.constexpr):
    """A token's head weights times 2^63, as the columns of its products."""
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC))
    return gl.load(weight_ptr + token.to(gl.int64) * 32 + column).to(gl.float32) * 9223372036854775808.0


@gluon.jit
def decode_scores(
    q_ptr, q_scale_ptr, weight_ptr, pages_ptr, table_ptr, seq_ptr, visible_ptr, entries_ptr, out_ptr,
    best_ptr,
    tokens, page_count, sequences, table_width, width, best_width, tiles_each,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    KEYS: gl.constexpr, TOKENS: gl.constexpr, GATHER: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(tiles / tiles_each), ceil(tokens / TOKENS)): TOKENS neighbouring tokens over a run of key
    tiles.

    Keys are read once for neighbours of one sequence. GATHER scores entries [tokens, width] instead
    (TOKENS 1).
    BLOCKS also writes the greatest score of every 8 keys to best [tokens, best_width].
    """
    RAW: gl.constexpr = _RAW64 if KEYS == 64 else _RAW128
    RAW3: gl.constexpr = _RAW64_3 if KEYS == 64 else _RAW128_3
    ACC: gl.constexpr = _ACC32
    operand: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    base = gl.program_id(1) * TOKENS
    queries = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, 32, 128], _SHARED)
    head = gl.arange(0, 32, layout=gl.SliceLayout(1, _QUERY)).to(gl.int64)
    head3 = gl.arange(0, 32, layout=gl.SliceLayout(1, gl.SliceLayout(2, _QUERY_3))).to(gl.int64)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, _QUERY))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _QUERY_3)))
    for i in gl.static_range(TOKENS):
        asked = gl.minimum(base + i, tokens - 1)
        q_words = gl.load(
            q_ptr.to(gl.pointer_type(gl.int32)) + (asked * 32 + head)[:, None] * 16 + word[None, :]
        )
        q_scales = gl.load(q_scale_ptr + (asked * 32 + head3)[:, None] * 4 + group[None, :])
        queries.index(i).store(_expand(q_words, q_scales, 32, _QUERY, _QUERY_3))
    if TOKENS == 1:
        only = _head_weights(weight_ptr, base, ACC)
    fence_async_shared()
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, ACC))
    block = gl.arange(
        0, KEYS // 8, layout=gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    )
    start = gl.program_id(0) * tiles_each * KEYS
    stop = gl.minimum(start + tiles_each * KEYS, width)
    end = gl.minimum(base + TOKENS, tokens)
    run = base
    while run < end:  # one pass for every run of tokens of one sequence
        sequence = gl.load(seq_ptr + run).to(gl.int32)
        reach = gl.to_tensor(0)
        until = run
        if GATHER:
            reach = width
            until = run + 1
        else:
            same = 1
            for j in gl.static_range(TOKENS):
                at = gl.minimum(base + j, tokens - 1)
                inside = (base + j >= run) & (base + j < end)
                same = gl.where(inside & (gl.load(seq_ptr + at).to(gl.int32) != sequence), 0, same)
                until = gl.where(inside & (same == 1), base + j + 1, until)
                seen = gl.load(visible_ptr + at).to(gl.int32)
                reach = gl.where(inside & (same == 1), gl.maximum(reach, seen), reach)
        table = table_ptr + gl.minimum(gl.maximum(sequence, 0), sequences - 1).to(gl.int64) * table_width
        entries = entries_ptr + run.to(gl.int64) * width
        last = gl.minimum(stop, reach)
        payload, scales = _load_keys(
            pages_ptr, table, entries, page_count, table_width, gl.minimum(start, gl.maximum(last - 1,
            0) // KEYS * KEYS),
            width, KEYS, RAW, RAW3, ROWS, PAGE, PAYLOAD, SCALES, GATHER,
        )  # fmt: skip
        for first in range(start, last, KEYS):
            keys = gl.convert_layout(_expand(payload, scales, KEYS, RAW, RAW3), operand)
            ahead = gl.where(first + KEYS < last, first + KEYS, first)
            payload, scales = _load_keys(
                pages_ptr, table, entries, page_count, table_width, ahead, width,
                KEYS, RAW, RAW3, ROWS, PAGE, PAYLOAD, SCALES, GATHER,
            )  # fmt: skip
            coming = _product(keys, queries, 0, KEYS)
            for j in gl.static_range(TOKENS):
                s = warpgroup_mma_wait(0, deps=[coming])
                if j + 1 < TOKENS:
                    coming = _product(keys, queries, j + 1, KEYS)
                token = base + j
                mine = (token >= run) & (token < until)
                weight = (
                    only if TOKENS == 1 else _head_weights(weight_ptr, gl.minimum(token, tokens - 1), ACC)
                )
                score = gl.sum((s + gl.abs(s)) * weight[None, :], axis=1)  # twice the relu, on the wider pipe
                row = token.to(gl.int64)
                shown = (first + key < width) & mine
                if GATHER:
                    present = gl.load(entries_ptr + row * width + first + key, mask=shown, other=-1) >= 0
                else:
                    limit = (
                        reach
                        if TOKENS == 1
                        else gl.load(visible_ptr + gl.minimum(token, tokens - 1)).to(gl.int32)
                    )
                    present = first + key < limit
                score = gl.where(present, score, float("-inf"))
                gl.store(out_ptr + row * width + first + key, score, mask=shown)
                if BLOCKS:
                    best = gl.convert_layout(
                        gl.max(gl.reshape(score, [KEYS // 8, 8]), axis=1), block.type.layout
                    )
                    where = first // 8 + block
                    gl.store(best_ptr + row * best_width + where, best, mask=(where < best_width) & mine)
        rest = gl.maximum((last - start + KEYS - 1) // KEYS, 0) * KEYS + start
        for first in range(rest, stop, KEYS):
            for j in gl.static_range(TOKENS):
                token = base + j
                if (token >= run) & (token < until):
                    row = token.to(gl.int64)
                    nothing = gl.full([KEYS], float("-inf"), gl.float32, key.type.layout)
                    gl.store(out_ptr + row * width + first + key, nothing, mask=first + key < width)
                    if BLOCKS:
                        where = first // 8 + block
                        none = gl.full([KEYS // 8], float("-inf"), gl.float32, block.type.layout)
                        gl.store(best_ptr + row * best_width + where, none, mask=where < best_width)
        run = until
