# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The tails of open groups on a GPU, one launch: read, then written, by the same program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots_count"])
def _join(
    kv_ptr, gate_ptr, tails_ptr, slot_ptr, place_ptr, out_kv_ptr, out_gate_ptr, slots_count, slot_stride,
    half_stride,
    place_stride, width, M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(width / B))."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    inside = at < width
    slot = tl.minimum(tl.maximum(tl.load(slot_ptr + row), 0), slots_count - 1)
    place = tl.load(place_ptr + row)
    tail = tails_ptr + slot * slot_stride
    for i in tl.static_range(M - 1):
        before = tl.load(tail + i * place_stride + at, mask=inside)
        tl.store(out_kv_ptr + (row * M + i) * width + at, before, mask=inside)
        before = tl.load(tail + half_stride + i * place_stride + at, mask=inside)
        tl.store(out_gate_ptr + (row * M + i) * width + at, before, mask=inside)
    kv = tl.load(kv_ptr + row * width + at, mask=inside)
    gate = tl.load(gate_ptr + row * width + at, mask=inside)
    tl.store(out_kv_ptr + (row * M + M - 1) * width + at, kv, mask=inside)
    tl.store(out_gate_ptr + (row * M + M - 1) * width + at, gate, mask=inside)
    kept = inside & (place >= 0) & (place < M - 1)
    tl.store(tail + place * place_stride + at, kv, mask=kept)
    tl.store(tail + half_stride + place * place_stride + at, gate, mask=kept)


def join_tails(
    kv: torch.Tensor, gate: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the public function."""
    rows, width = kv.shape
    group = tails.shape[2] + 1
    outs = tuple(torch.empty(rows, group, width, dtype=kv.dtype, device=kv.device) for _ in range(2))
    if rows:
        block = min(512, triton.next_power_of_2(width))
        _join[(rows, triton.cdiv(width, block))](
            kv.contiguous(), gate.contiguous(), tails, slots.contiguous(), places.contiguous(), *outs,
            tails.shape[0],
            tails.stride(0), tails.stride(1), tails.stride(2), width, group, block,
        )  # fmt: skip
    return outs[0], outs[1]
