# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The trade of `mhc_many_hopper` that expands, collapses and norms (spec §6), on words of two bf16."""

from __future__ import annotations

from cedar.kernels.grid_hopper import arrive, barrier, wait_for
from cedar.kernels.mhc_hopper import FLAT, coefficient, columns_of, write_codes
from cedar.kernels.mhc_rounds_hopper import AHEAD, STAGES, T, here, share
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # a tile's pairs of channels
# [64, 32] pairs: four neighbours of two rows a thread, eight threads a row; and what a thread sums.
ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]],
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        [[4, 0], [8, 0], [16, 0]],
        [],
        [64, 32],
    )
)
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[32, 0]], [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]], [[4, 0], [8, 0], [16, 0]], [], [64, 8]
    )
)


@gluon.jit
def _unpack(words):
    """The two bf16 of words as fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pack(low, high):
    """Words of two fp32 rounded to bf16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _quarters(x):
    """[64, 8] of each fourth word of [64, 32]."""
    even, odd = gl.split(gl.reshape(x, [T, 16, 2]))
    a, c = gl.split(gl.reshape(even, [T, 8, 2]))
    b, d = gl.split(gl.reshape(odd, [T, 8, 2]))
    return (
        gl.convert_layout(a, SUMS, assert_trivial=True), gl.convert_layout(b, SUMS, assert_trivial=True),
        gl.convert_layout(c, SUMS, assert_trivial=True), gl.convert_layout(d, SUMS, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def _add_squares(total, x):
    a, b, c, d = _quarters(x)
    return gl.fma(d, d, gl.fma(c, c, gl.fma(b, b, gl.fma(a, a, total))))


@gluon.jit
def _collapsed(a, b, c, d, k_s):
    total = coefficient(k_s, 20, 0, 1, ROWS) * a + coefficient(k_s, 21, 0, 1, ROWS) * b
    total = total + coefficient(k_s, 22, 0, 1, ROWS) * c
    return total + coefficient(k_s, 23, 0, 1, ROWS) * d


@gluon.jit
def _expanded(a, b, c, d, y, k_s, t: gl.constexpr):
    new = coefficient(k_s, t, 0, 1, ROWS) * a + coefficient(k_s, 4 + t, 0, 1, ROWS) * b
    new = new + coefficient(k_s, 8 + t, 0, 1, ROWS) * c
    new = new + coefficient(k_s, 12 + t, 0, 1, ROWS) * d
    return new + coefficient(k_s, 16 + t, 0, 1, ROWS) * y


@gluon.jit
def _fill_row(y_desc, row_s, y_full, turn, row, channel, some):
    """Starts the copy of a block of the sublayer's output to where the collapsed row will be."""
    mbarrier.expect(y_full.index(turn), 128 * T, pred=some)
    tma.async_copy_global_to_shared(y_desc, [row, channel], y_full.index(turn), row_s.index(turn), pred=some)


@gluon.jit
def _put_coefficients(c_s, comb, post, pre):
    c_s.slice(0, 16 * T).store(comb)
    c_s.slice(16 * T, 4 * T).store(post)
    c_s.slice(20 * T, 4 * T).store(pre)


@gluon.jit
def _times(x, weight, large, small):
    p = x * weight
    return gl.fma(p, large, p * small)


@gluon.jit
def _normed(words, weights, large, small):
    """Words of the row times the norm's weights and the row's factor, in two parts."""
    a, b = _unpack(words)
    u, v = _unpack(weights)
    return _pack(_times(a, u[None, :], large, small), _times(b, v[None, :], large, small))


@gluon.jit
def expand(
    y_desc, row_desc, post_ptr, comb_ptr, pre_ptr, norm_ptr, codes_ptr, code_scale_ptr, part_ptr, rows_ptr,
    cell, base, tokens, width, eps, x_s, row_s, c_s, full, y_full, ready,
    SPLITS: gl.constexpr, SLOTS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Streams expanded in place and rows collapsed; the rows of the tile before, when the group has met,
    normed.

    A tile's norm comes AHEAD blocks into the next tile, so that nobody waits for the meeting.
    """
    NW: gl.constexpr = gl.num_warps()
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    first, count, group, rounds = here(width, tokens, SPLITS)
    groups = gl.num_programs(1)
    k_s = c_s._reinterpret(gl.float32, [32, T], FLAT)
    weight_s = c_s._reinterpret(gl.int32, [64, 32], FLAT)
    word_s = row_s._reinterpret(gl.int32, [SLOTS, T, 32], WORDS)
    x0_s = x_s[0]._reinterpret(gl.int32, [STAGES, T, 32], WORDS)
    x1_s = x_s[1]._reinterpret(gl.int32, [STAGES, T, 32], WORDS)
    x2_s = x_s[2]._reinterpret(gl.int32, [STAGES, T, 32], WORDS)
    x3_s = x_s[3]._reinterpret(gl.int32, [STAGES, T, 32], WORDS)
    comb = columns_of(comb_ptr, group * T, tokens, T, 16, NW)
    post = columns_of(post_ptr, group * T, tokens, T, 4, NW)
    pre = columns_of(pre_ptr, group * T, tokens, T, 4, NW)
    local = gl.arange(0, T, layout=LINE)
    left = rounds * count  # blocks of the sublayer's output still to be asked for
    fill_row = group * T
    fill_block = 0
    for i in range(SLOTS):
        _fill_row(y_desc, row_s, y_full, i, fill_row, (first + fill_block) * 64, left > 0)
        left -= 1
        fill_block += 1
        if fill_block == count:
            fill_block = 0
            fill_row += groups * T
    weights = c_s._reinterpret(gl.bfloat16, [64 * T], FLAT)
    for i in gl.static_range(3):
        channel = 256 * i + gl.arange(0, 256, layout=LINE)
        part = gl.load(norm_ptr + first * 64 + channel, mask=channel < count * 64, other=0.0)
        weights.slice(52 * T + 256 * i, 256).store(part)
    lead = gl.minimum(AHEAD, count - 1)
    squares = gl.full([T, 8], 0.0, gl.float32, SUMS)
    row_squares = gl.full([T, 8], 0.0, gl.float64, SUMS)
    stage = 0
    phase = 0
    slot = 0
    y_phase = 0
    norm_slot = 0
    free = 0
    turn = 0
    r = 0
    for _ in range(rounds * count + lead + 1):
        if (turn == lead) & (r > 0):
            tile = group + (r - 1) * groups
            wait_for(cell, base + r * 64)
            total64 = gl.full([T], 0.0, gl.float64, LINE)
            for s in gl.static_range(SPLITS):
                total64 += gl.load(rows_ptr + (tile * SPLITS + s) * T + local, cache_modifier=".cg")
            factor = 1.0 / gl.sqrt(total64 / width + eps)
            big = factor.to(gl.float32)
            k_s.index(24).store(gl.where(tile * T + local < tokens, big, 1.0))
            k_s.index(25).store((factor - big.to(gl.float64)).to(gl.float32))
            barrier()
            large = coefficient(k_s, 24, 0, 1, ROWS) + gl.full([T, 32], 0.0, gl.float32, ROWS)
            small = coefficient(k_s, 25, 0, 1, ROWS) + gl.full([T, 32], 0.0, gl.float32, ROWS)
            for j in range(count):
                scale = weight_s.index(52 + j).load(gl.SliceLayout(0, ROWS))
                n = _normed(word_s.index(norm_slot).load(ROWS), scale, large, small)
                word_s.index(norm_slot).store(n)
                if CODES:
                    low, high = _unpack(n)  # as write_codes wants them, in fp32
                    write_codes(
                        gl.reshape(gl.join(low, high), [T, 64]), codes_ptr, code_scale_ptr, tile * T,
                        (first + j) * 64, tokens, width, T,
                    )  # fmt: skip
                fence_async_shared()
                barrier()
                tma.async_copy_shared_to_global(
                    row_desc, [tile * T, (first + j) * 64], row_s.index(norm_slot)
                )
                tma.store_wait(1)
                if j > 0:
                    _fill_row(y_desc, row_s, y_full, free, fill_row, (first + fill_block) * 64, left > 0)
                    left -= 1
                    fill_block += 1
                    if fill_block == count:
                        fill_block = 0
                        fill_row += groups * T
                free = norm_slot
                norm_slot += 1
                if norm_slot == SLOTS:
                    norm_slot = 0
            tma.store_wait(0)
            _fill_row(y_desc, row_s, y_full, free, fill_row, (first + fill_block) * 64, left > 0)
            left -= 1
            fill_block += 1
            if fill_block == count:
                fill_block = 0
                fill_row += groups * T
        if r < rounds:
            if turn == 0:
                _put_coefficients(c_s, comb, post, pre)
                squares = gl.full([T, 8], 0.0, gl.float32, SUMS)
                row_squares = gl.full([T, 8], 0.0, gl.float64, SUMS)
                barrier()
            mbarrier.wait(full.index(stage), phase)
            mbarrier.wait(y_full.index(slot), y_phase)
            a0, a1 = _unpack(x0_s.index(stage).load(ROWS))
            b0, b1 = _unpack(x1_s.index(stage).load(ROWS))
            c0, c1 = _unpack(x2_s.index(stage).load(ROWS))
            d0, d1 = _unpack(x3_s.index(stage).load(ROWS))
            y0, y1 = _unpack(word_s.index(slot).load(ROWS))
            na = _pack(_expanded(a0, b0, c0, d0, y0, k_s, 0), _expanded(a1, b1, c1, d1, y1, k_s, 0))
            nb = _pack(_expanded(a0, b0, c0, d0, y0, k_s, 1), _expanded(a1, b1, c1, d1, y1, k_s, 1))
            nc = _pack(_expanded(a0, b0, c0, d0, y0, k_s, 2), _expanded(a1, b1, c1, d1, y1, k_s, 2))
            nd = _pack(_expanded(a0, b0, c0, d0, y0, k_s, 3), _expanded(a1, b1, c1, d1, y1, k_s, 3))
            a0, a1 = _unpack(na)
            b0, b1 = _unpack(nb)
            c0, c1 = _unpack(nc)
            d0, d1 = _unpack(nd)
            row = _pack(_collapsed(a0, b0, c0, d0, k_s), _collapsed(a1, b1, c1, d1, k_s))
            x0_s.index(stage).store(na)
            x1_s.index(stage).store(nb)
            x2_s.index(stage).store(nc)
            x3_s.index(stage).store(nd)
            word_s.index(slot).store(row)
            fence_async_shared()
            mbarrier.arrive(ready.index(stage), count=1)
            squares = _add_squares(_add_squares(_add_squares(squares, a0), a1), b0)
            squares = _add_squares(_add_squares(_add_squares(squares, b1), c0), c1)
            squares = _add_squares(_add_squares(squares, d0), d1)
            r0, r1 = _unpack(row)
            row_squares = _add_squares(row_squares, r0.to(gl.float64))
            row_squares = _add_squares(row_squares, r1.to(gl.float64))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            slot += 1
            if slot == SLOTS:
                slot = 0
                y_phase ^= 1
            if turn == count - 1:
                tile = group + r * groups
                after = tile + groups
                comb = columns_of(comb_ptr, after * T, tokens, T, 16, NW)
                post = columns_of(post_ptr, after * T, tokens, T, 4, NW)
                pre = columns_of(pre_ptr, after * T, tokens, T, 4, NW)
                at = (tile * SPLITS + gl.program_id(0)) * T + gl.arange(0, T, layout=gl.SliceLayout(1, SUMS))
                gl.store(part_ptr + at * 32 + 31, gl.sum(squares, axis=1))
                gl.store(rows_ptr + at, gl.sum(row_squares, axis=1))
                arrive(cell, share(SPLITS))
        turn += 1
        if turn == count:
            turn = 0
            r += 1
    tma.store_wait(0)
