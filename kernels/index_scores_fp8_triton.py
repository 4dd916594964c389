# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Index scores through Hopper's FP8 matrix units, 32 heads of 128, exact: a prefill's many queries, and
what `index_score_one_hopper` shares with them.

E2M1 is a part of E5M2, so a key's payload becomes the left operand by moving bits: seven instructions for
eight channels, against nineteen for bf16. A step of the FP8 product takes 32 channels, just one scale group:
the four groups have sums of their own (exact, for they are small integers), which fp32 multiplies by the
key's scales and adds. The query's scales go into its E5M2 values, a head's greatest group times 2^13,
and that group's scale into the head's weight; a group 2^29 below its head's greatest counts as zero.

Within a group, low nibbles come before high ones, for keys and queries alike: so wgmma wants them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Four bytes (eight channels) to four E5M2 of the lower and four of the upper nibbles: value·2^-14.
_FP4_ASM = gl.constexpr("""
{
.reg .b32 a, b, c;
shl.b32 b, $2, 4;
shr.b32 a, $2, 3;
and.b32 a, a, 0x0E0E0E0E;
lop3.b32 $1, $2, 0x80808080, a, 0xEA;
shl.b32 c, $2, 1;
and.b32 c, c, 0x0E0E0E0E;
lop3.b32 $0, b, 0x80808080, c, 0xEA;
}
""")

# Four bytes and four scales (fp16, value·2^12) to the same with the scale, value·2^13: by way of fp16,
# whose upper byte
# is an E5M2.
_QUERY_ASM = gl.constexpr(
    """
{
.reg .b32 t0, t1, a, c, l0, l1, big;
mov.b32 big, 0x78007800;
prmt.b32 t0, $2, 0, 0x1404;
prmt.b32 t1, $2, 0, 0x3424;
"""
    + "".join(
        f"""
shl.b32 a, t{i}, 1;
and.b32 a, a, 0x0E000E00;
shl.b32 c, t{i}, 4;
lop3.b32 a, c, 0x80008000, a, 0xEA;
mul.rn.f16x2 a, a, $5;
mul.rn.f16x2 l{i}, a, ${3 + i};
shr.b32 a, t{i}, 3;
and.b32 a, a, 0x0E000E00;
lop3.b32 a, t{i}, 0x80008000, a, 0xEA;
mul.rn.f16x2 a, a, $5;
mul.rn.f16x2 t{i}, a, ${3 + i};
"""
        for i in range(2)
    ).replace("$5", "big")
    + """
prmt.b32 $0, l0, l1, 0x7531;
prmt.b32 $1, t0, t1, 0x7531;
}
"""
)


def _linear(registers, lanes, warps, shape):
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], shape))


# Bytes [64, 64] in four warps, [128, 64] in eight: a thread has four bytes of each of the four groups of
# two rows.
_BYTES, _LANES = [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
_RAW64 = _linear(_BYTES, _LANES, [[16, 0], [32, 0]], [64, 64])
_RAW128 = _linear(_BYTES, _LANES, [[16, 0], [32, 0], [64, 0]], [128, 64])
_ACC64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]))
_ACC128 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 32]))
_QUERY = gl.constexpr(gl.BlockedLayout([1, 4, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0]))  # bytes [32, 4, 16]
_SHARED = gl.constexpr(gl.NVMMASharedLayout(32, 8, 2))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _groups(e, ROWS: gl.constexpr):
    """The four groups [ROWS, 32] of [ROWS, 4, 32]."""
    a, b = gl.split(gl.permute(gl.reshape(e, [ROWS, 2, 2, 32]), (0, 1, 3, 2)))
    g0, g2 = gl.split(gl.permute(a, (0, 2, 1)))
    g1, g3 = gl.split(gl.permute(b, (0, 2, 1)))
    return g0, g1, g2, g3


