# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of streamed weights with eight slots or more through Hopper's FP8 matrix units.

Weights come through shared memory by bulk copies, everything else of a block of 256 channels (128 where their
number is no multiple) beside them by cp.async: scales, rows of activations and theirs. A group of 32
channels is a product of its own (`bands_hopper`), in one band or two.
"""

from __future__ import annotations

from cedar.kernels.bands_hopper import FLAT, LANES, WARPS, operands, raw4
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SHARED_HALF = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
SHARED_X = gl.constexpr(gl.NVMMASharedLayout(32, 8, 2))
SHARED_X3 = gl.constexpr(gl.NVMMASharedLayout(32, 8, 3))
COPY_XS = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))  # fp32 [8, groups]
COPY_WORD = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))  # [64, 1]
# E4M3 bytes of 64 rows, 128 channels: a thread has eight of each group of two rows.
_RAW8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], *LANES], WARPS, [], [64, 128]
    )
)


@gluon.constexpr_function
def _words(groups):
    """Scales of 64 rows, four groups a word."""
    more = [[0, 1]] if groups == 8 else []
    return gl.DistributedLinearLayout([*more, [8, 0]], [[0, 0], [0, 0], *LANES], WARPS, [], [64, groups // 4])


@gluon.constexpr_function
def sum_of(columns):
    """Sums fp32 [64, columns] of a product; of four columns, a product's of eight added up by twos."""
    if columns == 4:
        return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], *LANES], WARPS, [], [64, 4])
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def _columns(groups, slots):
    """Scales of 4, 8, 16 or 32 slots: a thread has those of its columns of a sum."""
    each = [[0, 1 << i] for i in range(groups.bit_length() - 1)]
    more = [[8 << i, 0] for i in range(slots // 16)]
    none = [0, 0]
    if slots == 4:
        return gl.DistributedLinearLayout(
            each, [[1, 0], [2, 0], none, none, none], [none, none], [], [slots, groups]
        )
    return gl.DistributedLinearLayout(
        [*each, [1, 0], *more], [[2, 0], [4, 0], none, none, none], [none, none], [], [slots, groups]
    )


@gluon.constexpr_function
def copy_x(groups):
    """Bytes [groups, slots and bands, 32], 16 a thread."""
    return gl.BlockedLayout([1, 1, 16], [groups, 16 // groups, 2], [1, 4, 1], [2, 0, 1])


@gluon.jit
def _halves(v, A: gl.constexpr, B: gl.constexpr):
    """The first and the last groups of [A, groups, B]."""
    G: gl.constexpr = v.shape[1]
    return gl.split(gl.permute(gl.reshape(v, [A, 2, G // 2, B]), (0, 2, 3, 1)))


@gluon.jit
def _four(v, A: gl.constexpr, B: gl.constexpr):
    """The four [A, B] of [A, 4, B]."""
    a, b = _halves(v, A, B)
    g0, g1 = gl.split(gl.permute(a, (0, 2, 1)))
    g2, g3 = gl.split(gl.permute(b, (0, 2, 1)))
    return g0, g1, g2, g3


@gluon.jit
def _start(left, x, SLOTS: gl.constexpr, BANDS: gl.constexpr):
    """A group's sums [64, SLOTS BANDS]: all slots' coarse band, then their fine one. Of four slots [64, 8],
    both bands of one slot after the other, or one and nothing.
    """
    COLUMNS: gl.constexpr = max(8, SLOTS * BANDS)
    L: gl.constexpr = sum_of(COLUMNS)
    zero = gl.full([64, COLUMNS], 0.0, gl.float32, L)
    operand = gl.convert_layout(left, gl.DotOperandLayout(0, L, 4))
    return warpgroup_mma(operand, x.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scaled(p, t, power, SLOTS: gl.constexpr, BANDS: gl.constexpr):
    """A group's sums [64, SLOTS] times the scales t of its slots and `power`, fp32 bits, of its rows."""
    L: gl.constexpr = sum_of(SLOTS)
    if SLOTS == 4:
        coarse, fine = gl.split(gl.reshape(p, [64, 4, 2]))
        both = gl.convert_layout(coarse + fine if BANDS == 2 else coarse, L)
    elif BANDS == 2:
        both = gl.convert_layout(gl.sum(gl.reshape(p, [64, 2, SLOTS]), axis=1), L)
    else:
        both = p
    row = gl.convert_layout(gl.reshape(t, [SLOTS]), gl.SliceLayout(0, L))[None, :]
    return (both * row) * (power & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _add(total, a, x, first, t, word, SLOTS: gl.constexpr, BANDS: gl.constexpr):
    """total [64, SLOTS] and a product of four groups; x.index(first) on: their activations; word: scales."""
    w = gl.convert_layout(word, gl.SliceLayout(1, sum_of(SLOTS)))[:, None]
    p0 = _start(a[0], x.index(first), SLOTS, BANDS)
    p1 = _start(a[1], x.index(first + 1), SLOTS, BANDS)
    if SLOTS * BANDS > 16:  # two at a time: registers
        p0, p1 = warpgroup_mma_wait(0, deps=(p0, p1))
        total += _scaled(p0, t[0], w << 23, SLOTS, BANDS)
        total += _scaled(p1, t[1], w << 15, SLOTS, BANDS)
    p2 = _start(a[2], x.index(first + 2), SLOTS, BANDS)
    p3 = _start(a[3], x.index(first + 3), SLOTS, BANDS)
    if SLOTS * BANDS > 16:
        p2, p3 = warpgroup_mma_wait(0, deps=(p2, p3))
    else:
        p0, p1, p2, p3 = warpgroup_mma_wait(0, deps=(p0, p1, p2, p3))
        total += _scaled(p0, t[0], w << 23, SLOTS, BANDS)
        total += _scaled(p1, t[1], w << 15, SLOTS, BANDS)
    total += _scaled(p2, t[2], w << 7, SLOTS, BANDS)
    return total + _scaled(p3, t[3], w >> 1, SLOTS, BANDS)


@gluon.jit
def _product(
    total, w_s, s_s, x, t_s, stage, part, SLOTS: gl.constexpr, BANDS: gl.constexpr, GROUPS: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """total [64, SLOTS] and the product of a stage's weights, its part 0 or 1."""
    t = t_s.index(stage).load(_columns(GROUPS, SLOTS))
    words = s_s._reinterpret(gl.int32, [s_s.shape[0], 64, GROUPS // 4], FLAT).index(2 * stage + part)
    words = words.load(_words(GROUPS))
    first = stage * GROUPS
    if GROUPS == 8:
        a = gl.reshape(operands(w_s.index(2 * stage + part).load(raw4(8)), 8), [64, 8, 32])
        a0, a1 = _halves(a, 64, 32)
        t0, t1 = _halves(gl.reshape(t, [SLOTS, 8, 1]), SLOTS, 1)
        w0, w1 = gl.split(words)
        total = _add(total, _four(a0, 64, 32), x, first, _four(t0, SLOTS, 1), w0, SLOTS, BANDS)
        total = _add(total, _four(a1, 64, 32), x, first + 4, _four(t1, SLOTS, 1), w1, SLOTS, BANDS)
    else:
        if FP8:
            raw = w_s.index(2 * stage + part).load(_RAW8).to(gl.float8e4nv, bitcast=True)
            both = gl.permute(gl.reshape(raw, [64, 4, 16, 2]), (0, 1, 3, 2))
        else:
            half = w_s._reinterpret(gl.uint8, [w_s.shape[0] * 2, 64, 64], SHARED_HALF)
            both = operands(half.index(4 * stage + 2 * part).load(raw4(4)), 4)
        a = _four(gl.reshape(both, [64, 4, 32]), 64, 32)
        t4 = _four(gl.reshape(t, [SLOTS, 4, 1]), SLOTS, 1)
        total = _add(total, a, x, first, t4, gl.reshape(words, [64]), SLOTS, BANDS)
    return total


@gluon.jit
def _ask(
    first_desc, second_desc, first_row, second_row, first_scale, second_scale, rows, block, to, there, w_s,
    s_s, bars, GROUPS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a block's weights and scales into stage `to`, if there is such a block."""
    if FP8:
        mbarrier.expect(bars.index(to), 16384, pred=there)
        tma.async_copy_global_to_shared(
            first_desc, [first_row, block * 128], bars.index(to), w_s.index(2 * to), pred=there
        )
        tma.async_copy_global_to_shared(
            second_desc, [second_row, block * 128], bars.index(to), w_s.index(2 * to + 1), pred=there
        )
        words = s_s._reinterpret(gl.int32, [s_s.shape[0], 64, 1], FLAT)
        at = block * 4 + gl.arange(0, 1, layout=gl.SliceLayout(0, COPY_WORD))[None, :] * 4
        mask = there & (rows >= 0)
        one = words.index(2 * to)
        async_copy.async_copy_global_to_shared(
            one, (first_scale + at).to(gl.pointer_type(gl.int32), bitcast=True), mask=mask
        )
        two = words.index(2 * to + 1)
        async_copy.async_copy_global_to_shared(
            two, (second_scale + at).to(gl.pointer_type(gl.int32), bitcast=True), mask=mask
        )
    else:
        mbarrier.expect(bars.index(to), 2048 * GROUPS, pred=there)
        at = block * 16 * GROUPS
        if GROUPS == 8:
            one = w_s.index(2 * to)
            two = w_s.index(2 * to + 1)
        else:
            half = w_s._reinterpret(gl.uint8, [w_s.shape[0] * 2, 64, 64], SHARED_HALF)
            one = half.index(4 * to)
            two = half.index(4 * to + 2)
        tma.async_copy_global_to_shared(first_desc, [first_row, at], bars.index(to), one, pred=there)
        tma.async_copy_global_to_shared(second_desc, [second_row, at], bars.index(to), two, pred=there)
        mask = there & (rows >= 0)
        async_copy.async_copy_global_to_shared(s_s.index(2 * to), first_scale + block * GROUPS, mask=mask)
        async_copy.async_copy_global_to_shared(
            s_s.index(2 * to + 1), second_scale + block * GROUPS, mask=mask
        )


@gluon.jit
def _ask_x(x, xs, mine, mine_t, block, to, there, x_s, t_s, GROUPS: gl.constexpr):
    """Starts the copies of a block's activations and ends the copies' group."""
    async_copy.async_copy_global_to_shared(x_s.index(to), x + block * (32 * GROUPS), mask=there & mine)
    async_copy.async_copy_global_to_shared(t_s.index(to), xs + block * GROUPS, mask=there & mine_t)
    async_copy.commit_group()


@gluon.jit
def stream(
    first_desc, second_desc, first_row, second_row, first_scale, second_scale, rows, x, xs, mine, mine_t,
    w_s, s_s, x_s, t_s, groups, bars,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, BANDS: gl.constexpr,
    GROUPS: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The products [64, SLOTS] of 64 rows of each of two weights; a block is GROUPS groups (FP8: four)."""
    BLOCKS: gl.constexpr = COLUMNS // (32 * GROUPS)
    for i in gl.static_range(STAGES - 1):
        if i < BLOCKS:
            _ask(
                first_desc, second_desc, first_row, second_row, first_scale, second_scale, rows, i, i,
                first_row >= 0, w_s, s_s, bars, GROUPS, FP8,
            )  # fmt: skip
    if EARLY:
        grid_release()
        grid_wait()
    for i in gl.static_range(STAGES - 1):
        there = first_row + i * 0 >= 0 if i < BLOCKS else first_row < 0
        _ask_x(x, xs, mine, mine_t, i, i, there, x_s, t_s, GROUPS)
    one = gl.full([64, SLOTS], 0.0, gl.float32, sum_of(SLOTS))
    two = gl.full([64, SLOTS], 0.0, gl.float32, sum_of(SLOTS))
    for turn in range(BLOCKS):
        stage = turn % STAGES
        mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        fill = turn + STAGES - 1
        _ask(
            first_desc, second_desc, first_row, second_row, first_scale, second_scale, rows, fill,
            fill % STAGES, fill < BLOCKS, w_s, s_s, bars, GROUPS, FP8,
        )  # fmt: skip
        _ask_x(x, xs, mine, mine_t, fill, fill % STAGES, fill < BLOCKS, x_s, t_s, GROUPS)
        one = _product(one, w_s, s_s, groups, t_s, stage, 0, SLOTS, BANDS, GROUPS, FP8)
        two = _product(two, w_s, s_s, groups, t_s, stage, 1, SLOTS, BANDS, GROUPS, FP8)
    async_copy.wait_group(0)
    return one, two
