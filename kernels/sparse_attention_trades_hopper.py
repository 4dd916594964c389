# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention for Hopper's matrix units, 64 heads of 512: four trades of warps around shared tiles.

One program holds one query's 64 heads, or two, a cluster, share its keys and swap halves of the output at
the end. Of four warps each: one trade fetches entries, two tiles of 64 keys ahead, and expands them to fp16
in one of two shared tiles (`_produce`); one multiplies them with q, half of it in registers, and takes the
softmax (`_score`); two expand the first tiles at the start and then weigh, half of the channels each
(`_weigh`). They meet at mbarriers.

What the first scores need is asked for in the order in which it is needed, as memory takes 8,000 cycles to
bring it to all programs at once: the window's first tile, q, the window's second, entries. All of it waits
in shared memory, most of it where it will lie, so that no trade stands at loads that another waits for.
A tile's place is free again in halves: the next keys are expanded while the product is half done.
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels import sparse_attention_swap_hopper as swap
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.sparse_attention_heads_hopper import (
    LEFT,
    ask_query,
    keep_angles,
    load_angles,
    turn_query,
    write_half,
)
from cedar.kernels.sparse_attention_join_hopper import most_used, span_of
from cedar.kernels.sparse_attention_keys_hopper import (
    RAW,
    RAW_SCALES,
    TILE_WORDS,
    ask_entries,
    ask_window,
    expand_entries,
    expand_window,
)
from cedar.kernels.sparse_attention_softmax_hopper import any_above, barriers, own_sum, set_flag, softmax_step
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Registers a thread of those who weigh (twice) and produce; those who score have what is left.
WEIGH_REGISTERS, PRODUCE_REGISTERS = 160, 64
SLACK = gl.constexpr(8.0)  # powers of two by which a probability may exceed one before all are shrunk


_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_EACH = gl.constexpr(
    gl.DistributedLinearLayout([[32]], [[1], [2], [4], [8], [16]], [[0], [0]], [], [64])
)  # all 64 in every warp
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Kinds of barriers: how many tiles are used is known; a tile is ready, two of them; half a tile's keys are
# free again, two of each; p and its shrinking factors are ready, and free again; the second half of q is
# ready; the first is out of the ring; the first rows of entries are there.
_NAMED, _READY, _FREE, _P_READY = (gl.constexpr(i) for i in range(4))
_P_FREE, _Q_READY, _RING_FREE, _RAW_READY = (gl.constexpr(i) for i in range(4, 8))


@gluon.jit
def _here(SPLITS: gl.constexpr):
    """The token and split of this program."""
    if SPLITS == 1:
        token = gl.program_id(0)
        split = gl.program_id(1)  # none, which the compiler may not know: it fails otherwise
    else:
        token = gl.program_id(1)
        split = gl.program_id(0)
    return token.to(gl.int64), split


