# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The router on a GPU, one launch: programs share out experts and channels, meet, and each selects for some
of the tokens (spec §3). Many tokens take two launches: a library product, then the selection.

It has the activations in hand that the experts read next, so it writes them quantised, in two
bands, and the last program of all sorts the choices into tiles of one expert each.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import hopper, linear_bf16, multiprocessors
from cedar.kernels.packed_triton import INTERPRETED
from cedar.kernels.prepared_triton import store_bands

COUNTERS = 65_536
MANY = 256  # tokens beyond which a library product and a launch for the selection are faster
MEETING = tl.constexpr(256)  # what a launch adds to a tile's counter


@triton.jit
def _select(
    x, bias_ptr, ids_ptr, weights_ptr, owners_ptr, ranks_ptr, count_ptr, token, there, experts, bias_stride,
    k, scale, E: tl.constexpr, R: tl.constexpr, OWN: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The k best of each token int64 [R], ids ascending, of logits x [R, E]. OWN: a tile a choice, in
    order. RANKED: with each choice how many came before it of the same expert, counted in count_ptr [E].
    """
    expert = tl.arange(0, E)
    inside = there[:, None] & (expert < experts)[None, :]
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    softplus = tl.where(x < -10.0, tl.exp(x), softplus)  # log(1 + e^x) loses e^x there
    s = tl.sqrt(softplus)
    bias = tl.load(bias_ptr + token[:, None] * bias_stride + expert[None, :], mask=inside, other=0.0)
    word = (s + bias + 0.0).to(tl.int32, bitcast=True)
    none = tl.full([R, E], -0x80000000, tl.int32)
    order = tl.where(inside, word ^ ((word >> 31) & 0x7FFFFFFF), none)
    number = tl.broadcast_to(expert[None, :], [R, E])
    taken = tl.zeros([R, E], tl.int32)
    place = tl.zeros([R, E], tl.int32)
    for _ in range(k):
        best = tl.max(order, axis=1)[:, None]
        first = tl.min(tl.where((order == best) & inside, number, E), axis=1)[:, None]
        taken = tl.where(number == first, 1, taken)
        order = tl.where(number == first, none, order)
        place += (number > first).to(tl.int32)  # how many of the chosen have lower numbers
    total = tl.sum(tl.where(taken > 0, s, 0.0), axis=1) + 1e-20
    chosen = (taken > 0) & inside
    at = token[:, None] * k + place
    tl.store(ids_ptr + at, number, mask=chosen)
    tl.store(weights_ptr + at, s / total[:, None] * scale, mask=chosen)
    if OWN:
        tl.store(owners_ptr + at, number, mask=chosen)
    if RANKED:
        rank = tl.atomic_add(count_ptr + number, 1, mask=chosen, sem="relaxed")
        tl.store(ranks_ptr + at, rank, mask=chosen)


@triton.jit
def _quantised(x_ptr, bands_ptr, powers_ptr, token, tokens, base, width, BK: tl.constexpr):
    """BK channels from `base` on of some rows, in two bands."""
    channel = base + tl.arange(0, BK)
    row = token.to(tl.int64)
    mine = (token < tokens)[:, None] & (channel < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + channel[None, :], mask=mine, other=0.0)
    store_bands(bands_ptr, powers_ptr, x.to(tl.float32), row, token < tokens, base, width)


@triton.jit
def _sort(
    ids_ptr, ranks_ptr, slots_ptr, owners_ptr, cursor_ptr, count_ptr, count, tiles,
    E: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: `count` slots by expert in tiles of TILE; count_ptr: choices of each, zeros thereafter."""
    pair = tl.arange(0, P)
    every = tl.arange(0, E)
    chosen = tl.load(count_ptr + every, cache_modifier=".cg")
    mine = tl.load(ids_ptr + pair, mask=pair < count, other=0, cache_modifier=".cg").to(tl.int32)
    rank = tl.load(ranks_ptr + pair, mask=pair < count, other=0, cache_modifier=".cg")
    for begin in range(0, tiles * TILE, B):
        fill = begin + tl.arange(0, B)
        tl.store(slots_ptr + fill, -1, mask=fill < tiles * TILE)
        tl.store(owners_ptr + fill, -1, mask=fill < tiles)
    needed = (chosen + TILE - 1) // TILE
    tl.store(cursor_ptr + every, tl.cumsum(needed, axis=0) - needed)
    tl.store(count_ptr + every, 0)
    tl.debug_barrier()
    tile = tl.load(cursor_ptr + mine, mask=pair < count, other=0) + rank // TILE
    tl.store(owners_ptr + tile, mine, mask=(pair < count) & (rank % TILE == 0))
    tl.store(slots_ptr + tile * TILE + rank % TILE, pair, mask=pair < count)


@triton.jit
def _add_parts(
    part_ptr, tokens, experts, own, some, there,
    SPLITS: tl.constexpr, SP2: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Logits [R, E] of tokens `some` (the first is `own`), added up in order."""
    expert = tl.arange(0, E)
    if R == 1:  # all parts of a token wait together
        split = tl.arange(0, SP2)
        at = (split[:, None] * tokens + own) * experts + expert[None, :]
        inside = (split < SPLITS)[:, None] & (expert < experts)[None, :]
        x = tl.sum(tl.load(part_ptr + at, mask=inside, other=0.0, cache_modifier=".cg"), axis=0)[None, :]
    else:
        at = some[:, None] * experts + expert[None, :]
        inside = there[:, None] & (expert < experts)[None, :]
        x = tl.load(part_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        for _ in tl.static_range(1, SPLITS):
            at += tokens * experts
            x += tl.load(part_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
    return x


@triton.jit(do_not_specialize=["tokens", "bias_stride", "tiles", "k"])
def _route(
    x_ptr, gate_ptr, bias_ptr, part_ptr, meet_ptr, count_ptr, ids_ptr, weights_ptr, bands_ptr, powers_ptr,
    slots_ptr, owners_ptr, cursor_ptr, ranks_ptr, tokens, width, experts, bias_stride, k, scale, tiles, done,
    T: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
    SP2: tl.constexpr, E: tl.constexpr, R: tl.constexpr, RQ: tl.constexpr, TILE: tl.constexpr,
    P: tl.constexpr, ALONE: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (LANES·SPLITS, ceil(tokens / T)): BE experts and a share of the channels of T tokens; then R of
    the tokens, selected, and pieces of RQ of them quantised. TILE, 0 for none: slots of a tile of one expert.
    ALONE: one program selects for all. OWN: for one token.
    """
    PROGRAMS: tl.constexpr = LANES * SPLITS
    each_ptr = count_ptr + done - E  # of each expert, how many chose it
    program = tl.program_id(0)
    group = tl.program_id(1)
    lane = program % LANES
    token = group * T + tl.arange(0, T)
    expert = lane * BE + tl.arange(0, BE)
    mine = (token < tokens)[:, None]
    known = (expert < experts)[:, None]
    each = tl.cdiv(tl.cdiv(width, BK), SPLITS)
    start = program // LANES * each * BK
    at = start + tl.arange(0, BK)
    gates = gate_ptr + expert[:, None] * width
    gate = tl.load(gates + at[None, :], mask=known & (at < width)[None, :], other=0.0)
    if PDL:  # weights never change; all else waits for the launch before
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([T, BE], tl.float32)
    for i in range(each):
        inside = mine & (at < width)[None, :]
        x = tl.load(x_ptr + token[:, None].to(tl.int64) * width + at[None, :], mask=inside, other=0.0)
        if INTERPRETED:
            acc += tl.dot(x.to(tl.float32), tl.trans(gate.to(tl.float32)), input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(gate), acc)
        at += BK
        gate = tl.load(gates + at[None, :], mask=known & ((at < width) & (i + 1 < each))[None, :], other=0.0)
    here = 0
    if PROGRAMS > 1:
        part = part_ptr + (program // LANES).to(tl.int64) * tokens * experts
        cell = token[:, None].to(tl.int64) * experts + expert[None, :]
        tl.store(part + cell, acc, mask=mine & (expert < experts)[None, :])
        tl.debug_barrier()
        here = tl.atomic_add(meet_ptr + group, 1, sem="acq_rel")
        if here & (MEETING - 1) == PROGRAMS - 1:  # not %: counters pass 2^31 and are negative then
            tl.atomic_add(meet_ptr + group, MEETING - PROGRAMS, sem="acq_rel")
    if TILE > 0:
        for piece in range(program, T // RQ * tl.cdiv(width, BK), PROGRAMS):  # while the others come
            row = group * T + piece % (T // RQ) * RQ + tl.arange(0, RQ)
            _quantised(x_ptr, bands_ptr, powers_ptr, row, tokens, piece // (T // RQ) * BK, width, BK)
    selected = 0
    if PROGRAMS == 1:
        _select(acc, bias_ptr, ids_ptr, weights_ptr, owners_ptr, ranks_ptr, each_ptr, token.to(tl.int64),
                token < tokens, experts, bias_stride, k, scale, E, T, OWN, TILE > 0 and not OWN)  # fmt: skip
        selected = 1
    else:
        begin = program * R
        end = begin + R
        if INTERPRETED:  # programs run one after another there: the last selects for all
            begin = tl.where(here & (MEETING - 1) == PROGRAMS - 1, 0, T)
            end = T
        for own in range(begin, end, R):
            if (own < T) & (group * T + own < tokens):
                if not INTERPRETED:
                    seen = here
                    while seen - (here & -MEETING) < MEETING:
                        seen = tl.atomic_add(meet_ptr + group, 0, sem="acquire")
                    tl.debug_barrier()
                some = group.to(tl.int64) * T + own + tl.arange(0, R)
                there = (some < tokens) & (own + tl.arange(0, R) < T)
                x = _add_parts(part_ptr, tokens, experts, group * T + own, some, there, SPLITS, SP2, E, R)
                _select(x, bias_ptr, ids_ptr, weights_ptr, owners_ptr, ranks_ptr, each_ptr, some, there,
                        experts, bias_stride, k, scale, E, R, OWN, TILE > 0 and not OWN)  # fmt: skip
                selected += 1
    if OWN:
        if selected > 0:
            fill = tl.arange(0, 1024)
            slot = tl.where(fill % TILE == 0, fill // TILE, -1)
            tl.store(slots_ptr + fill, slot, mask=fill < (tiles + 1) * TILE)
            tl.store(owners_ptr + fill, experts + 0 * fill, mask=fill == tiles)
    elif TILE > 0:  # noqa: SIM102
        if selected > 0:
            tl.debug_barrier()
            before = 0
            whole = selected
            if not ALONE:
                before = tl.atomic_add(count_ptr + done, selected, sem="acq_rel")
                whole = tokens // T * tl.cdiv(T, R) + tl.cdiv(tokens % T, R)
            if before + selected == whole:
                _sort(ids_ptr, ranks_ptr, slots_ptr, owners_ptr, cursor_ptr, each_ptr, tokens * k, tiles,
                      E, P, TILE, 1024)  # fmt: skip
                shared = tl.cdiv(tokens, TILE)
                for first in range(0, shared * TILE, 1024):
                    fill = first + tl.arange(0, 1024)
                    slot = tl.where(fill < tokens, tokens * k + fill, -1)
                    tl.store(slots_ptr + tiles * TILE + fill, slot, mask=fill < shared * TILE)
                    tl.store(owners_ptr + tiles + fill, experts + 0 * fill, mask=fill < shared)
                if not ALONE:
                    tl.atomic_xchg(count_ptr + done, 0)


@triton.jit(do_not_specialize=["tokens", "bias_stride", "k"])
def _choose(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, tokens, experts, bias_stride, k, scale, E: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(tokens / R)): the selection alone, of logits fp32 [tokens, experts]."""
    token = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    expert = tl.arange(0, E)
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    x = tl.load(logits_ptr + token[:, None] * experts + expert[None, :], mask=inside, other=0.0)
    _select(x, bias_ptr, ids_ptr, weights_ptr, ids_ptr, ids_ptr, ids_ptr, token, token < tokens, experts,
            bias_stride, k, scale, E, R, False, False)  # fmt: skip


class Tiles(NamedTuple):
    """What the experts read after the router: tiles of `rows` slots, each of one expert (-1: no tile; the
    number of experts: the shared one). Slot s < N·k is choice s % k of token s // k, N·k + n the shared
    expert's token n.
    """

    slots: torch.Tensor  # int32 [tiles·rows], -1: none
    owners: torch.Tensor  # int32 [tiles]
    rows: int
    bands: torch.Tensor  # uint8 [N, 2, d]: the activations as `prepared_triton.store_bands` writes them
    scales: torch.Tensor  # fp32 [N, d / 32], theirs


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Counters that every call leaves at zero; calls of one device run one after another."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@cache
def _meetings(device: torch.device) -> torch.Tensor:
    """Counters to each of which a launch adds MEETING in all."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32 [N, k] ascending, weights fp32 [N, k]) of x bf16 [N, d], gate bf16 [E, d], bias fp32 [E]
    or [N, E].
    """
    if x.shape[0] > MANY:
        return choose(linear_bf16(x, gate, torch.float32), bias, k, scale)
    ids, weights, _ = _launch(x, gate, bias, k, scale, 0)
    return ids, weights


def choose(
    logits: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selection of `route` from logits fp32 [N, E]."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        chooses, least = _choose, 1
        if logits.is_cuda and hopper(logits.device.index or 0):
            from cedar.kernels.router_rows_hopper import LEAST, choose_rows

            chooses, least = choose_rows, LEAST
        chooses[(triton.cdiv(tokens, 4),)](
            logits.contiguous(), bias.contiguous(), ids, weights, tokens, experts,
            experts if bias.dim() == 2 else 0, k, scale, max(least, triton.next_power_of_2(experts)), 4,
            num_warps=4,
        )  # fmt: skip
    return ids, weights


def route_to_tiles(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, k: int, scale: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor, Tiles]:
    """`route`, with tiles of `rows` slots, for at most 4,096 choices; d a multiple of 128."""
    ids, weights, tiles = _launch(x, gate, bias, k, scale, rows)
    assert tiles is not None
    return ids, weights, tiles


def route_to_columns(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """`route` of one token for `experts_token_hopper`: (ids, weights, the token quantised, its scales); None
    where there is no kernel for it. d a multiple of 256.
    """
    from cedar.kernels import router_one_hopper

    plan = router_one_hopper.cut(gate.shape[0], x.shape[1]) if bias.dim() == 1 and k <= 32 else None
    if plan is None:
        return None
    ids = torch.empty(1, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(1, k, dtype=torch.float32, device=x.device)
    rows = torch.empty(1, 8 * x.shape[1], dtype=torch.uint8, device=x.device)
    scales = torch.empty(1, x.shape[1] // 32, dtype=torch.float32, device=x.device)
    given = (x.contiguous(), gate.contiguous(), bias.contiguous(), k, scale)
    router_one_hopper.route(*given, _meetings(x.device), ids, weights, (rows, scales), 0, plan)
    return ids, weights, rows, scales


def _launch(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, k: int, scale: float, tile_rows: int
) -> tuple[torch.Tensor, torch.Tensor, Tiles | None]:
    tokens, width = x.shape
    experts = gate.shape[0]
    ids = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=x.device)
    count, size = tokens * k, triton.next_power_of_2(experts)
    tiles, routed = None, 0
    if tile_rows:
        routed = min(count, count // tile_rows + min(experts, count))
        whole = routed + triton.cdiv(tokens, tile_rows)
        slots = torch.empty(whole * tile_rows, dtype=torch.int32, device=x.device)
        bands = torch.empty(tokens, 2, width, dtype=torch.uint8, device=x.device)
        scales = torch.empty(tokens, width // 32, dtype=torch.float32, device=x.device)
        tiles = Tiles(slots, slots.new_empty(whole), tile_rows, bands, scales)
    outputs = (
        (
            tiles.bands.view(torch.int32),
            tiles.scales,
            tiles.slots,
            tiles.owners,
            tiles.slots.new_empty(max(16, size)),
            torch.empty_like(ids),
        )
        if tiles
        else (x, x, ids, ids, ids, ids)
    )
    on_hopper = x.is_cuda and hopper(x.device.index or 0)
    if tokens == 1 and on_hopper and bias.dim() == 1 and k <= 32 and (k + 1) * tile_rows <= 1024:
        from cedar.kernels import router_one_hopper

        plan = router_one_hopper.cut(experts, width)
        if plan is not None:
            places = None if tiles is None else (tiles.bands, tiles.scales, tiles.slots, tiles.owners)
            given = (x.contiguous(), gate.contiguous(), bias.contiguous(), k, scale)
            router_one_hopper.route(*given, _meetings(x.device), ids, weights, places, tile_rows, plan)
            return ids, weights, tiles
    if tokens:
        together = 16 if tokens <= 16 else 64
        groups = triton.cdiv(tokens, together)
        block = min(64, max(16, size))
        lanes = triton.cdiv(experts, block)
        deep = 128
        room = min(132, multiprocessors(x.device.index or 0)) if x.is_cuda else 132  # all must run at once
        splits = max(1, min(20, triton.cdiv(width, 2 * deep), room // (groups * lanes)))
        programs = lanes * splits
        selects = together if programs == 1 else triton.next_power_of_2(triton.cdiv(together, programs))
        part = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
        _route[(programs, groups)](
            x.contiguous(), gate.contiguous(), bias.contiguous(), part, _meetings(x.device),
            counters(x.device), ids, weights, *outputs, tokens, width, experts,
            experts if bias.dim() == 2 else 0, k, scale, routed, COUNTERS - 1, together, block, deep,
            lanes, splits, triton.next_power_of_2(splits),
            block if programs == 1 else size, selects, max(8, together // 4),
            tile_rows, max(16, triton.next_power_of_2(count)), groups == 1 and tokens <= selects,
            tile_rows > 0 and tokens == 1 and (k + 1) * tile_rows <= 1024, on_hopper,
            num_warps=4 if together == 16 else 8, **({"launch_pdl": True} if on_hopper else {}),
        )  # fmt: skip
    return ids, weights, tiles
