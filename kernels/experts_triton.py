# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts on MXFP4 weights: sort slots by expert, gate-up-SwiGLU, down, sum in the order of ids
(spec §3).

A slot is one choice of one token: token·k + choice. Slots of one expert are laid out in tiles of T, so that
every weight byte is read once per tile. On Hopper `experts_one_hopper` does the products of a few tokens,
`experts_fp8_hopper` while tiles of eight suffice, `experts_hopper` beyond; elsewhere `packed_rows` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import hopper, packed_rows, permuted
from cedar.kernels.packed_triton import bf16_round, to_bf16
from cedar.kernels.prepared import Prepared, empty_codes
from cedar.kernels.prepared_triton import store_codes
from triton.language.extra.cuda import gdc_wait

SORTED_BY_ONE = 4096  # slots that one program sorts; more are sorted by a program for every BLOCK
UNSORTED = 16  # tokens whose slots are tiles of their own on Hopper
EIGHT = 10  # slots an expert, on average, up to which tiles have eight there
MANY = 80  # slots of a tile beyond
BLOCK = 256


@triton.jit
def chosen_expert(id, experts):
    """The id in [0, experts), int32: one outside, which `route` never gives, stays within the weights."""
    return tl.minimum(tl.maximum(id, 0), experts - 1).to(tl.int32)