@gluon.jit
def _keys(raw, ACC: gl.constexpr, ROWS: gl.constexpr):
    """The four groups of payload bytes [ROWS, 64] as left operands."""
    low, high = gl.inline_asm_elementwise(
        _FP4_ASM, "=r,=r,r", [raw], dtype=(gl.float8e5, gl.float8e5), is_pure=True, pack=4
    )
    both = gl.permute(gl.reshape(gl.join(low, high), [ROWS, 4, 16, 2]), (0, 1, 3, 2))
    g0, g1, g2, g3 = _groups(gl.reshape(both, [ROWS, 4, 32]), ROWS)
    operand: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    return (
        gl.convert_layout(g0, operand), gl.convert_layout(g1, operand),
        gl.convert_layout(g2, operand), gl.convert_layout(g3, operand),
    )  # fmt: skip


@gluon.jit
def _query(q_ptr, q_scale_ptr, token):
    """A token's queries [32, 4, 16] of low and of high nibbles, E5M2, and its heads' greatest scale codes
    [32].
    """
    head = token.to(gl.int64) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, gl.SliceLayout(2, _QUERY)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _QUERY)))
    byte = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, _QUERY)))
    at = head[:, None] * 4 + group[None, :]
    raw = gl.load(q_ptr + at[:, :, None] * 16 + byte[None, None, :])
    code = gl.load(q_scale_ptr + at).to(gl.int32)
    most = gl.max(code, axis=1)
    exponent = 27 - (most[:, None] - code)  # fp16's of 2^12 for the greatest
    power = gl.where(exponent > 0, exponent << 10, 1024 >> gl.minimum(1 - exponent, 11))
    half = power.to(gl.int16).to(gl.float16, bitcast=True)[:, :, None] + gl.full(
        [32, 4, 16], 0.0, gl.float16, _QUERY
    )
    low, high = gl.inline_asm_elementwise(
        _QUERY_ASM, "=r,=r,r,r,r", [raw, half], dtype=(gl.float8e5, gl.float8e5), is_pure=True, pack=4
    )
    return low, high, most


