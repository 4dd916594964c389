# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What stands between the router's product and the experts' of many tokens on Hopper, in one launch:
selection, tiles of one expert each, and the activations quantised as the experts meet them (spec §3).

The first programs select, a warp a token, and count what each expert got: a choice's place in its expert's
tiles is what it was told when it was counted. They meet, then each knows where every expert's tiles begin and
puts down its own choices. Slots of an expert stand in no order that is the same every time; what comes out of
a slot does not depend on it. Programs after them quantise: for tiles of eight a row a token, in two bands,
which wait for nobody; for others a row a place, when all choices are down.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from cedar.kernels.bands_hopper import bands, code_of, scale_of, to_bytes
from cedar.kernels.codes_hopper import natural
from cedar.kernels.experts_hopper import blocks_each, quantised_blocks, store_blocks
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, wait_for
from cedar.kernels.grouped_output_hopper import TILE16
from cedar.kernels.linear_triton import linear_bf16, multiprocessors
from cedar.kernels.router_rows_hopper import LEAST, chosen_rows, rows_layout
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 4  # tokens, and warps, a program
LOGIT_TOKENS, LOGIT_EXPERTS = 64, 128  # a program of the router's product
FEWEST, MOST = 128, 1024  # tokens for which that is faster than the library's
PIECE = 32  # tokens that a program quantises in two bands, 128 channels of them


class Sorted(NamedTuple):
    """Choices in tiles of one expert each, and what the experts multiply. Slot s is choice s % k of token
    s // k.
    """

    slots: torch.Tensor  # int32 [tiles·T], -1: none
    owners: torch.Tensor  # int32 [tiles], -1: no tile
    weights: torch.Tensor  # fp32 [N, k]
    seen: (
        torch.Tensor
    )  # bf16 [tiles·T, d], rows as `experts_hopper` has them; tiles of eight: uint8 [N, 2, d]
    scales: torch.Tensor | None  # fp32 [N, d / 32], the bands'


