# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts on MXFP4 weights: sort slots by expert, gate-up-SwiGLU, down, sum in the order of ids
(spec §3).

A slot is one choice of one token: token·k + choice. Slots of one expert are laid out in tiles of T, so
that every weight byte is
read once per tile. `experts_hopper` does the products on Hopper; elsewhere `linear_triton.packed_rows` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import FOR_FP4, WIDE, hopper, packed_rows, permuted
from cedar.kernels.packed_triton import to_bf16

SORTED_BY_ONE = 4096  # slots that one program sorts; more are sorted by torch


@triton.jit
def _align(
    ids_ptr, slots_ptr, experts_ptr, cursor_ptr, count, tiles,
    E: tl.constexpr, P: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: slots by expert in tiles of T."""
    pair = tl.arange(0, P)
    expert = tl.load(ids_ptr + pair, mask=pair < count, other=0).to(tl.int32)
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


def _tiles_of(ids: torch.Tensor, experts: int, together: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(slots int32 [tiles·T], expert of each tile int32 [tiles], tiles): -1 where there is none."""
    count = ids.numel()
    tiles = min(count, count // together + min(experts, count))
    slots = torch.empty(tiles * together, dtype=torch.int32, device=ids.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    if count <= SORTED_BY_ONE:
        size = triton.next_power_of_2(experts)
        cursor = torch.empty(size, dtype=torch.int32, device=ids.device)
        _align[(1,)](
            ids,
            slots,
            owners,
            cursor,
            count,
            tiles,
            size,
            max(16, triton.next_power_of_2(count)),
            together,
            1024,
            num_warps=8,
        )
        return slots, owners, tiles
    flat = ids.flatten().to(torch.int64)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    needed = (counts + together - 1) // together
    first = needed.cumsum(0) - needed
    chosen = flat[order]
    rank = torch.arange(count, device=ids.device) - (counts.cumsum(0) - counts)[chosen]
    slots.fill_(-1)
    slots[first[chosen] * together + rank] = order.to(torch.int32)
    place = torch.arange(tiles, device=ids.device)
    owner = torch.searchsorted(needed.cumsum(0), place, right=True)
    owners.copy_(torch.where(owner < experts, owner, -1))
    return slots, owners, tiles


@triton.jit
def _swiglu(gate_ptr, up_ptr, weight_ptr, out_ptr, columns, limit, WEIGHTED: tl.constexpr, B: tl.constexpr):
    """Grid (rows, ceil(columns / B))."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    gate = tl.load(gate_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    out = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
    if WEIGHTED:
        out = out * tl.load(weight_ptr + row)
    tl.store(out_ptr + row * columns + at, to_bf16(out), mask=at < columns)


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """bf16 [..., I]: silu(min(gate, limit))·clamp(up, ±limit), times weight of each row if given."""
    columns = gate.shape[-1]
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    rows = out.numel() // max(1, columns)
    if rows:
        block = min(1024, triton.next_power_of_2(columns))
        _swiglu[(rows, triton.cdiv(columns, block))](
            gate.contiguous(), up.contiguous(), weight if weight is not None else gate, out, columns, limit,
            weight is not None, block,
        )  # fmt: skip
    return out


@triton.jit
def _sum(y_ptr, out_ptr, columns, k, B: tl.constexpr):
    """Grid (tokens, ceil(columns / B)): fp32 sum of a token's k rows, first to last."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for i in range(k):
        total += tl.load(y_ptr + (row * k + i) * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + at, total, mask=at < columns)


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    limit: float,
) -> torch.Tensor:
    """fp32 [N, d]; packed holds (payload, scale) of w1, w3, w2. Every id must name an expert."""
    tokens, k = ids.shape
    width = x.shape[1]
    (w1, s1), (w3, s3), (w2, s2) = packed
    experts, inner = w1.shape[:2]
    ids, weights = ids.contiguous(), weights.contiguous()
    slots_count = tokens * k
    share = slots_count / experts
    fast = x.is_cuda and width % 128 == 0 and inner % 128 == 0 and hopper(x.device.index or 0)
    together = 16 if not fast else 8 if share <= 4 else 16 if share <= 12 else 64
    slots, owners, tiles = _tiles_of(ids, experts, together)
    y = torch.empty(slots_count, width, dtype=torch.bfloat16, device=x.device)
    if fast and together == 64:
        from cedar.kernels.experts_hopper import expert_hidden_wide, expert_output_wide

        hidden = torch.empty(slots_count, inner, dtype=torch.bfloat16, device=x.device)
        expert_hidden_wide[(inner // 64, tiles)](
            permuted(x, FOR_FP4 + WIDE),
            slots,
            owners,
            weights,
            w1,
            s1,
            w3,
            s3,
            hidden,
            inner,
            k,
            limit,
            width,
            num_warps=4,
        )
        expert_output_wide[(width // 64, tiles)](hidden, slots, owners, w2, s2, y, width, inner, num_warps=4)
    elif fast:
        from cedar.kernels.experts_hopper import expert_hidden, expert_output

        hidden = torch.empty(slots_count, inner, dtype=torch.bfloat16, device=x.device)
        expert_hidden[(inner // 64, tiles)](
            permuted(x, FOR_FP4),
            slots,
            owners,
            weights,
            w1,
            s1,
            w3,
            s3,
            hidden,
            inner,
            k,
            limit,
            width,
            together,
            num_warps=4,
        )
        expert_output[(width // 64, tiles)](
            hidden, slots, owners, w2, s2, y, width, inner, together, num_warps=4
        )
    else:
        gate, up = (torch.empty(slots_count, inner, dtype=torch.bfloat16, device=x.device) for _ in range(2))
        seen = permuted(x)
        for weight, scale, out in ((w1, s1, gate), (w3, s3, up)):
            packed_rows[(triton.cdiv(inner, 32), tiles)](
                seen,
                slots,
                owners,
                weight,
                scale,
                out,
                width,
                inner,
                scale.shape[2],
                k,
                True,
                together,
                32,
                64,
            )
        hidden = permuted(swiglu(gate, up, limit, weights.flatten()))
        packed_rows[(triton.cdiv(width, 32), tiles)](
            hidden, slots, owners, w2, s2, y, inner, width, s2.shape[2], 1, True, together, 32, 64
        )
    total = torch.empty(tokens, width, dtype=torch.float32, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _sum[(tokens, triton.cdiv(width, block))](y, total, width, k, block)
    return total
