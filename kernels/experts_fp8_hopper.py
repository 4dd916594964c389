# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Experts of few tokens on Hopper: tiles of eight slots through FP8 matrix units, gate, up and SwiGLU in one
launch, down in another (spec §3).

Gate and up take activations in two bands, down in one (`bands_hopper`): nothing quantises its output again.
The shared expert may be tiles of the same launches: its weights are E4M3 already.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.bands_hopper import (
    FLAT,
    SHARED_W,
    code_of,
    copy_scales,
    quantised,
    scale_of,
    to_bytes,
)
from cedar.kernels.grid_hopper import arrive, barrier, grid_release, grid_wait, wait_for
from cedar.kernels.router_triton import Tiles
from cedar.kernels.slot_streams_hopper import (
    COPY_WORD,
    COPY_XS,
    SHARED_HALF,
    SHARED_X,
    SHARED_X3,
    copy_x,
    stream,
    sum_of,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

Packed = tuple[tuple[torch.Tensor, torch.Tensor], ...]
STAGES = 3  # of 20 KB: three programs a multiprocessor
ADDED = gl.constexpr(16)  # tokens that one program adds up

_OWNERS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
_ADD = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [ADDED, 128 channels]


@gluon.jit
def _spread(place, tiles, beside):
    """Which of the tiles runs at `place`: the last `beside`, the shared expert's, spread over the first half.

    Beside the routed experts' they take less time than one after another, and last they would be waited for,
    being the longest.
    """
    apart = gl.maximum(tiles // (2 * beside), 1)
    turn = place // apart
    routed = place - gl.minimum(turn + 1, beside)
    here = (place == turn * apart) & (turn < beside)
    return gl.where(here, tiles - beside + turn, routed)


@gluon.jit
def _asked(
    x_ptr, xs_ptr, slot, slot_t, routed,
    COLUMNS: gl.constexpr, SLOTS: gl.constexpr, BANDS: gl.constexpr, GROUPS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Where the first block's activations of some slots lie, with their scales, and which of them there are.

    slot in `copy_x`'s layout, for every column of a product, slot_t in COPY_XS's.
    """
    N: gl.constexpr = max(8, SLOTS * BANDS)
    X: gl.constexpr = copy_x(GROUPS)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    byte = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))
    g = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, COPY_XS))
    if BANDS == 2:
        x_row = gl.where(slot < routed, slot // K, slot - routed)
        t_row = gl.where(slot_t < routed, slot_t // K, slot_t - routed)
    else:
        x_row = slot
        t_row = slot_t
    band = n % 2 if SLOTS == 4 else n // SLOTS
    x_at = gl.maximum(x_row, 0).to(gl.int64) * (BANDS * COLUMNS) + band * COLUMNS
    x = x_ptr + (x_at[None, :] + group[:, None] * 32)[:, :, None] + byte[None, None, :]
    xs = xs_ptr + gl.maximum(t_row, 0).to(gl.int64)[:, None] * (COLUMNS // 32) + g[None, :]
    return x, xs, (slot >= 0)[None, :, None], (slot_t >= 0)[:, None]


@gluon.jit
def _beside(n, first, routed, tokens):
    """The shared expert's slots of tokens first + n, -1 for none."""
    return gl.where(first + n < tokens, routed + first + n, -1)


@gluon.jit
def _activated(one, two, own, weight, row, out_ptr, outputs, limit, SLOTS: gl.constexpr):
    """SwiGLU of gate and up [64, SLOTS], weighted, quantised and stored; the scales' codes [2, SLOTS]."""
    c = gl.arange(0, 64, layout=gl.SliceLayout(1, sum_of(SLOTS)))
    gate = gl.minimum(one.to(gl.bfloat16).to(gl.float32), limit)
    up = gl.minimum(gl.maximum(two.to(gl.bfloat16).to(gl.float32), -limit), limit)
    hidden = (gate / (1.0 + gl.exp(-gate)) * up * weight[None, :]).to(gl.bfloat16).to(gl.float32)
    parts = gl.reshape(hidden, [2, 32, SLOTS])
    code = code_of(gl.max(gl.abs(parts), axis=1))
    every = gl.convert_layout(code, gl.SliceLayout(1, parts.type.layout))[:, None, :]
    q = gl.convert_layout(gl.reshape(to_bytes(parts, every), [64, SLOTS]), sum_of(SLOTS))
    at = gl.maximum(own, 0)[None, :].to(gl.int64) * outputs
    to = out_ptr + at + (row + c // 32 * 32 + c % 2 * 16 + c % 32 // 2)[:, None]
    gl.store(to, q, mask=(own >= 0)[None, :])
    return code


@gluon.jit
def _store_scales(code, own, row, out_scale_ptr, outputs):
    to = gl.maximum(own, 0)[None, :] * (outputs // 32) + row // 32
    to += gl.arange(0, 2, layout=gl.SliceLayout(1, code.type.layout))[:, None]
    gl.store(out_scale_ptr + to, scale_of(code), mask=(own >= 0)[None, :])


@gluon.jit
def _store_sums(one, two, own, row, out_ptr, outputs, SLOTS: gl.constexpr):
    c = gl.arange(0, 64, layout=gl.SliceLayout(1, sum_of(SLOTS)))
    to = out_ptr + gl.maximum(own, 0)[None, :].to(gl.int64) * outputs + row + c[:, None]
    inside = (own >= 0)[None, :]
    gl.store(to, one.to(gl.bfloat16), mask=inside)
    gl.store(to + 64, two.to(gl.bfloat16), mask=inside)


@gluon.jit
def _routed(
    first_desc, second_desc, x_ptr, xs_ptr, slots, weight_ptr, first_scale_ptr, second_scale_ptr, out_ptr,
    out_scale_ptr, w_s, s_s, x_s, t_s, bars, owner, row, outputs, routed, limit,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr, K: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """An expert's products with the first four or all eight slots of a tile: four have half the sums."""
    GROUPS: gl.constexpr = 8 if COLUMNS % 256 == 0 else 4
    BANDS: gl.constexpr = 2 if GATED else 1
    N: gl.constexpr = max(8, SLOTS * BANDS)  # a product's columns
    PLACES: gl.constexpr = x_s.shape[0] * 8 * BANDS // N
    SECOND: gl.constexpr = 0 if GATED else 64
    n = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy_x(GROUPS))))
    if SLOTS == 4:
        slot = gl.where(n % 2 < BANDS, gl.load(slots + n // 2), -1)
    else:
        slot = gl.load(slots + n % 8)
    slot_t = gl.load(slots + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, COPY_XS)))
    own = gl.load(slots + gl.arange(0, SLOTS, layout=gl.SliceLayout(0, sum_of(SLOTS))))
    if GATED:
        weight = gl.load(weight_ptr + gl.maximum(own, 0), mask=own >= 0, other=1.0)
    x, xs, mine, mine_t = _asked(x_ptr, xs_ptr, slot, slot_t, routed, COLUMNS, SLOTS, BANDS, GROUPS, K)
    base = owner * outputs + row
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, copy_scales(GROUPS)))[:, None]
    e = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, copy_scales(GROUPS)))[None, :]
    at = (base + r).to(gl.int64) * (COLUMNS // 32) + e
    one, two = stream(
        first_desc, second_desc, base, base + SECOND, first_scale_ptr + at,
        second_scale_ptr + SECOND * (COLUMNS // 32) + at, r, x, xs, mine, mine_t, w_s, s_s,
        x_s._reinterpret(gl.uint8, [PLACES, GROUPS, N, 32], SHARED_X3),
        t_s._reinterpret(gl.float32, [t_s.shape[0] * 8 // SLOTS, SLOTS, GROUPS], FLAT),
        x_s._reinterpret(gl.float8e4nv, [PLACES * GROUPS, N, 32], SHARED_X), bars,
        COLUMNS, STAGES, SLOTS, BANDS, GROUPS, False, EARLY,
    )  # fmt: skip
    if GATED:
        code = _activated(one, two, own, weight, row, out_ptr, outputs, limit, SLOTS)
        n2 = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, code.type.layout))
        _store_scales(code, gl.load(slots + n2), row, out_scale_ptr, outputs)
    else:
        _store_sums(one, two, own, row, out_ptr, outputs, SLOTS)


@gluon.jit
def _add_up(
    out_ptr, total_ptr, owners_ptr, count_ptr, outputs, routed, tokens, tiles, SHARED: gl.constexpr,
    K: gl.constexpr,
):  # fmt: skip
    """Adds 128 outputs of ADDED tokens once all tiles of these outputs have arrived; the last leaves zero.

    These programs come last in launch order, so that all they wait for run or have run. A tile's program
    that added if it were the last would wait for its own arrival: a tenth of the launch.
    """
    beside = (tokens + SHARED - 1) // SHARED
    filled = beside
    for start in range(0, tiles - beside, 512):
        at = start + gl.arange(0, 512, layout=_OWNERS)
        owner = gl.load(owners_ptr + at, mask=at < tiles - beside, other=-1)
        filled += gl.sum((owner >= 0).to(gl.int32), axis=0)
    cell = count_ptr + gl.program_id(0)
    wait_for(cell, filled)
    channel = gl.program_id(0) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, _ADD))[None, :]
    token = (gl.program_id(1) - tiles) * ADDED + gl.arange(0, ADDED, layout=gl.SliceLayout(1, _ADD))[:, None]
    parts = ()  # all on their way before the first is added
    for i in gl.static_range(K + 1):
        line = token * K + i if i < K else routed + token
        place = out_ptr + line.to(gl.int64) * outputs + channel
        part = gl.load(place, mask=token < tokens, other=0.0, cache_modifier=".cg")
        parts += (part,)  # type: ignore[assignment]
    total = gl.full([ADDED, 128], 0.0, gl.float32, _ADD)
    for i in gl.static_range(K + 1):
        total += parts[i].to(gl.float32)
    to = total_ptr + token.to(gl.int64) * outputs + channel
    gl.store(to, total.to(gl.bfloat16), mask=token < tokens)
    barrier()
    if gl.atomic_add(cell, 1, sem="relaxed") == filled + gl.num_programs(1) - tiles - 1:
        gl.atomic_xchg(cell, 0, sem="relaxed")