@gluon.jit
def _named(table, entry, table_width, ROWS: gl.constexpr):
    """The page of `entry` as the table has it; `_held` makes it one of the memory's where it is used."""
    return gl.load(table + gl.minimum(entry // ROWS, table_width - 1)).to(gl.int32)


@gluon.jit
def _held(page, page_count):
    return gl.minimum(gl.maximum(page, 0), page_count - 1)


@gluon.jit
def _row(table, entry, page_count, table_width, ROWS: gl.constexpr, PAGE: gl.constexpr, WIDTH: gl.constexpr):
    """Where entries' rows of WIDTH bytes lie, from their plane's start in the first page."""
    page = _held(_named(table, entry, table_width, ROWS), page_count).to(gl.int64)
    return page * PAGE + (entry % ROWS) * WIDTH


@gluon.jit
def _powers(scale):
    """The four groups' scales of keys' scale words, fp32 columns."""
    a = ((scale << 23) & 0x7F800000).to(gl.float32, bitcast=True)
    b = ((scale << 15) & 0x7F800000).to(gl.float32, bitcast=True)
    c = ((scale << 7) & 0x7F800000).to(gl.float32, bitcast=True)
    d = ((scale >> 1) & 0x7F800000).to(gl.float32, bitcast=True)
    return a[:, None], b[:, None], c[:, None], d[:, None]


@gluon.jit
def _start(keys, q0, q1, q2, q3, spent):
    """Starts the four groups' products; what `spent` holds is overwritten."""
    a = warpgroup_mma(keys[0], q0.permute((1, 0)), spent[0], use_acc=False, is_async=True)
    b = warpgroup_mma(keys[1], q1.permute((1, 0)), spent[1], use_acc=False, is_async=True)
    c = warpgroup_mma(keys[2], q2.permute((1, 0)), spent[2], use_acc=False, is_async=True)
    d = warpgroup_mma(keys[3], q3.permute((1, 0)), spent[3], use_acc=False, is_async=True)
    return a, b, c, d


@gluon.jit
def _sum_heads(s, powers, weight):
    """Scores of the keys: x + |x| is twice the relu, and the products carry a half."""
    x = s[0] * powers[0] + s[1] * powers[1]
    x = x + s[2] * powers[2] + s[3] * powers[3]
    return gl.sum((x + gl.abs(x)) * weight[None, :], axis=1)


@gluon.jit
def expand_queries(q_ptr, q_scale_ptr, weight_ptr, out_ptr, out_weight_ptr):
    """Grid (tokens): queries as E5M2 [pairs of tokens, 4 groups, 2, 32 heads, 32] and their weights
    [tokens, 32].
    """
    token = gl.program_id(0)
    low, high, most = _query(q_ptr, q_scale_ptr, token)
    head = gl.arange(0, 32, layout=gl.SliceLayout(1, gl.SliceLayout(2, _QUERY)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _QUERY)))
    byte = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, _QUERY)))
    row = (token // 2).to(gl.int64) * 256 + group[None, :] * 64 + (token % 2) * 32 + head[:, None]
    target = out_ptr + row[:, :, None] * 32 + byte[None, None, :]
    gl.store(target, low)
    gl.store(target + 16, high)
    at = token.to(gl.int64) * 32 + gl.arange(0, 32, layout=most.type.layout)
    weight = gl.load(weight_ptr + at).to(gl.float32) * (most << 23).to(gl.float32, bitcast=True)
    gl.store(out_weight_ptr + at, weight)


@gluon.jit
def _copy_queries(shared, shared_weights, q_ptr, weight_ptr, token):
    """Starts the copy of a pair of tokens' queries [256, 32] and head weights [64] into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [8, 1], [1, 0])
    row = gl.arange(0, 256, layout=gl.SliceLayout(1, layout))
    byte = gl.arange(0, 32, layout=gl.SliceLayout(0, layout))
    source = q_ptr + (token // 2).to(gl.int64) * 8192 + row[:, None] * 32 + byte[None, :]
    async_copy.async_copy_global_to_shared(shared, source)
    column = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [8], [0]))
    async_copy.async_copy_global_to_shared(shared_weights, weight_ptr + token.to(gl.int64) * 32 + column)
    async_copy.commit_group()


@gluon.jit
def _score_token(
    keys, powers, queries, weights, j: gl.constexpr, token, first, run, until, visible_ptr, out_ptr, best_ptr,
    width, best_width, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Scores of 128 keys for one of a pair of tokens, written."""
    z = gl.full([128, 32], 0.0, gl.float32, _ACC128)
    s = _start(
        keys,
        queries.slice(32 * j, 32, dim=0),
        queries.slice(64 + 32 * j, 32, dim=0),
        queries.slice(128 + 32 * j, 32, dim=0),
        queries.slice(192 + 32 * j, 32, dim=0),
        (z, z, z, z),
    )
    key = first + gl.arange(0, 128, layout=gl.SliceLayout(1, _ACC128))
    mine = (token >= run) & (token < until)
    limit = gl.load(visible_ptr + gl.where(mine, token, run)).to(gl.int32)
    weight = weights.slice(32 * j, 32, dim=0).load(gl.SliceLayout(0, _ACC128))
    s = warpgroup_mma_wait(0, deps=s)
    score = gl.where(key < limit, _sum_heads(s, powers, weight), float("-inf"))
    gl.store(out_ptr + token.to(gl.int64) * width + key, score, mask=mine & (key < width))
    if BLOCKS:
        layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0]))
        block = first // 8 + gl.arange(0, 16, layout=layout)
        best = gl.convert_layout(gl.max(gl.reshape(score, [16, 8]), axis=1), layout)
        gl.store(best_ptr + token.to(gl.int64) * best_width + block, best, mask=mine & (block < best_width))