@gluon.jit
def _in_bands(x_ptr, seen_ptr, scales_ptr, piece, tokens, x_stride, width, P: gl.constexpr):
    """P tokens' 128 channels, as `bands_hopper.quantise` does."""
    L: gl.constexpr = natural(4, P)
    blocks = width // 128
    i = gl.arange(0, P, layout=gl.SliceLayout(1, L))
    c = piece % blocks * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    t = piece // blocks * P + i
    mine = (t < tokens)[:, None]
    x = gl.load(x_ptr + t.to(gl.int64)[:, None] * x_stride + c[None, :], mask=mine, other=0.0)
    groups = gl.reshape(x.to(gl.float32), [P, 4, 32])
    code = code_of(gl.max(gl.abs(groups), axis=2))
    every = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    q = gl.permute(gl.reshape(to_bytes(groups, every), [P, 4, 16, 2]), (0, 1, 3, 2))
    coarse, fine = bands(gl.convert_layout(gl.reshape(q, [P, 128]), L))
    to = seen_ptr + t.to(gl.int64)[:, None] * (2 * width) + c[None, :]
    gl.store(to, coarse, mask=mine)
    gl.store(to + width, fine, mask=mine)
    C: gl.constexpr = code.type.layout
    t2 = piece // blocks * P + gl.arange(0, P, layout=gl.SliceLayout(1, C))
    g2 = piece % blocks * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, C))
    to2 = scales_ptr + t2[:, None] * (width // 32) + g2[None, :]
    gl.store(to2, scale_of(code), mask=(t2 < tokens)[:, None])


@gluon.jit
def _at_places(
    x_ptr, seen_ptr, places_ptr, cell, goal, piece, tokens, x_stride, width, k, BLOCKS: gl.constexpr
):
    """Eight tokens' 128 BLOCKS channels, as `experts_hopper.quantise` does, to the places of their choices
    once these are known: quantised once and stored k times.
    """
    L: gl.constexpr = natural(4, 8)
    parts = width // (128 * BLOCKS)
    t = piece // parts * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    mine = t < tokens
    c = piece % parts * (128 * BLOCKS) + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    seen = quantised_blocks(x_ptr + t.to(gl.int64)[:, None] * x_stride + c, mine, BLOCKS)
    wait_for(cell, goal)
    barrier()
    store_blocks(seen, seen_ptr + c, places_ptr + t * k, mine, width, k, BLOCKS)


@gluon.jit
def _sum_of(a, b):
    return a + b


@gluon.jit(do_not_specialize=["tokens", "bias_stride", "k", "tiles", "selectors"])
def sorted_rows(
    logits_ptr, bias_ptr, x_ptr, ids_ptr, ranks_ptr, weights_ptr, slots_ptr, owners_ptr, count_ptr, seen_ptr,
    scales_ptr, tokens, experts, bias_stride, x_stride, width, k, scale, tiles, selectors,
    E: gl.constexpr, R: gl.constexpr, PARTS: gl.constexpr, CHOICES: gl.constexpr, T: gl.constexpr,
    P: gl.constexpr, BANDS: gl.constexpr,
):  # fmt: skip
    """Grid (selectors and, with BANDS, ceil(tokens / P) · width / 128, else ceil(tokens / 8) · width / (128
    P)), R = 4; all `selectors` must run at once.

    logits: PARTS of them, fp32 [tokens, experts] each. CHOICES: a power of two from R·k on. count_ptr: E +
    2 zeros, left so.
    """
    L: gl.constexpr = rows_layout(E, R)
    program = gl.program_id(0)
    grid_wait()
    grid_release()
    if program < selectors:
        for first in range(program * R, tokens, selectors * R):
            token = first + gl.arange(0, R, layout=gl.SliceLayout(1, L)).to(gl.int64)
            chosen, number, weight, at = chosen_rows(
                logits_ptr, bias_ptr, token, tokens, experts, bias_stride, k, scale, E, R, PARTS
            )
            rank = gl.atomic_add(count_ptr + number, number * 0 + 1, mask=chosen, sem="relaxed")
            gl.store(ids_ptr + at, number, mask=chosen)
            gl.store(weights_ptr + at, weight, mask=chosen)
            gl.store(ranks_ptr + at, rank, mask=chosen)
        barrier()
        gl.atomic_add(count_ptr + E, 1, sem="release")
        wait_for(count_ptr + E, selectors)
        barrier()
        V: gl.constexpr = gl.BlockedLayout([1], [32], [R], [0])
        every = gl.arange(0, E, layout=V)
        counts = gl.load(count_ptr + every, cache_modifier=".cg")
        needed = (counts + T - 1) // T
        start = gl.associative_scan(needed, 0, _sum_of) - needed
        pair = gl.arange(0, CHOICES, layout=V)
        for first in range(program * R, tokens, selectors * R):
            slot = first * k + pair
            mine = (pair < R * k) & (slot < tokens * k)
            owner = gl.load(ids_ptr + slot, mask=mine, other=0)
            rank = gl.load(ranks_ptr + slot, mask=mine, other=0)
            place = gl.gather(start, owner, 0) * T + rank
            gl.store(slots_ptr + place, slot, mask=mine)
            gl.store(ranks_ptr + slot, place, mask=mine)
        many = gl.arange(0, 128, layout=V)
        for owner in range(program, experts, selectors):
            begin = gl.sum(gl.where(every == owner, start, 0), axis=0)
            count = gl.sum(gl.where(every == owner, counts, 0), axis=0)
            end = begin + (count + T - 1) // T
            for tile in range(begin, end, 128):
                gl.store(owners_ptr + tile + many, owner + many * 0, mask=tile + many < end)
            fill = begin * T + count + many
            gl.store(slots_ptr + fill, many * 0 - 1, mask=fill < end * T)
        for tile in range(gl.sum(needed, axis=0) + program, tiles, selectors):
            gl.store(owners_ptr + tile + many, many * 0 - 1, mask=many < 1)
            gl.store(slots_ptr + tile * T + many, many * 0 - 1, mask=many < T)
    elif BANDS:
        _in_bands(x_ptr, seen_ptr, scales_ptr, program - selectors, tokens, x_stride, width, P)
    else:
        _at_places(
            x_ptr, seen_ptr, ranks_ptr, count_ptr + E + 1, selectors, program - selectors, tokens, x_stride,
            width, k, P,
        )  # fmt: skip
    barrier()
    if (program < selectors) | (not BANDS):  # those that have put down choices, and those that have read it
        last = selectors if BANDS else gl.num_programs(0)
        if gl.atomic_add(count_ptr + E + 1, 1, sem="acq_rel") == last - 1:
            W: gl.constexpr = gl.BlockedLayout([1], [32], [R], [0])
            gl.store(count_ptr + gl.arange(0, E, layout=W), gl.full([E], 0, gl.int32, W))
            gl.atomic_xchg(count_ptr + E, 0, sem="relaxed")
            gl.atomic_xchg(count_ptr + E + 1, 0, sem="relaxed")


@gluon.jit
def logit_parts(
    x_desc, gate_desc, part_ptr, tokens, experts,
    COLUMNS: gl.constexpr, SPLITS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(experts / R), ceil(tokens / M), SPLITS), 4 warps: fp32 [SPLITS, tokens, experts], each of a
    share of the channels.
    """
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    EACH: gl.constexpr = (COLUMNS // 64 + SPLITS - 1) // SPLITS
    expert = gl.program_id(0) * R
    token = gl.program_id(1) * M
    begin = gl.program_id(2) * EACH
    count = gl.minimum(EACH, COLUMNS // 64 - begin)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, 64], TILE16)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, M, 64], TILE16)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), (M + R) * 128, pred=i < count)
        tma.async_copy_global_to_shared(
            gate_desc, [expert, (begin + i) * 64], bars.index(i), g_s.index(i), pred=i < count
        )
    grid_wait()
    grid_release()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_desc, [token, (begin + i) * 64], bars.index(i), x_s.index(i), pred=i < count
        )
    acc = gl.full([M, R], 0.0, gl.float32, W)
    for turn in range(count):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        acc = warpgroup_mma(x_s.index(slot), g_s.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        next = turn + STAGES
        more = next < count
        mbarrier.expect(bars.index(slot), (M + R) * 128, pred=more)
        at = (begin + next) * 64
        tma.async_copy_global_to_shared(gate_desc, [expert, at], bars.index(slot), g_s.index(slot), pred=more)
        tma.async_copy_global_to_shared(x_desc, [token, at], bars.index(slot), x_s.index(slot), pred=more)
    t = token + gl.arange(0, M, layout=gl.SliceLayout(1, W))
    e = expert + gl.arange(0, R, layout=gl.SliceLayout(0, W))
    to = part_ptr + (gl.program_id(2) * tokens + t).to(gl.int64)[:, None] * experts + e[None, :]
    gl.store(to, acc, mask=(t < tokens)[:, None] & (e < experts)[None, :])


def parts_of(tokens: int, experts: int, columns: int) -> int:
    """Shares of the channels with which `logit_parts` fills the chip once; 0: the library is faster."""
    if not FEWEST < tokens <= MOST or columns % 64:
        return 0
    tiles = triton.cdiv(tokens, LOGIT_TOKENS) * triton.cdiv(experts, LOGIT_EXPERTS)
    splits: int = max(1, min(8, 132 // tiles, columns // 256))
    return splits


def logits_of(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The router's product of x bf16 [N, d] and gate bf16 [E, d], fp32 [parts, N, E]: add them up."""
    (tokens, columns), experts = x.shape, gate.shape[0]
    splits = parts_of(tokens, experts, columns)
    if not splits or not gate.is_contiguous():
        return linear_bf16(x, gate, torch.float32).unsqueeze(0)
    x = x.contiguous()
    part = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    logit_parts[(triton.cdiv(experts, LOGIT_EXPERTS), triton.cdiv(tokens, LOGIT_TOKENS), splits)](
        TensorDescriptor(x, [tokens, columns], [columns, 1], [LOGIT_TOKENS, 64], TILE16.value),
        TensorDescriptor(gate, [experts, columns], [columns, 1], [LOGIT_EXPERTS, 64], TILE16.value),
        part, tokens, experts, columns, splits, LOGIT_TOKENS, LOGIT_EXPERTS, 4, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return part


@cache
def _counters(device: torch.device, size: int) -> torch.Tensor:
    """Counters that every call leaves at zero; calls of one device run one after another."""
    return torch.zeros(size + 2, dtype=torch.int32, device=device)


def tiles_at_most(choices: int, experts: int, together: int) -> int:
    """Tiles of `together` slots that so many choices may need."""
    return min(choices, choices // together + min(experts, choices))


def sort_rows(
    x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor, k: int, scale: float, together: int
) -> Sorted:
    """The selection of `router.route` from logits fp32 [parts, N, E] of x bf16 [N, d], in tiles of `together`
    slots (at most 128); d a multiple of 256.
    """
    parts, tokens, experts = logits.shape
    width, device = x.shape[1], x.device
    tiles = tiles_at_most(tokens * k, experts, together)
    size = max(LEAST, triton.next_power_of_2(experts))
    ids, ranks = torch.empty(2, tokens * k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=device)
    slots = torch.empty(tiles * together, dtype=torch.int32, device=device)
    owners = torch.empty(tiles, dtype=torch.int32, device=device)
    eight = together == 8
    if eight:
        seen = torch.empty(tokens, 2, width, dtype=torch.uint8, device=device)
        scales = torch.empty(tokens, width // 32, dtype=torch.float32, device=device)
    else:
        seen, scales = torch.empty(tiles * together, width, dtype=torch.bfloat16, device=device), None
    x = x if x.stride(1) == 1 else x.contiguous()
    selectors = min(triton.cdiv(tokens, ROWS), 2 * multiprocessors(device.index or 0))
    quantising = triton.cdiv(tokens, PIECE) * (width // 128)
    blocks = blocks_each(width)
    if not eight:
        quantising = triton.cdiv(tokens, 8) * (width // (128 * blocks))
    sorted_rows[(selectors + quantising,)](
        logits, bias.contiguous(), x, ids, ranks, weights, slots, owners, _counters(device, size), seen,
        weights if scales is None else scales, tokens, experts, experts if bias.dim() == 2 else 0,
        x.stride(0), width, k, scale, tiles, selectors, size, ROWS, parts,
        max(128, triton.next_power_of_2(ROWS * k)), together, PIECE if eight else blocks, eight,
        num_warps=ROWS, launch_pdl=True,
    )  # fmt: skip
    return Sorted(slots, owners, weights, seen, scales)