@gluon.jit
def _window(
    q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, window_count, row_count, near_space, q_place, tiles,
    angles, cos, sin, bars, h: gl.constexpr, token, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
    SETTLED: gl.constexpr,
):  # fmt: skip
    """Half h of the channels of the window's two tiles and, where a program is alone, a quarter of q."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    near = gl.arange(0, 128, layout=line)
    row = gl.load(rows_ptr + token * row_count + near, mask=near < row_count, other=-1)
    row = gl.maximum(gl.minimum(row, window_count - 1), -1).to(gl.int32)
    near_space._reinterpret(gl.int32, [128], _FLAT).store(row)
    barrier()
    ask_window(window_ptr, near_space.index(0), tiles.index(0), h)
    async_copy.commit_group()
    if h == 1:
        keep_angles(angles, cos, sin, HALF_ROPE)
    if SPLITS == 1:
        if SETTLED:
            grid_wait()
        ask_query(q_ptr, q_place, token, 2 + h)
    async_copy.commit_group()
    # two turns, which the compiler may not know: code that runs for the first time waits to be fetched
    for i in range(2 - (window_count < 0).to(gl.int32)):
        if i == 0:
            async_copy.wait_group(1)
        if i > 0:
            async_copy.wait_group(0)
        barrier()
        expand_window(tiles.index(i), h)
        mbarrier.arrive(bars[_READY].index(i), count=1)
        if i == 0:
            ask_window(window_ptr, near_space.index(1), tiles.index(1), h)
            async_copy.commit_group()
            if SPLITS == 1:
                async_copy.wait_group(1)
                barrier()
                turn_query(q_place, angles, cos_ptr, sin_ptr, token, 2 + h, HALF_ROPE)
                fence_async_shared()
                mbarrier.arrive(bars[_Q_READY].index(0), count=1)


@gluon.jit
def _first_entries(
    q_ptr, cos_ptr, sin_ptr, used_space, ring, ring_s, q_place, tiles, angles, cos, sin, bars,
    h: gl.constexpr, token, split, TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
    SETTLED: gl.constexpr,
):  # fmt: skip
    """A quarter of q and half of the keys of the first tile, where there is no window."""
    if h == 1:
        keep_angles(angles, cos, sin, HALF_ROPE)
    if SETTLED:
        grid_wait()
    ask_query(q_ptr, q_place, token, 2 + h)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    turn_query(q_place, angles, cos_ptr, sin_ptr, token, 2 + h, HALF_ROPE)
    fence_async_shared()
    mbarrier.arrive(bars[_Q_READY].index(0), count=1)
    mbarrier.wait(bars[_NAMED].index(0), 0)
    _, count = span_of(split, most_used(used_space), TILES, SPLITS)
    if count > 0:
        mbarrier.wait(bars[_RAW_READY].index(0), 0)
        expand_entries(ring.index(0), ring_s.index(0), tiles.index(0), h)
        mbarrier.arrive(bars[_READY].index(0), count=1)


@gluon.jit
def _query(
    q_ptr, cos_ptr, sin_ptr, ring, q_places, angles, bars, token, split, HALF_ROPE: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """The first half of q's channels as two left operands, by two places of the ring. Where there is a window
    and two programs, the other half, too: those who weigh are busy with the window longer than q takes.
    """
    ask_query(q_ptr, ring.index(1), token, 0)
    async_copy.commit_group()
    ask_query(q_ptr, ring.index(2), token, 1)
    async_copy.commit_group()
    if SPLITS == 2:  # noqa: SIM102  (one is decided when it is compiled)
        if split == 0:
            ask_query(q_ptr, q_places.index(0), token, 2)
            ask_query(q_ptr, q_places.index(1), token, 3)
    async_copy.commit_group()
    async_copy.wait_group(2)
    barrier()
    turn_query(ring.index(1), angles, cos_ptr, sin_ptr, token, 0, HALF_ROPE)
    async_copy.wait_group(1)
    barrier()
    turn_query(ring.index(2), angles, cos_ptr, sin_ptr, token, 1, HALF_ROPE)
    if SPLITS == 2:  # noqa: SIM102
        if split == 0:
            async_copy.wait_group(0)
            barrier()
            turn_query(q_places.index(0), angles, cos_ptr, sin_ptr, token, 2, HALF_ROPE)
            turn_query(q_places.index(1), angles, cos_ptr, sin_ptr, token, 3, HALF_ROPE)
            fence_async_shared()
    barrier()
    q0 = ring.index(1)._reinterpret(gl.float16, [64, 128], _SHARED).load(LEFT)
    q1 = ring.index(2)._reinterpret(gl.float16, [64, 128], _SHARED).load(LEFT)
    mbarrier.arrive(bars[_RING_FREE].index(0), count=1)
    return q0, q1


@gluon.jit
def _produce(
    pages_ptr, table_ptr, seq_ptr, entries_ptr, page_count, sequences, table_width, entry_count,
    keys_space, used_space, ring, ring_s, tiles, bars,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Fetches entries two tiles ahead and expands them into shared memory, 32 keys a turn."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token, split = _here(SPLITS)
    if SPLITS > 1:
        cluster.arrive_ready()
    used = 0
    if TILES > 0:
        lane = gl.arange(0, NAMES, layout=line)
        entry = gl.load(entries_ptr + token * entry_count + lane, mask=lane < entry_count, other=-1)
        sequence = gl.minimum(gl.maximum(gl.load(seq_ptr + token), 0), sequences - 1).to(gl.int64)
        used = (gl.max(gl.where(entry >= 0, lane + 1, 0), axis=0) + 63) // 64
    used_space.store(gl.full([32], 0, gl.int32, line) + used)
    mbarrier.arrive(bars[_NAMED].index(0), count=1)
    base, count = span_of(split, used, TILES, SPLITS)
    if TILES > 0:
        column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column, mask=entry >= 0, other=0).to(gl.int32)
        page = gl.minimum(gl.maximum(page, 0), page_count - 1)
        place = gl.where(entry >= 0, page * ROWS + gl.maximum(entry, 0) % ROWS, -1)
        keys_space._reinterpret(gl.int32, [NAMES], _FLAT).store(place)
        barrier()
        first = gl.where(split == 0, 2, 0)
        if split == 0:  # q and the window's first tile are wanted before
            mbarrier.wait(bars[_READY].index(0), 0)
        at = 0
        after = 0
        for t in range(first - 2, count):
            if t >= first:
                async_copy.wait_group(1)
                barrier()
                if t == 0:
                    mbarrier.arrive(bars[_RAW_READY].index(0), count=1)
            if t == first - 1:
                mbarrier.wait(bars[_RING_FREE].index(0), 0)
            if t == 1:
                mbarrier.wait(bars[_READY].index(0), 0)
            if t + 2 < count:
                ask_entries(
                    pages_ptr, keys_space.index(base + t), ring.index(after), ring_s.index(after),
                    ROWS, PAGE, PAYLOAD, SCALES,
                )  # fmt: skip
            async_copy.commit_group()
            after = gl.where(after == 2, 0, after + 1)
            if t >= first:
                if t > 0:  # those who weigh expand the first
                    slot = t & 1
                    for part in gl.static_range(2):
                        mbarrier.wait(bars[_FREE].index(2 * slot + part), ((t >> 1) & 1) ^ 1)
                        expand_entries(ring.index(at), ring_s.index(at), tiles.index(slot), part)
                    mbarrier.arrive(bars[_READY].index(slot), count=2)
                at = gl.where(at == 2, 0, at + 1)
    async_copy.wait_group(0)


@gluon.jit
def _half_tile(words):
    return words._reinterpret(gl.float16, [64, 512], _SHARED)


@gluon.jit
def _present(near_space, keys_space, tile, TILES: gl.constexpr, layout: gl.constexpr):
    """A number for each key of a tile, below zero where it is absent."""
    present = near_space.index(gl.minimum(tile, 1)).load(layout)
    if TILES > 0:
        far = keys_space.index(gl.maximum(tile - 2, 0)).load(layout)
        present = gl.where(tile < 2, present, far)
    return present


@gluon.jit
def _score(
    q_ptr, cos_ptr, sin_ptr, sink_ptr, scale,
    near_space, keys_space, used_space, ring, q_tile, tiles, p_shared, shrink_shared,
    lse_shared, angles, bars, area, TILES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
    SETTLED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax."""
    token, split = _here(SPLITS)
    if SPLITS > 1:
        cluster.arrive_ready()
    if SPLITS == 2:
        cos, sin = load_angles(cos_ptr, sin_ptr, token, HALF_ROPE)
        keep_angles(angles, cos, sin, HALF_ROPE)
    if SETTLED:
        grid_wait()
        grid_release()
    q_places = q_tile._reinterpret(gl.int32, [2, 64, 64], TILE_WORDS)
    q0, q1 = _query(
        q_ptr, cos_ptr, sin_ptr, ring, q_places, angles, bars, token, split, HALF_ROPE, SPLITS
    )  # fmt: skip
    mbarrier.wait(bars[_NAMED].index(0), 0)
    base, count = span_of(split, most_used(used_space), TILES, SPLITS)
    if SPLITS == 1:
        mbarrier.wait(bars[_Q_READY].index(0), 0)
    else:
        if split == 1:
            mbarrier.wait(bars[_Q_READY].index(0), 0)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _SCORE))
    total = own_sum(gl.full([64, 64], 0.0, gl.float32, _SCORE))
    set_flag(2)
    right = q_tile._reinterpret(gl.float16, [64, 256], _SHARED)
    for t in range(count):
        slot = t & 1
        mbarrier.wait(bars[_READY].index(slot), (t >> 1) & 1)
        fence_async_shared()
        tile = _half_tile(tiles.index(slot))
        s = gl.full([64, 64], 0.0, gl.float32, _SCORE)
        s = warpgroup_mma(q0, tile.slice(0, 128, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q1, tile.slice(128, 128, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(right, tile.slice(256, 256, dim=1).permute((1, 0)), s, is_async=True)
        least = gl.min(_present(near_space, keys_space, base + t, TILES, _EACH), axis=0)
        s = warpgroup_mma_wait(0, deps=[s])
        if least < 0:
            present = _present(near_space, keys_space, base + t, TILES, gl.SliceLayout(0, _SCORE)) >= 0
            s = gl.where(present[None, :], s, float("-inf"))
        p, shrink, top, total = softmax_step(s, scale, top, total, SLACK, 2)
        half = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=False, pack=2
        )
        mbarrier.wait(bars[_P_FREE].index(0), (t & 1) ^ 1)
        p_shared.store(half)
        shrink_shared.store(shrink)
        fence_async_shared()
        mbarrier.arrive(bars[_P_READY].index(0), count=1)
    total = gl.convert_layout(gl.sum(total, axis=1), top.type.layout, assert_trivial=True)
    if SPLITS > 1:
        cluster.wait()
        swap.let_go(area, 1 - split)
        alive = total > 0
        factor = gl.where(alive, 128.0 / gl.where(alive, total, 1.0), 0.0)
        lse = gl.where(alive, top + gl.log2(gl.where(alive, total, 1.0)), float("-inf"))
    else:
        sink = gl.load(sink_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, _SCORE))) * 1.4426950408889634
        peak = gl.maximum(top, sink)
        factor = gl.exp2(top - peak) * 128.0 / (total * gl.exp2(top - peak) + gl.exp2(sink - peak))
        lse = top
    mbarrier.wait(bars[_P_FREE].index(0), (count & 1) ^ 1)
    shrink_shared.store(factor)
    lse_shared.store(lse)
    mbarrier.arrive(bars[_P_READY].index(0), count=1)