@triton.jit
def _align(
    ids_ptr, slots_ptr, experts_ptr, places_ptr, cursor_ptr, count, tiles, experts,
    E: tl.constexpr, P: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: slots by expert in tiles of T."""
    pair = tl.arange(0, P)
    expert = chosen_expert(tl.load(ids_ptr + pair, mask=pair < count, other=0), experts)
    counts = tl.histogram(expert, E, mask=pair < count)
    needed = (counts + T - 1) // T
    start = tl.cumsum(needed, axis=0) - needed
    every = tl.arange(0, E)
    tl.store(cursor_ptr + every, start * T)
    for begin in range(0, tiles * T, TILES):
        fill = begin + tl.arange(0, TILES)
        tl.store(slots_ptr + fill, -1, mask=fill < tiles * T)
        tl.store(experts_ptr + fill, -1, mask=fill < tiles)
    tl.debug_barrier()
    for i in range(tl.max(needed, axis=0)):
        tl.store(experts_ptr + start + i, every, mask=i < needed)
    at = tl.atomic_add(cursor_ptr + expert, 1, mask=pair < count)
    tl.store(slots_ptr + at, pair, mask=pair < count)
    tl.store(places_ptr + pair, at, mask=pair < count)


@triton.jit
def _count(ids_ptr, counts_ptr, count, experts, E: tl.constexpr, B: tl.constexpr):
    """Grid (ceil(count / B)): how many of B slots chose each expert, a row [E] a program."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    expert = chosen_expert(tl.load(ids_ptr + at, mask=at < count, other=0), experts)
    row = counts_ptr + tl.program_id(0) * E + tl.arange(0, E)
    tl.store(row, tl.histogram(expert, E, mask=at < count))


@triton.jit
def _place(
    ids_ptr, counts_ptr, cursor_ptr, slots_ptr, owners_ptr, places_ptr, count, tiles, experts,
    T: tl.constexpr, P: tl.constexpr, E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The same grid: B slots to their places, expert by expert in their order, and an equal share of the
    tiles: whose they are, and -1 where they have no slot. cursor [programs, E]; P: T to a power of two.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    every = tl.arange(0, E)
    total = tl.zeros([E], tl.int32)
    before = tl.zeros([E], tl.int32)
    for start in range(0, programs, 16):
        row = start + tl.arange(0, 16)
        counts = tl.load(
            counts_ptr + row[:, None] * E + every[None, :], mask=(row < programs)[:, None], other=0
        )
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((row < program)[:, None], counts, 0), axis=0)
    needed = (total + T - 1) // T
    end = tl.cumsum(needed, axis=0)
    first = (end - needed) * T
    cursor = cursor_ptr + program * E
    tl.store(cursor + every, first + before)
    tl.debug_barrier()
    at = program * B + tl.arange(0, B)
    expert = chosen_expert(tl.load(ids_ptr + at, mask=at < count, other=0), experts)
    rank = tl.zeros([B], tl.int32)
    for start in range(program * B, (program + 1) * B, 32):
        other = start + tl.arange(0, 32)
        theirs = chosen_expert(tl.load(ids_ptr + other, mask=other < count, other=0), experts)
        ahead = (theirs[None, :] == expert[:, None]) & (other[None, :] < at[:, None])
        rank += tl.sum(ahead.to(tl.int32), axis=1)
    found = tl.load(cursor + expert) + rank
    tl.store(slots_ptr + found, at, mask=at < count)
    tl.store(places_ptr + at, found, mask=at < count)
    each = (tiles + programs - 1) // programs
    stop = tl.minimum((program + 1) * each, tiles)
    for start in range(program * each, stop, 4):
        tile = start + tl.arange(0, 4)
        owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        tl.store(owners_ptr + tile, tl.where(owner < experts, owner, -1), mask=tile < stop)
        mine = every[None, :] == owner[:, None]
        have = tl.sum(tl.where(mine, (first + total)[None, :], 0), axis=1)  # 0 beyond the last expert's tiles
        place = tile[:, None] * T + tl.arange(0, P)[None, :]
        empty = (place >= have[:, None]) & (tl.arange(0, P) < T)[None, :] & (tile < stop)[:, None]
        tl.store(slots_ptr + place, -1, mask=empty)


def _tiles_of(
    ids: torch.Tensor, experts: int, together: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """(slots int32 [tiles·T], expert of each tile int32 [tiles], tiles), -1 where there is none; and each
    slot's place int32 [N·k].
    """
    count = ids.numel()
    tiles = min(count, count // together + min(experts, count))
    slots = torch.empty(tiles * together, dtype=torch.int32, device=ids.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    places = torch.empty(count, dtype=torch.int32, device=ids.device)
    if count <= SORTED_BY_ONE:
        size = triton.next_power_of_2(experts)
        cursor = torch.empty(size, dtype=torch.int32, device=ids.device)
        _align[(1,)](
            ids,
            slots,
            owners,
            places,
            cursor,
            count,
            tiles,
            experts,
            size,
            max(16, triton.next_power_of_2(count)),
            together,
            1024,
            num_warps=8,
        )
        return (slots, owners, tiles), places
    size = triton.next_power_of_2(experts)
    programs = triton.cdiv(count, BLOCK)
    counts, cursor = torch.empty(2, programs, size, dtype=torch.int32, device=ids.device)
    wide = triton.next_power_of_2(together)
    _count[(programs,)](ids, counts, count, experts, size, BLOCK)
    _place[(programs,)](
        ids, counts, cursor, slots, owners, places, count, tiles, experts, together, wide, size, BLOCK,
        num_warps=8,
    )  # fmt: skip
    return (slots, owners, tiles), places


@triton.jit
def _swiglu(
    gate_ptr, up_ptr, weight_ptr, out_ptr, scale_ptr, columns, gate_stride, up_stride, limit,
    WEIGHTED: tl.constexpr, CODES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(columns / B)). CODES: out is E4M3 bytes, quantised, with scales."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=at < columns, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=at < columns, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    out = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
    if WEIGHTED:
        out = out * tl.load(weight_ptr + row)
    if CODES:
        at_scale = scale_ptr + row * (columns // 32)
        store_codes(out_ptr + row * columns, at_scale, bf16_round(out), at, at < columns, B)
    else:
        tl.store(out_ptr + row * columns + at, to_bf16(out), mask=at < columns)


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """bf16 [..., I]: silu(min(gate, limit))·clamp(up, ±limit), times weight of each row if given."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch_swiglu(gate, up, limit, weight, out, None)
    return out


def swiglu_codes(gate: torch.Tensor, up: torch.Tensor, limit: float) -> Prepared:
    """The same [N, I], I a multiple of 32, quantised."""
    out = empty_codes(gate)
    _launch_swiglu(gate, up, limit, None, out.values.view(torch.uint8), out.scale)
    return out


def _launch_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    limit: float,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    columns = gate.shape[-1]
    rows = out.numel() // max(1, columns)
    if not rows:
        return
    block = min(1024, max(32, triton.next_power_of_2(columns)))
    if not (gate.dim() == up.dim() == 2 and gate.stride(1) == up.stride(1) == 1):  # halves of a wider row
        gate, up = gate.reshape(rows, columns).contiguous(), up.reshape(rows, columns).contiguous()
    # An ordinary launch, which begins when all before it have ended: those after it read early what is older.
    _swiglu[(rows, triton.cdiv(columns, block))](
        gate, up, weight if weight is not None else gate, out, out if scale is None else scale, columns,
        gate.stride(0), up.stride(0), limit, weight is not None, scale is not None, block,
    )  # fmt: skip


@triton.jit
def _sum(
    y_ptr, shared_ptr, out_ptr, columns,
    K: tl.constexpr, SHARED: tl.constexpr, B: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, ceil(columns / B)): fp32 sum of a token's K rows in order, and `shared` after them.

    WAIT: launched beside the kernel that writes the rows (`launch_pdl`), so it waits for that one's end.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    if WAIT:
        gdc_wait()
    total = tl.zeros([B], tl.float32)
    for i in tl.static_range(K):
        total += tl.load(y_ptr + (row * K + i) * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        total = to_bf16(total)
    tl.store(out_ptr + row * columns + at, total, mask=at < columns)


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    limit: float,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [N, d]; packed holds (payload, scale) of w1, w3, w2. Every id must name an expert.

    With shared bf16 [N, d]: the sum and it, rounded to bf16.
    """
    tokens, k = ids.shape
    width = x.shape[1]
    (w1, s1), (w3, s3), (w2, s2) = packed
    experts, inner = w1.shape[:2]
    ids, weights = ids.contiguous(), weights.contiguous()
    shared = shared.contiguous() if shared is not None else None
    slots_count = tokens * k
    share = slots_count / experts
    fast = x.is_cuda and width % 256 == 0 and inner % 128 == 0 and hopper(x.device.index or 0)
    if fast and tokens <= UNSORTED and inner % 256 == 0:
        from cedar.kernels import experts_one_hopper

        y = experts_one_hopper.experts(x.contiguous(), ids, weights, packed, limit)
    elif fast and share <= EIGHT:
        from cedar.kernels import experts_fp8_hopper

        tiles, _ = _tiles_of(ids, experts, 8)
        y = experts_fp8_hopper.experts(x.contiguous(), tiles, weights, packed, k, limit)
    elif fast:
        from cedar.kernels import experts_hopper

        together = slots_of(share)
        tiles, places = _tiles_of(ids, experts, together)
        seen = experts_hopper.quantised(x.contiguous(), places, tiles[2] * together)
        y = experts_hopper.experts(seen, tiles, weights, packed, limit)
    else:
        (slots, owners, count), _ = _tiles_of(ids, experts, 16)
        y = torch.empty(slots_count, width, dtype=torch.bfloat16, device=x.device)
        gate, up = (torch.empty(slots_count, inner, dtype=torch.bfloat16, device=x.device) for _ in range(2))
        seen = permuted(x)
        for weight, scale, out in ((w1, s1, gate), (w3, s3, up)):
            packed_rows[(triton.cdiv(inner, 32), count)](
                seen, slots, owners, weight, scale, out, width, inner, scale.shape[2], k, True, 16, 32, 64
            )
        hidden = permuted(swiglu(gate, up, limit, weights.flatten()))
        packed_rows[(triton.cdiv(width, 32), count)](
            hidden, slots, owners, w2, s2, y, inner, width, s2.shape[2], 1, True, 16, 32, 64
        )
    return summed(y, k, shared, fast)


def slots_of(share: float) -> int:
    """Slots of a tile on Hopper for so many an expert on average: 8 are `experts_fp8_hopper`'s."""
    return 8 if share <= EIGHT else MANY


def summed(y: torch.Tensor, k: int, shared: torch.Tensor | None, overlaps: bool) -> torch.Tensor:
    """fp32 [N, d]: the sums of k rows each of y bf16 [N·k, d]; with shared bf16 [N, d], that added and
    rounded to bf16. `overlaps`: launched beside the kernel before it.
    """
    tokens, width = y.shape[0] // k, y.shape[1]
    kind = torch.float32 if shared is None else torch.bfloat16
    total = torch.empty(tokens, width, dtype=kind, device=y.device)
    block = min(256 if tokens <= UNSORTED else 1024, triton.next_power_of_2(width))
    _sum[(tokens, triton.cdiv(width, block))](
        y, y if shared is None else shared, total, width, k, shared is not None, block, overlaps,
        num_warps=max(1, block // 256), **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
    return total