@gluon.jit(do_not_specialize=["tokens", "page_count", "sequences", "table_width"])
def score_many(
    q_ptr, weight_ptr, pages_ptr, table_ptr, seq_ptr, visible_ptr, out_ptr, best_ptr,
    tokens, page_count, sequences, table_width, width, best_width, chunk,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    CHUNK: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Grid (key tiles of 128, ceil(tokens / chunk)), chunk even and <= CHUNK: a tile of keys stays in
    registers.

    q and weight come from `expand_queries`, with room for 8 tokens more (of any value). Two programs a
    multiprocessor
    overlap one's products and the other's sums: give it at most 128 registers.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    first = gl.program_id(0) * 128
    base = gl.program_id(1) * chunk
    end = gl.minimum(base + chunk, tokens)
    place = base + gl.arange(0, CHUNK, layout=line)
    inside = place < end
    owners = gl.load(seq_ptr + place, mask=inside, other=-1).to(gl.int32)
    seen = gl.load(visible_ptr + place, mask=inside, other=0).to(gl.int32)
    queries = gl.allocate_shared_memory(gl.float8e5, [4, 256, 32], _SHARED)
    weights = gl.allocate_shared_memory(gl.float32, [4, 64], _FLAT)
    key = first + gl.arange(0, 128, layout=gl.SliceLayout(1, _RAW128))
    key_s = first + gl.arange(0, 128, layout=gl.SliceLayout(1, _ACC128))
    byte = gl.arange(0, 64, layout=gl.SliceLayout(0, _RAW128))
    run = base
    while run < end:  # one pass for every run of tokens of one sequence
        owner = gl.load(seq_ptr + run).to(gl.int32)
        until = gl.minimum(gl.min(gl.where((place >= run) & (owners != owner), place, end), axis=0), end)
        reach = gl.max(gl.where((place >= run) & (place < until), seen, 0), axis=0)
        if first < reach:
            even = run // 2 * 2
            for i in gl.static_range(2):
                pair = gl.minimum(even + 2 * i, until)
                _copy_queries(queries.index(i), weights.index(i), q_ptr, weight_ptr, pair)
            table = table_ptr + gl.minimum(gl.maximum(owner, 0), sequences - 1).to(gl.int64) * table_width
            at = _row(table, key, page_count, table_width, ROWS, PAGE, 64) + PAYLOAD
            keys = _keys(gl.load(pages_ptr + at[:, None] + byte[None, :]), _ACC128, 128)
            at = _row(table, key_s, page_count, table_width, ROWS, PAGE, 4) + SCALES
            powers = _powers(gl.load((pages_ptr + at).to(gl.pointer_type(gl.int32), bitcast=True)))
            stage = 0
            for token in range(even, until, 2):
                async_copy.wait_group(1)
                fence_async_shared()
                ahead = (stage + 2) & 3
                pair = gl.minimum(token + 4, until)
                _copy_queries(queries.index(ahead), weights.index(ahead), q_ptr, weight_ptr, pair)
                for j in gl.static_range(2):
                    _score_token(
                        keys, powers, queries.index(stage), weights.index(stage), j, token + j, first, run,
                        until,
                        visible_ptr, out_ptr, best_ptr, width, best_width, BLOCKS,
                    )  # fmt: skip
                stage = (stage + 1) & 3
            async_copy.wait_group(0)
        else:
            nothing = gl.full([128], float("-inf"), gl.float32, gl.SliceLayout(1, _ACC128))
            block = first // 8 + (key_s - first)
            for token in range(run, until):
                row = gl.to_tensor(token).to(gl.int64)
                gl.store(out_ptr + row * width + key_s, nothing, mask=key_s < width)
                if BLOCKS:
                    at_best = best_ptr + row * best_width + block
                    gl.store(at_best, nothing, mask=(key_s < first + 16) & (block < best_width))
        run = until
