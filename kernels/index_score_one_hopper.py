# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Index scores of one query a sequence: products as in `index_scores_fp8_triton`, keys' scales relative to
the first group's, and four rows' sums exchanged among four lanes, so that each ends with one key.
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import grid_release, grid_wait
from cedar.kernels.index_scores_fp8_triton import (
    _ACC64,
    _RAW64,
    _SHARED,
    _groups,
    _held,
    _keys,
    _linear,
    _named,
    _query,
    _row,
    _start,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)

_COPY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # bytes [.., 64], 16 a thread
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_FOUR = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
# Four values of each of a thread's two rows of a product.
_FOURS = _linear(
    [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [64, 4]
)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
_SHARED_RAW = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))


@gluon.jit
def _weights(weight_ptr, q_scale_ptr, token):
    """Head weights times the head's greatest scale, as columns of a product."""
    head = token.to(gl.int64) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, _ACC64))
    code = gl.load(q_scale_ptr.to(gl.pointer_type(gl.int32)) + head)
    low = gl.maximum(code & 255, (code >> 8) & 255)
    most = gl.maximum(low, gl.maximum((code >> 16) & 255, (code >> 24) & 255))
    return gl.load(weight_ptr + head).to(gl.float32) * (most << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _copy_keys(
    raw, lanes, pages, table, page, page_count, table_width, first,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the payload [128, 64] of keys from `first` on, which lie in `page`; `lanes` point
    to the first keys of the first page.
    """
    if ROWS % 128 == 0:
        source = lanes + (page.to(gl.int64) * PAGE + first.to(gl.uint32) % ROWS * 64)
    else:
        key = gl.arange(0, 128, layout=gl.SliceLayout(1, _COPY))
        byte = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
        at = _row(table, first + key, page_count, table_width, ROWS, PAGE, 64) + PAYLOAD
        source = pages + at[:, None] + byte[None, :]
    async_copy.async_copy_global_to_shared(raw, source)
    async_copy.commit_group()


@gluon.jit
def _scale_words(
    lanes, pages, table, page, page_count, table_width, first,
    ROWS: gl.constexpr, PAGE: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Scale words [128] of the same keys, one a thread."""
    if ROWS % 128 == 0:
        source = lanes + (page.to(gl.int64) * PAGE + first.to(gl.uint32) % ROWS * 4)
    else:
        key = gl.arange(0, 128, layout=_LINE)
        source = pages + _row(table, first + key, page_count, table_width, ROWS, PAGE, 4) + SCALES
    return gl.load(source.to(gl.pointer_type(gl.int32), bitcast=True))


@gluon.jit
def _ratios(word):
    """Of keys' scale words, as [128, 4]: the other groups' scales in units of the first's, and that itself.

    So the first group's sums need no multiplication, and the keys' scores one. A first group that is more
    than 2^60 below another is taken for 2^60 below it: nothing, in fp32.
    """
    a = word & 255
    b = (word >> 8) & 255
    c = (word >> 16) & 255
    d = (word >> 24) & 255
    a = gl.maximum(a, gl.maximum(b, gl.maximum(c, d)) - 60)
    base = 127 - a
    b = gl.maximum(b + base, 0) << 23
    c = gl.maximum(c + base, 0) << 23
    d = gl.maximum(d + base, 0) << 23
    four = gl.reshape(gl.join(gl.join(b, d), gl.join(c, a << 23)), [128, 4])  # b, c, d, a
    return gl.convert_layout(four, _FOUR, assert_trivial=True).to(gl.float32, bitcast=True)


@gluon.jit
def _read_ratios(ratios):
    """What `_ratios` made of 64 keys, as columns of their products."""
    low, high = gl.split(gl.permute(gl.reshape(ratios.load(_FOURS), [64, 2, 2]), (0, 2, 1)))
    b, c = gl.split(low)
    d, a = gl.split(high)
    at: gl.constexpr = gl.SliceLayout(1, _ACC64)
    return (
        gl.convert_layout(b, at, assert_trivial=True)[:, None],
        gl.convert_layout(c, at, assert_trivial=True)[:, None],
        gl.convert_layout(d, at, assert_trivial=True)[:, None],
        gl.convert_layout(a, at, assert_trivial=True)[:, None],
    )


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
def _score_tile(
    raw, ratios, queries, weight, out, best_out, first, reach, width, best_width,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Scores of 128 keys from `first` on, written."""
    z = gl.full([64, 32], 0.0, gl.float32, _ACC64)
    zeros = (z, z, z, z)
    q = (queries.index(0), queries.index(1), queries.index(2), queries.index(3))
    keys = _keys(raw.slice(0, 64, dim=0).load(_RAW64), _ACC64, 64)
    s = warpgroup_mma_wait(0, deps=_start(keys, q[0], q[1], q[2], q[3], zeros))
    a, b = _parts(s, _read_ratios(ratios.slice(0, 64, dim=0)), weight)
    keys = _keys(raw.slice(64, 64, dim=0).load(_RAW64), _ACC64, 64)
    s = warpgroup_mma_wait(0, deps=_start(keys, q[0], q[1], q[2], q[3], zeros))
    c, d = _parts(s, _read_ratios(ratios.slice(64, 64, dim=0)), weight)
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
    key = warp * 16 + row + lane % 2 * 8 + lane // 2 * 64
    block = warp * 2 + lane % 2 + lane // 2 * 8
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
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Grid (at most tiles, tokens): one token over a run of the `tiles` tiles of 128 keys, two on their way.

    BLOCKS also writes the greatest score of every 8 keys to best [tokens, best_width]. For `launch_pdl`, with
    128 registers: four programs a multiprocessor.
    """
    grid_wait()
    grid_release()
    token = gl.program_id(1)
    queries = gl.allocate_shared_memory(gl.float8e5, [4, 32, 32], _SHARED)
    raw = gl.allocate_shared_memory(gl.uint8, [3, 128, 64], _SHARED_RAW)
    ratios = gl.allocate_shared_memory(gl.float32, [128, 4], _PLAIN)
    # Nobody waits for the number of the only sequence, nor for `visible` before the first copies.
    sequence = gl.load(seq_ptr + token, mask=sequences > 1, other=0).to(gl.int32)
    sequence = gl.minimum(gl.maximum(sequence, 0), sequences - 1)
    table = table_ptr + sequence.to(gl.int64) * table_width
    out = out_ptr + token.to(gl.int64) * width
    best_out = best_ptr + token.to(gl.int64) * best_width
    start = gl.program_id(0) * tiles // gl.num_programs(0) * 128
    stop = gl.minimum((gl.program_id(0) + 1) * tiles // gl.num_programs(0) * 128, width)
    reach = gl.load(visible_ptr + token).to(gl.int32)
    last = gl.minimum(stop, reach)
    end = gl.maximum(last - 1, 0) // 128 * 128
    copied = gl.arange(0, 128, layout=gl.SliceLayout(1, _COPY))[:, None] * 64
    copied = pages_ptr + PAYLOAD + (copied + gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))[None, :])
    scaled = pages_ptr + SCALES + gl.arange(0, 128, layout=_LINE) * 4
    page = _held(_named(table, start, table_width, ROWS), page_count)
    near = _held(_named(table, start + 128, table_width, ROWS), page_count)  # the next tile's
    named = _named(table, start + 256, table_width, ROWS)
    word = _scale_words(scaled, pages_ptr, table, page, page_count, table_width, start, ROWS, PAGE, SCALES)
    _copy_keys(
        raw.index(0), copied, pages_ptr, table, page, page_count, table_width, start, ROWS, PAGE, PAYLOAD
    )
    _copy_keys(
        raw.index(1), copied, pages_ptr, table, near, page_count, table_width, start + 128,
        ROWS, PAGE, PAYLOAD,
    )  # fmt: skip
    low, high, _ = _query(q_ptr, q_scale_ptr, token)
    both = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 2)), [32, 4, 32])
    g0, g1, g2, g3 = _groups(both, 32)
    queries.index(0).store(g0)
    queries.index(1).store(g1)
    queries.index(2).store(g2)
    queries.index(3).store(g3)
    weight = _weights(weight_ptr, q_scale_ptr, token)
    fence_async_shared()
    stage = 0
    for first in range(start, last, 128):
        async_copy.wait_group(1)
        page = _held(named, page_count)
        named = _named(table, gl.minimum(first + 384, end).to(gl.uint32), table_width, ROWS)
        _copy_keys(
            raw.index(gl.where(stage == 0, 2, stage - 1)), copied, pages_ptr, table, page, page_count,
            table_width, gl.minimum(first + 256, end), ROWS, PAGE, PAYLOAD,
        )  # fmt: skip
        ratios.store(_ratios(word))
        word = _scale_words(
            scaled, pages_ptr, table, near, page_count, table_width, gl.minimum(first + 128, end),
            ROWS, PAGE, SCALES,
        )  # fmt: skip
        near = page
        _score_tile(
            raw.index(stage), ratios, queries, weight, out, best_out, first, reach, width, best_width, BLOCKS
        )  # fmt: skip
        stage = gl.where(stage == 2, 0, stage + 1)
    async_copy.wait_group(0)
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC64))
    block_layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    block = gl.arange(0, 8, layout=block_layout)
    rest = gl.maximum((last - start + 127) // 128, 0) * 128 + start
    for first in range(rest, stop, 64):
        nothing = gl.full([64], float("-inf"), gl.float32, key.type.layout)
        gl.store(out + first + key, nothing, mask=first + key < width)
        if BLOCKS:
            none = gl.full([8], float("-inf"), gl.float32, block_layout)
            gl.store(best_out + first // 8 + block, none, mask=first // 8 + block < best_width)
