# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The router on a GPU, one launch: programs share out experts and channels; the last one of a tile of
tokens to finish adds the parts in order, scores, selects and normalises (spec §3). Many tokens take two
launches: a library product, then the selection.

It has the activations in hand that the experts read next, so it writes them quantised in the orders of
their weights, and the last program of all sorts the choices into tiles of one expert each.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from cedar.kernels.experts_triton import _align
from cedar.kernels.linear_triton import linear_bf16
from cedar.kernels.packed_triton import INTERPRETED, fp8_round_trip, to_bf16
from cedar.kernels.prepared_triton import place_of

COUNTERS = 65_536
MANY = 1024  # tokens beyond which a library product and a launch for the selection are faster


@triton.jit
def _select(
    part_ptr, bias_ptr, ids_ptr, weights_ptr, token, tokens, experts, bias_stride, k, scale,
    E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The k best of each token int64 [R], ids ascending, of logits that are PARTS sums [PARTS, tokens,
    experts].
    """
    expert = tl.arange(0, E)
    mine = (token < tokens)[:, None]
    inside = mine & (expert < experts)[None, :]
    cell = token[:, None] * experts + expert[None, :]
    x = tl.load(part_ptr + cell, mask=inside, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, PARTS):  # unrolled, so that the loads wait together
        x += tl.load(part_ptr + i * tokens * experts + cell, mask=inside, other=0.0, cache_modifier=".cg")
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    softplus = tl.where(x < -10.0, tl.exp(x), softplus)  # log(1 + e^x) loses e^x there
    s = tl.sqrt(softplus)
    bias = tl.load(bias_ptr + token[:, None] * bias_stride + expert[None, :], mask=inside, other=0.0)
    word = (s + bias + 0.0).to(tl.int32, bitcast=True)
    order = (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.int64)
    order = (order << 32) | (0x7FFFFFFF - expert).to(tl.int64)[None, :]
    none = tl.full(order.shape, -0x7FFFFFFFFFFFFFFF, tl.int64)
    order = tl.where(inside, order, none)
    taken = tl.zeros(order.shape, tl.int32)
    for _ in range(k):
        best = tl.max(order, axis=1)[:, None]
        chosen = (order == best) & inside
        taken = tl.where(chosen, 1, taken)
        order = tl.where(chosen, none, order)
    total = tl.sum(tl.where(taken > 0, s, 0.0), axis=1) + 1e-20
    place = token[:, None] * k + tl.cumsum(taken, axis=1) - 1
    tl.store(ids_ptr + place, tl.broadcast_to(expert[None, :], taken.shape), mask=taken > 0)
    tl.store(weights_ptr + place, s / total[:, None] * scale, mask=taken > 0)


@triton.jit(do_not_specialize=["tokens", "bias_stride", "tiles", "k"])
def _route(
    x_ptr, gate_ptr, bias_ptr, part_ptr, count_ptr, ids_ptr, weights_ptr, x4_ptr, x8_ptr, slots_ptr,
    owners_ptr,
    cursor_ptr, tokens, width, experts, bias_stride, k, scale, tiles, done,
    T: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, E: tl.constexpr, R:
    tl.constexpr,
    TILE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(tokens / T), ceil(experts / BE), SPLITS). TILE, 0 for none: slots of a tile of one
    expert.
    """
    token = tl.program_id(0) * T + tl.arange(0, T)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    mine = (token < tokens)[:, None]
    known = (expert < experts)[:, None]
    each = tl.cdiv(tl.cdiv(width, BK), SPLITS)
    acc = tl.zeros([T, BE], tl.float32)
    for i in range(each):
        at = (tl.program_id(2) * each + i) * BK + tl.arange(0, BK)
        inside = (at < width)[None, :]
        x = tl.load(x_ptr + token[:, None].to(tl.int64) * width + at[None, :], mask=mine & inside, other=0.0)
        if TILE > 0:  # noqa: SIM102  (the one is known when this is compiled, the other is not)
            if tl.program_id(1) == 0:
                seen = to_bf16(fp8_round_trip(x.to(tl.float32), BK // 32))
                row = token[:, None].to(tl.int64) * width
                tl.store(x4_ptr + row + place_of(at, 2)[None, :], seen, mask=mine & inside)
                tl.store(x8_ptr + row + place_of(at, 1)[None, :], seen, mask=mine & inside)
        gate = tl.load(gate_ptr + expert[:, None] * width + at[None, :], mask=known & inside, other=0.0)
        if INTERPRETED:
            acc += tl.dot(x.to(tl.float32), tl.trans(gate.to(tl.float32)), input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(gate), acc)
    cell = token[:, None].to(tl.int64) * experts + expert[None, :]
    part = part_ptr + tl.program_id(2).to(tl.int64) * tokens * experts
    tl.store(part + cell, acc, mask=mine & (expert < experts)[None, :])
    tl.debug_barrier()
    programs = tl.num_programs(1) * SPLITS
    if tl.atomic_add(count_ptr + tl.program_id(0), 1, sem="acq_rel") == programs - 1:
        for start in range(0, T, R):
            some = tl.program_id(0).to(tl.int64) * T + start + tl.arange(0, R)
            if tl.min(some, axis=0) < tokens:
                _select(part_ptr, bias_ptr, ids_ptr, weights_ptr, some, tokens, experts, bias_stride, k,
                scale,
                        E, SPLITS)  # fmt: skip
        tl.atomic_xchg(count_ptr + tl.program_id(0), 0)
        if TILE > 0:
            tl.debug_barrier()
            if tl.atomic_add(count_ptr + done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                _align(ids_ptr, slots_ptr, owners_ptr, cursor_ptr, tokens * k, tiles, E, P, TILE, 1024)
                shared = tl.cdiv(tokens, TILE)
                for begin in range(0, shared * TILE, 1024):
                    fill = begin + tl.arange(0, 1024)
                    slot = tl.where(fill < tokens, tokens * k + fill, -1)
                    tl.store(slots_ptr + tiles * TILE + fill, slot, mask=fill < shared * TILE)
                    tl.store(owners_ptr + tiles + fill, experts + 0 * fill, mask=fill < shared)
                tl.atomic_xchg(count_ptr + done, 0)


@triton.jit(do_not_specialize=["tokens", "bias_stride", "k"])
def _choose(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, tokens, experts, bias_stride, k, scale, E: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(tokens / R)): the selection alone, of logits fp32 [tokens, experts]."""
    token = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    _select(logits_ptr, bias_ptr, ids_ptr, weights_ptr, token, tokens, experts, bias_stride, k, scale, E, 1)


class Tiles(NamedTuple):
    """What the experts read after the router: tiles of `rows` slots, each of one expert (-1: no tile; the
    number of experts: the shared one). Slot s < N·k is choice s % k of token s // k, N·k + n the shared
    expert's token n.
    """

    slots: torch.Tensor  # int32 [tiles·rows], -1: none
    owners: torch.Tensor  # int32 [tiles]
    rows: int
    for_fp4: torch.Tensor  # bf16 [N, d], quantised, in the order in which MXFP4 weights meet it
    for_fp8: torch.Tensor  # the same for FP8 weights


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Counters that every call leaves at zero; calls of one device run one after another."""
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
        _choose[(triton.cdiv(tokens, 4),)](
            logits.contiguous(), bias.contiguous(), ids, weights, tokens, experts,
            experts if bias.dim() == 2 else 0, k, scale, triton.next_power_of_2(experts), 4, num_warps=4,
        )  # fmt: skip
    return ids, weights


def route_to_tiles(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, k: int, scale: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor, Tiles]:
    """`route`, with tiles of `rows` slots, for at most 4,096 choices; d a multiple of 128."""
    ids, weights, tiles = _launch(x, gate, bias, k, scale, rows)
    assert tiles is not None
    return ids, weights, tiles


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
        tiles = Tiles(slots, slots.new_empty(whole), tile_rows, torch.empty_like(x), torch.empty_like(x))
    outputs = (
        (*tiles[3:], tiles.slots, tiles.owners, tiles.slots.new_empty(size))
        if tiles
        else (x, x, ids, ids, ids)
    )
    if tokens:
        together = 16 if tokens <= 256 else 64
        programs = triton.cdiv(tokens, together)
        block = min(64, max(16, size))
        lanes = triton.cdiv(experts, block)
        deep = 128
        splits = max(1, min(10, triton.cdiv(width, deep) // 2, 132 // (programs * lanes)))
        part = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
        _route[(programs, lanes, splits)](
            x.contiguous(), gate.contiguous(), bias.contiguous(), part, counters(x.device), ids, weights,
            *outputs,
            tokens, width, experts, experts if bias.dim() == 2 else 0, k, scale, routed, COUNTERS - 1,
            together, block, deep, splits, size, 4 if tokens <= 4 else 16, tile_rows, max(16,
            triton.next_power_of_2(count)),
            num_warps=4 if tokens <= 4 else 8,
        )  # fmt: skip
    return ids, weights, tiles