@gluon.jit(do_not_specialize=["routed", "tokens"])
def tiles_of_eight(
    first_desc, second_desc, shared_desc, x_ptr, xs_ptr, slots_ptr, owners_ptr, weight_ptr, first_scale_ptr,
    second_scale_ptr, shared_scale_ptr, out_ptr, out_scale_ptr, count_ptr, total_ptr,
    outputs, routed, experts, tokens, limit,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, SHARED: gl.constexpr,
    EARLY: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / 64 or 128, tiles): an expert's products with its slots' rows of x.

    Slot s below `routed` is choice s % K of token s // K, slot routed + n the shared expert's token n; those
    that a tile has come first, and with at most four of them its products have half the columns. A tile's
    owner is an expert, -1 for none or `experts` for the shared one, whose tiles come last and hold
    SHARED tokens (8, 16 or 32; 0: it has none here), in order; its weights are FP8.
    GATED: 64 rows of each of two weights, gate and up (the shared expert's stand one over the other); x has a
    row for a token in two bands; clamp, SwiGLU, routing weight; out: E4M3 bytes [slots, outputs] in
    `quantise`'s order and their scales. Else 128 rows of one weight (given twice); x has such a row for a
    slot; out: bf16 [slots, outputs]. With SHARED a program for each ADDED tokens comes after the tiles and
    adds (`_add_up`): total bf16 [tokens, outputs] is a token's K routed rows in fp32, first to last, and its
    shared one (count_ptr, zeros, is left as it was found).
    EARLY: the tiles and weight_ptr's are older than the launch before, so weights are asked for before
    `grid_wait`.
    """
    GROUPS: gl.constexpr = 8 if COLUMNS % 256 == 0 else 4
    BANDS: gl.constexpr = 2 if GATED else 1
    TALL: gl.constexpr = 64 if GATED else 128
    ROOM: gl.constexpr = max(1, SHARED // (2 * GROUPS))
    LENGTHS: gl.constexpr = STAGES * ROOM
    row = gl.program_id(0) * TALL
    place = gl.program_id(1)
    tiles = gl.num_programs(1)
    if SHARED > 0 and not GATED:
        tiles -= (tokens + ADDED - 1) // ADDED
    if SHARED > 0 and not GATED and place >= tiles:
        grid_release()
        grid_wait()
        _add_up(out_ptr, total_ptr, owners_ptr, count_ptr, outputs, routed, tokens, tiles, SHARED, K)
    else:
        tile = place
        if SHARED > 0:
            beside = (tokens + SHARED - 1) // SHARED
            tile = _spread(place, tiles, beside)
            first = (tile - tiles + beside) * SHARED
        if not EARLY:
            grid_wait()
            grid_release()
        owner = gl.load(owners_ptr + tile)  # on its way together with the slots
        slots = slots_ptr + tile * 8
        fifth = gl.load(slots + 4)
        if owner >= 0:
            w_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 64, 128], SHARED_W)
            x_s = gl.allocate_shared_memory(gl.uint8, [LENGTHS, GROUPS, 8 * BANDS, 32], SHARED_X3)
            s_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 64, GROUPS], FLAT)
            t_s = gl.allocate_shared_memory(gl.float32, [LENGTHS, 8, GROUPS], FLAT)
            bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for i in gl.static_range(STAGES):
                mbarrier.init(bars.index(i), count=1)
            fence_async_shared()
            barrier()
            if SHARED > 0 and owner == experts:
                X4: gl.constexpr = copy_x(4)
                SUMS: gl.constexpr = sum_of(SHARED)
                PLACES: gl.constexpr = LENGTHS * GROUPS * 2 // SHARED  # of as many slots, four groups
                n = gl.arange(0, SHARED * BANDS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X4)))
                x_slot = _beside(n % SHARED, first, routed, tokens)
                n_t = gl.arange(0, SHARED, layout=gl.SliceLayout(1, COPY_XS))
                t_slot = _beside(n_t, first, routed, tokens)
                x8, xs8, mine8, mine_t8 = _asked(
                    x_ptr, xs_ptr, x_slot, t_slot, routed, COLUMNS, SHARED, BANDS, 4, K
                )
                second = row + (outputs if GATED else 64)
                r8 = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY_WORD))[:, None]
                one8, two8 = stream(
                    shared_desc, shared_desc, row, second,
                    shared_scale_ptr + (row + r8) // 32 * (COLUMNS // 32),
                    shared_scale_ptr + (second + r8) // 32 * (COLUMNS // 32),
                    r8, x8, xs8, mine8, mine_t8, w_s,
                    s_s._reinterpret(gl.uint8, [STAGES * GROUPS // 2, 64, 4], FLAT),
                    x_s._reinterpret(gl.uint8, [PLACES, 4, SHARED * BANDS, 32], SHARED_X3),
                    t_s._reinterpret(gl.float32, [PLACES, SHARED, 4], FLAT),
                    x_s._reinterpret(gl.float8e4nv, [PLACES * 4, SHARED * BANDS, 32], SHARED_X), bars,
                    COLUMNS, STAGES, SHARED, BANDS, 4, True, EARLY,
                )  # fmt: skip
                one8 = one8 * 0.015625  # these weights are not 2^-6 of their value
                two8 = two8 * 0.015625
                ours = _beside(gl.arange(0, SHARED, layout=gl.SliceLayout(0, SUMS)), first, routed, tokens)
                if GATED:
                    whole = gl.full([SHARED], 1.0, gl.float32, gl.SliceLayout(0, SUMS))
                    code8 = _activated(one8, two8, ours, whole, row, out_ptr, outputs, limit, SHARED)
                    n8 = gl.arange(0, SHARED, layout=gl.SliceLayout(0, code8.type.layout))
                    _store_scales(code8, _beside(n8, first, routed, tokens), row, out_scale_ptr, outputs)
                else:
                    _store_sums(one8, two8, ours, row, out_ptr, outputs, SHARED)
            elif fifth < 0:
                _routed(
                    first_desc, second_desc, x_ptr, xs_ptr, slots, weight_ptr, first_scale_ptr,
                    second_scale_ptr, out_ptr, out_scale_ptr, w_s, s_s, x_s, t_s, bars, owner, row, outputs,
                    routed, limit, COLUMNS, STAGES, GATED, EARLY, K, 4,
                )  # fmt: skip
            else:
                _routed(
                    first_desc, second_desc, x_ptr, xs_ptr, slots, weight_ptr, first_scale_ptr,
                    second_scale_ptr, out_ptr, out_scale_ptr, w_s, s_s, x_s, t_s, bars, owner, row, outputs,
                    routed, limit, COLUMNS, STAGES, GATED, EARLY, K, 8,
                )  # fmt: skip
            for i in gl.static_range(STAGES):
                mbarrier.invalidate(bars.index(i))
            if SHARED > 0 and not GATED:
                arrive(count_ptr + gl.program_id(0), 1)
        elif EARLY:
            grid_release()
            grid_wait()


def _described(weight: torch.Tensor, columns: int) -> TensorDescriptor:
    """Blocks of 64 rows of stacked packed weights: 256 channels, or 128 where there is no multiple."""
    wide = columns % 256 == 0
    layout = SHARED_W.value if wide else SHARED_HALF.value
    return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[2]), [64, 128 if wide else 64], layout)


def experts(
    x: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    weights: torch.Tensor,
    packed: Packed,
    k: int,
    limit: float,
) -> torch.Tensor:
    """bf16 [N·k, d]: every slot's output; tiles = (slots, owners, count) of eight slots each.

    x bf16 [N, d]; weights fp32 [N, k]; packed as in `experts_triton.grouped_experts`, all contiguous; d a
    multiple of 256, the inner width of 128.
    """
    return quantised_experts(*quantised(x), tiles, weights, packed, k, limit)


def quantised_experts(
    rows: torch.Tensor,
    scales: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    weights: torch.Tensor,
    packed: Packed,
    k: int,
    limit: float,
) -> torch.Tensor:
    """`experts` of rows in two bands, uint8 [N, 2, d], and their scales, as `bands_hopper.quantised` has
    them.
    """
    tokens, _, width = rows.shape
    (w1, s1), (w3, s3), (w2, s2) = packed
    count, inner = w1.shape[:2]
    hidden = torch.empty(tokens * k, inner, dtype=torch.uint8, device=rows.device)
    hidden_scales = torch.empty(tokens * k, inner // 32, dtype=torch.float32, device=rows.device)
    slots, owners, programs = tiles
    d1, d3, d2 = _described(w1, width), _described(w3, width), _described(w2, inner)
    tiles_of_eight[(inner // 64, programs)](
        d1, d3, d1, rows, scales, slots, owners, weights, s1, s3, s1, hidden, hidden_scales, owners, hidden,
        inner, tokens * k, count, tokens, limit, width, STAGES, True, 0, True, k,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    y = torch.empty(tokens * k, width, dtype=torch.bfloat16, device=rows.device)
    tiles_of_eight[(width // 128, programs)](
        d2, d2, d2, hidden, hidden_scales, slots, owners, weights, s2, s2, s2, y, scales, owners, y,
        width, tokens * k, count, tokens, limit, inner, STAGES, False, 0, True, k,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


def with_shared(
    tiles: Tiles,
    weights: torch.Tensor,
    packed: Packed,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    k: int,
    limit: float,
    counters: torch.Tensor,
) -> torch.Tensor:
    """bf16 [N, d]: the sum of routed experts and the shared one, in two launches; tiles of eight slots, the
    shared expert's of sixteen where there are more than eight tokens.

    shared = (w13, its scale, w2, its scale), FP8 weights as bytes; both widths are multiples of 128.
    counters: int32 zeros, left so.
    """
    bands, scales, slots, owners = tiles.bands, tiles.scales, tiles.slots, tiles.owners
    tokens, width = bands.shape[0], bands.shape[2]
    (w1, s1), (w3, s3), (w2, s2) = packed
    w13, s13, shared2, shared_scale2 = shared
    count, inner = w1.shape[:2]
    routed = tokens * k
    beside = 8 if tokens <= 8 else 16
    programs = owners.shape[0] - triton.cdiv(tokens, tiles.rows) + triton.cdiv(tokens, beside)
    hidden = torch.empty(routed + tokens, inner, dtype=torch.uint8, device=bands.device)
    hidden_scales = torch.empty(routed + tokens, inner // 32, dtype=torch.float32, device=bands.device)
    d1, d3, d2 = _described(w1, width), _described(w3, width), _described(w2, inner)
    e13, e2 = (TensorDescriptor.from_tensor(w, [64, 128], SHARED_W.value) for w in (w13, shared2))
    tiles_of_eight[(inner // 64, programs)](
        d1, d3, e13, bands, scales, slots, owners, weights, s1, s3, s13, hidden, hidden_scales, counters,
        hidden, inner, routed, count, tokens, limit, width, STAGES, True, beside, False, k,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    y = torch.empty(routed + tokens, width, dtype=torch.bfloat16, device=bands.device)
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=bands.device)
    tiles_of_eight[(width // 128, programs + triton.cdiv(tokens, ADDED.value))](
        d2, d2, e2, hidden, hidden_scales, slots, owners, weights, s2, s2, shared_scale2, y, scales, counters,
        out, width, routed, count, tokens, limit, inner, STAGES, False, beside, True, k,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
