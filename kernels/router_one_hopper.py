# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The router of one token on Hopper, one launch (spec §3).

A program has whole rows of the gate, in registers before it waits for the launch before it, so a logit is one
sum. The programs meet, and the first one selects: every warp holds all logits, so no step of the selection
waits for another warp. Others write the activations quantised, as the experts read them, meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from cedar.kernels.bands_hopper import bands, code_of, scale_of, to_bytes
from cedar.kernels.experts_one_hopper import store_columns
from cedar.kernels.grid_hopper import arrive, grid_release, grid_wait, wait_for
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MEETING = gl.constexpr(256)  # what a launch adds to its counter
WARPS = 4
HELD = 256  # values of the gate a thread, two a register
_GROUPS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # [8 groups, 32 channels]
_SLOTS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.constexpr_function
def rows_layout(rows, values, alone):
    """[rows, channels]: a thread has `values` neighbouring channels; warps have rows of their own if one
    program has them all, else channels.
    """
    if alone:
        return gl.BlockedLayout([rows // 4, values], [1, 32], [4, 1], [1, 0])
    return gl.BlockedLayout([rows, values], [1, 32], [1, 4], [1, 0])


@gluon.constexpr_function
def every_warp(size):
    """[size], at least 32: over the lanes of each warp."""
    more = [[32 << i] for i in range(size.bit_length() - 6)]
    return gl.DistributedLinearLayout(more, [[1 << i] for i in range(5)], [[0], [0]], [], [size])


@gluon.jit
def _scored(x, bias, inside):
    """Scores of logits x, and keys that order as score and bias do; the least key where not `inside`."""
    softplus = gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))
    softplus = gl.where(x < -10.0, gl.exp(x), softplus)  # log(1 + e^x) loses e^x there
    s = gl.sqrt(softplus)
    word = (s + bias + 0.0).to(gl.int32, bitcast=True)
    return s, gl.where(inside, word ^ ((word >> 31) & 0x7FFFFFFF), -0x80000000)


@gluon.jit
def _select(
    s, key, experts, ids_ptr, weights_ptr, owners_ptr, k, scale, E: gl.constexpr, OWN: gl.constexpr
):  # fmt: skip
    """The k best of keys [E], ids ascending, with their scores s; a tie goes to the lower number.

    Lane i has the i-th choice. Turns are a loop, whose code is fetched once: it is cold whenever it runs.
    """
    number = gl.arange(0, E, layout=key.type.layout)
    lane = gl.arange(0, 32, layout=every_warp(32))
    bits = s.to(gl.int32, bitcast=True)
    chosen = gl.full([32], 0x7FFFFFFF, gl.int32, lane.type.layout)
    mine = gl.full([32], 0, gl.int32, lane.type.layout)
    place = mine  # how many of the chosen have lower numbers
    for i in range(k):
        best = gl.max(key, axis=0)
        first = gl.min(gl.where((key == best) & (number < experts), number, E), axis=0)
        score = gl.sum(gl.where(number == first, bits, 0), axis=0)  # one of them is not 0
        key = gl.where(number == first, -0x80000000, key)
        lower = gl.sum((chosen < first).to(gl.int32), axis=0)
        place = gl.where(lane == i, lower, place + (chosen > first).to(gl.int32))
        mine = gl.where(lane == i, score, mine)
        chosen = gl.where(lane == i, first, chosen)
    weight = mine.to(gl.float32, bitcast=True)
    weight = weight / (gl.sum(weight, axis=0) + 1e-20) * scale
    there = lane < k
    gl.store(ids_ptr + place, chosen, mask=there)
    gl.store(weights_ptr + place, weight, mask=there)
    if OWN:
        gl.store(owners_ptr + place, chosen, mask=there)