@gluon.jit
def _weigh(
    q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr, window_count, row_count,
    near_space, used_space, ring, ring_s, q_tile, tiles, p_shared, shrink_shared, lse_shared,
    angles, bars, area, PART: gl.constexpr, TILES: gl.constexpr, HALF_ROPE: gl.constexpr,
    SPLITS: gl.constexpr, SETTLED: gl.constexpr,
):  # fmt: skip
    """256 channels from 256 PART on: of the window's keys, and of the output."""
    token, split = _here(SPLITS)
    if SPLITS > 1:
        cluster.arrive_ready()
    cos = 1.0
    sin = 0.0
    if PART == 1:
        cos, sin = load_angles(cos_ptr, sin_ptr, token, HALF_ROPE)
    q_place = q_tile._reinterpret(gl.int32, [2, 64, 64], TILE_WORDS).index(PART)
    if split == 0:
        _window(
            q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, window_count, row_count, near_space, q_place,
            tiles, angles, cos, sin, bars, PART, token, HALF_ROPE, SPLITS, SETTLED,
        )  # fmt: skip
    else:
        _first_entries(
            q_ptr, cos_ptr, sin_ptr, used_space, ring, ring_s, q_place, tiles, angles, cos, sin, bars, PART,
            token, split, TILES, HALF_ROPE, SPLITS, SETTLED,
        )  # fmt: skip
    mbarrier.wait(bars[_NAMED].index(0), 0)
    _, count = span_of(split, most_used(used_space), TILES, SPLITS)
    set_flag(PART)
    o = gl.full([64, 256], 0.0, gl.float32, _ACC)
    for t in range(count):
        slot = t & 1
        mbarrier.wait(bars[_P_READY].index(0), t & 1)
        fence_async_shared()
        shrink = shrink_shared.load(gl.SliceLayout(1, _ACC))
        if any_above(1.0 - shrink, 0.0, PART):
            o = o * shrink[:, None]
        tile = _half_tile(tiles.index(slot)).slice(256 * PART, 256, dim=1)
        o = warpgroup_mma(p_shared.slice(0, 32, dim=1), tile.slice(0, 32, dim=0), o, is_async=True)
        o = warpgroup_mma(p_shared.slice(32, 32, dim=1), tile.slice(32, 32, dim=0), o, is_async=True)
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(bars[_FREE].index(2 * slot), count=1)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(bars[_P_FREE].index(0), count=1)
        mbarrier.arrive(bars[_FREE].index(2 * slot + 1), count=1)
    mbarrier.wait(bars[_P_READY].index(0), count & 1)
    factor = shrink_shared.load(gl.SliceLayout(1, _ACC))
    if SPLITS == 2:
        cluster.wait()
        _, peer = span_of(1 - split, most_used(used_space), TILES, SPLITS)
        swap.swap_halves(
            o, factor, lse_shared, angles, sink_ptr, cos_ptr, sin_ptr, out_ptr, token, split, area, count & 1,
            peer & 1, PART, HALF_ROPE,
        )  # fmt: skip
    else:
        write_half(o, factor, angles, out_ptr, cos_ptr, sin_ptr, token, 256 * PART, HALF_ROPE)