@gluon.jit
def _quantise(x_ptr, bands_ptr, powers_ptr, block, width, COLUMNS: gl.constexpr):
    """256 channels as `experts_one_hopper.quantise_columns` writes them, or `bands_hopper.quantise`."""
    g = block * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, _GROUPS))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, _GROUPS))
    at = g[:, None] * 32 + c[None, :]
    x = gl.load(x_ptr + at, mask=at < width, other=0.0).to(gl.float32)
    code = code_of(gl.max(gl.abs(x), axis=1))
    q = to_bytes(x, code[:, None])
    if COLUMNS:
        store_columns(bands_ptr, q, g)
    else:
        q = gl.reshape(gl.permute(gl.reshape(q, [8, 16, 2]), (0, 2, 1)), [8, 32])
        coarse, fine = bands(gl.convert_layout(q, _GROUPS))
        gl.store(bands_ptr + at, coarse, mask=at < width)
        gl.store(bands_ptr + width + at, fine, mask=at < width)
    gl.store(powers_ptr + g, scale_of(code), mask=g < width // 32)


@gluon.jit(do_not_specialize=["k"])
def route_one(
    x_ptr, gate_ptr, bias_ptr, part_ptr, meet_ptr, ids_ptr, weights_ptr, bands_ptr, powers_ptr, slots_ptr,
    owners_ptr, width, experts, k, scale,
    R: gl.constexpr, V: gl.constexpr, CHUNKS: gl.constexpr, PROGRAMS: gl.constexpr, E: gl.constexpr,
    TILE: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS, and with TILE one for every 256 channels): R rows of the gate a program, their channels
    in CHUNKS, V a thread. E: experts, a power of two, R if there is one program. TILE, 0 for none: slots of a
    tile, one choice in each tile and the shared expert in the last. COLUMNS, with TILE 0: for
    `experts_token_hopper`, which needs no tiles.
    """
    QUANTISES: gl.constexpr = TILE > 0 or COLUMNS
    L: gl.constexpr = rows_layout(R, V, PROGRAMS == 1)
    C: gl.constexpr = (32 if PROGRAMS == 1 else 128) * V
    ALL: gl.constexpr = every_warp(E)
    program = gl.program_id(0)
    if program < PROGRAMS:
        expert = program * R + gl.arange(0, R, layout=gl.SliceLayout(1, L))
        channel = gl.arange(0, C, layout=gl.SliceLayout(0, L))
        gates = ()
        for i in gl.static_range(CHUNKS):
            at = i * C + channel
            row = gate_ptr + expert[:, None] * width + at[None, :]
            mask = (expert < experts)[:, None] & (at < width)[None, :]
            gates += (gl.load(row, mask=mask, other=0.0),)  # type: ignore[assignment]
        grid_wait()
        grid_release()
        own: gl.constexpr = ALL if PROGRAMS == 1 else gl.SliceLayout(1, L)
        number = program * R + gl.arange(0, R, layout=own)
        bias = gl.load(bias_ptr + number, mask=number < experts, other=0.0)
        goal = (gl.load(meet_ptr, volatile=True) & -MEETING) + MEETING
        xs = ()
        for i in gl.static_range(CHUNKS):
            at = i * C + channel
            xs += (gl.load(x_ptr + at, mask=at < width, other=0.0),)  # type: ignore[assignment]
        acc = gl.full([R, C], 0.0, gl.float32, L)
        for i in gl.static_range(CHUNKS):
            acc += gates[i].to(gl.float32) * xs[i].to(gl.float32)[None, :]
        s, key = _scored(gl.convert_layout(gl.sum(acc, axis=1), own), bias, number < experts)
        if PROGRAMS == 1:
            _select(s, key, experts, ids_ptr, weights_ptr, owners_ptr, k, scale, E, TILE > 0)
        else:
            keys_ptr = (part_ptr + E).to(gl.pointer_type(gl.int32), bitcast=True)
            gl.store(part_ptr + number, s, mask=number < experts)
            gl.store(keys_ptr + number, key, mask=number < experts)
            arrive(meet_ptr, gl.where(program == 0, MEETING + 1 - PROGRAMS, 1))
            if program == 0:
                each = gl.arange(0, E, layout=ALL)
                wait_for(meet_ptr, goal)
                scores = gl.load(part_ptr + each, mask=each < experts, other=0.0, cache_modifier=".cg")
                keys = gl.load(keys_ptr + each, mask=each < experts, other=-0x80000000, cache_modifier=".cg")
                _select(scores, keys, experts, ids_ptr, weights_ptr, owners_ptr, k, scale, E, TILE > 0)
    else:
        if QUANTISES:
            grid_wait()
            grid_release()
            block = program - PROGRAMS
            _quantise(x_ptr, bands_ptr, powers_ptr, block, width, COLUMNS)
            if TILE > 0 and block == 0:
                slot = gl.arange(0, 1024, layout=_SLOTS)
                one = gl.where(slot % TILE == 0, slot // TILE, -1)
                gl.store(slots_ptr + slot, one, mask=slot < (k + 1) * TILE)
                gl.store(owners_ptr + slot, experts + 0 * slot, mask=slot == k)


class Cut(NamedTuple):
    """Rows of the gate a program, channels a thread and chunk, chunks, programs."""

    rows: int
    values: int
    chunks: int
    programs: int


def cut(experts: int, width: int) -> Cut | None:
    """One program if that can hold the gate, else a few rows each; None where that would be too many."""
    size = max(32, triton.next_power_of_2(experts))
    chunks = triton.cdiv(width, 256)
    if size // 4 * 8 * chunks <= HELD // 2 and width % 8 == 0:
        return Cut(size, 8, chunks, 1)
    chunks, programs = triton.cdiv(width, 1024), triton.cdiv(experts, 4)
    return Cut(4, 8, chunks, programs) if 32 * chunks <= HELD and programs <= 128 and width % 8 == 0 else None


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scale: float,
    meet: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    quantised: tuple[torch.Tensor, ...] | None,
    tile_rows: int,
    plan: Cut,
) -> None:
    """Fills ids int32 [1, k] and weights fp32 [1, k] of x bf16 [1, d]. meet: a counter to which calls add
    MEETING.

    quantised: None; (bands, their scales, slots, owners) of `router_triton.Tiles`, for tiles of `tile_rows`;
    or with tile_rows 0 (rows, their scales) for `experts_token_hopper`.
    """
    width, experts = x.shape[1], gate.shape[0]
    rows, values, chunks, programs = plan
    outputs = (*(quantised or (ids, weights)), ids, ids)[:4]
    size = max(32, triton.next_power_of_2(experts))
    part = torch.empty(2, size, dtype=torch.float32, device=x.device)
    route_one[(programs + (triton.cdiv(width, 256) if quantised is not None else 0),)](
        x, gate, bias, part, meet, ids, weights, *outputs, width, experts, k, scale, rows, values, chunks,
        programs, size, tile_rows, quantised is not None and not tile_rows, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