@gluon.jit(
    do_not_specialize=["page_count", "sequences", "table_width", "window_count", "entry_count", "row_count"]
)
def attend_trades(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr, sink_ptr,
    out_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, scale,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PAYLOAD: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, NAMES: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
    SETTLED: gl.constexpr, WEIGH_REGISTERS: gl.constexpr, PRODUCE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (tokens, 1), or (1, tokens, 1) of clusters of two, which share a query's keys and swap halves of
    what they have of its output. NAMES: entries, rounded up to a power of two, at most 512. SETTLED: the
    launch before wrote nothing that this one reads but q and let it start only once it had itself waited, so
    all but q is read before the wait. Launched with `launch_pdl`.
    """
    if not SETTLED:
        grid_wait()
        grid_release()
    near_space = gl.allocate_shared_memory(gl.int32, [2, 64], _FLAT)
    keys_space = gl.allocate_shared_memory(gl.int32, [NAMES // 64, 64], _FLAT)
    used_space = gl.allocate_shared_memory(gl.int32, [32], _FLAT)
    ring = gl.allocate_shared_memory(gl.int32, [3, 64, 64], RAW)
    ring_s = gl.allocate_shared_memory(gl.int32, [3, 64, 8], RAW_SCALES)
    q_tile = gl.allocate_shared_memory(gl.int32, [64, 128], TILE_WORDS)
    tiles = gl.allocate_shared_memory(gl.int32, [2, 64, 256], TILE_WORDS)
    p_shared = gl.allocate_shared_memory(gl.float16, [64, 64], _SHARED)
    shrink_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    lse_shared = gl.allocate_shared_memory(gl.float32, [64], _FLAT)
    angles = gl.allocate_shared_memory(gl.float32, [2, 64], _FLAT)
    bars = (
        barriers(1, 1), barriers(2, 2), barriers(4, 2), barriers(1, 1), barriers(1, 2), barriers(1, 2),
        barriers(1, 1), barriers(1, 1),
    )  # fmt: skip
    area = 0
    if SPLITS > 1:
        area = cluster.end(swap.AREA)
        swap.prepare(area)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score, (
                q_ptr, cos_ptr, sin_ptr, sink_ptr, scale,
                near_space, keys_space, used_space, ring, q_tile, tiles, p_shared, shrink_shared,
                lse_shared, angles, bars, area, TILES, HALF_ROPE, SPLITS, SETTLED,
            )),
            (_weigh, (
                q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr, window_count, row_count,
                near_space, used_space, ring, ring_s, q_tile, tiles, p_shared, shrink_shared,
                lse_shared, angles, bars, area, 0, TILES, HALF_ROPE, SPLITS, SETTLED,
            )),
            (_weigh, (
                q_ptr, cos_ptr, sin_ptr, window_ptr, rows_ptr, sink_ptr, out_ptr, window_count, row_count,
                near_space, used_space, ring, ring_s, q_tile, tiles, p_shared, shrink_shared,
                lse_shared, angles, bars, area, 1, TILES, HALF_ROPE, SPLITS, SETTLED,
            )),
            (_produce, (
                pages_ptr, table_ptr, seq_ptr, entries_ptr, page_count, sequences, table_width, entry_count,
                keys_space, used_space, ring, ring_s, tiles, bars,
                ROWS, PAGE, PAYLOAD, SCALES, TILES, NAMES, SPLITS,
            )),
        ],
        [4, 4, 4], [WEIGH_REGISTERS, WEIGH_REGISTERS, PRODUCE_REGISTERS],
    )  # fmt: skip
