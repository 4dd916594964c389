# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The compressor and the window key, each in one launch, written where they are kept (spec §3, §4).

`write_entries`: pooling, norm, index key, RoPE, both FP4 packs, straight into pages. `write_window`: norm,
RoPE, FP8, into the
ring. Norms are float64 inside like the reference's, rotations fp32 without fused multiply-add, so bytes
agree bit for bit
wherever the index key's matrix product (fp32 sums here) rounds to the same bf16.
Page numbers outside of what they index are clamped: nothing is written out of bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import hopper
from cedar.kernels.packed_triton import (
    bf16_round,
    fp8_scale,
    matmul,
    pack_fp4_e4m3,
    pack_fp4_e8m0,
    to_bf16,
    to_e4m3,
)


@triton.jit
def _norm(even, odd, weight_ptr, eps, HALF: tl.constexpr):
    """RMSNorm of fp32 channel pairs [R, HALF], rounded to bf16 (kept as fp32)."""
    pair = tl.arange(0, HALF)
    wide_even = even.to(tl.float64)
    wide_odd = odd.to(tl.float64)
    mean = (tl.sum(wide_even * wide_even, axis=1) + tl.sum(wide_odd * wide_odd, axis=1)) / (2.0 * HALF)
    scale = (1.0 / tl.sqrt(mean + eps))[:, None]
    even = wide_even * scale * tl.load(weight_ptr + 2 * pair).to(tl.float64)[None, :]
    odd = wide_odd * scale * tl.load(weight_ptr + 2 * pair + 1).to(tl.float64)[None, :]
    return bf16_round(even.to(tl.float32)), bf16_round(odd.to(tl.float32))


@triton.jit
def _rotate(even, odd, cos_ptr, sin_ptr, row, rows, HALF: tl.constexpr, HALF_ROPE: tl.constexpr):
    """The last HALF_ROPE pairs turned, rounded to bf16."""
    turn = tl.arange(0, HALF) - (HALF - HALF_ROPE)
    turns = (turn >= 0)[None, :] & (row < rows)[:, None]
    at = row[:, None] * HALF_ROPE + turn[None, :]
    cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
    return bf16_round(even * cos - odd * sin), bf16_round(even * sin + odd * cos)


@triton.jit
def _pool(kv_ptr, gate_ptr, row, rows, channel, D: tl.constexpr, M: tl.constexpr):
    """Channels [R, HALF] of kv weighted by the softmax of gate over the M tokens of a group, rounded to
    bf16.
    """
    inside = (row < rows)[:, None]
    at = row[:, None] * (M * D) + channel[None, :]
    if M == 1:
        pooled = tl.load(kv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        top = tl.load(gate_ptr + at, mask=inside, other=0.0)
        for i in tl.static_range(1, M):
            top = tl.maximum(top, tl.load(gate_ptr + at + i * D, mask=inside, other=0.0))
        total = tl.zeros(at.shape, tl.float32)
        for i in tl.static_range(M):
            total += tl.exp(tl.load(gate_ptr + at + i * D, mask=inside, other=0.0) - top)
        pooled = tl.zeros(at.shape, tl.float32)
        for i in tl.static_range(M):
            p = tl.div_rn(tl.exp(tl.load(gate_ptr + at + i * D, mask=inside, other=0.0) - top), total)
            pooled += tl.load(kv_ptr + at + i * D, mask=inside, other=0.0) * p
    return bf16_round(pooled)


@triton.jit
def _entries(
    kv_ptr, gate_ptr, norm_ptr, key_ptr, key_norm_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr,
    entry_ptr,
    count, page_count, sequences, table_width, eps,
    ROWS: tl.constexpr, PAGE: tl.constexpr, MAIN: tl.constexpr, MAIN_SCALES: tl.constexpr,
    INDEX: tl.constexpr, INDEX_SCALES: tl.constexpr,
    HALF: tl.constexpr, KEY_HALF: tl.constexpr, HALF_ROPE: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(count / R))."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    pair = tl.arange(0, HALF)
    even = _pool(kv_ptr, gate_ptr, row, count, 2 * pair, 2 * HALF, M)
    odd = _pool(kv_ptr, gate_ptr, row, count, 2 * pair + 1, 2 * HALF, M)
    even, odd = _norm(even, odd, norm_ptr, eps, HALF)

    # index key from the latent before RoPE
    j = tl.arange(0, KEY_HALF)
    weight = key_ptr + pair[:, None] * 2 + (2 * j)[None, :] * (2 * HALF)
    latent_even = to_bf16(even)
    latent_odd = to_bf16(odd)
    key_even = tl.zeros([R, KEY_HALF], tl.float32)
    key_odd = tl.zeros([R, KEY_HALF], tl.float32)
    key_even = matmul(latent_even, to_bf16(tl.load(weight).to(tl.float32)), key_even)
    key_even = matmul(latent_odd, to_bf16(tl.load(weight + 1).to(tl.float32)), key_even)
    key_odd = matmul(latent_even, to_bf16(tl.load(weight + 2 * HALF).to(tl.float32)), key_odd)
    key_odd = matmul(latent_odd, to_bf16(tl.load(weight + 2 * HALF + 1).to(tl.float32)), key_odd)
    key_even, key_odd = _norm(bf16_round(key_even), bf16_round(key_odd), key_norm_ptr, eps, KEY_HALF)
    key_even, key_odd = _rotate(key_even, key_odd, cos_ptr, sin_ptr, row, count, KEY_HALF, HALF_ROPE)
    key_payload, key_scales = pack_fp4_e8m0(key_even, key_odd, KEY_HALF // 16)

    even, odd = _rotate(even, odd, cos_ptr, sin_ptr, row, count, HALF, HALF_ROPE)
    payload, scales = pack_fp4_e4m3(even, odd, HALF // 8)

    inside = row < count
    entry = tl.load(entry_ptr + row, mask=inside, other=-1).to(tl.int32)
    inside = inside & (entry >= 0)
    sequence = tl.load(seq_ptr + row, mask=inside, other=0).to(tl.int64)
    sequence = tl.minimum(tl.maximum(sequence, 0), sequences - 1)
    column = tl.minimum(tl.maximum(entry, 0) // ROWS, table_width - 1)
    page = tl.load(table_ptr + sequence * table_width + column, mask=inside, other=0).to(tl.int64)
    at = (pages_ptr + tl.minimum(tl.maximum(page, 0), page_count - 1) * PAGE)[:, None]
    line = (tl.maximum(entry, 0) % ROWS)[:, None]
    mask = inside[:, None]
    group = tl.arange(0, HALF // 8)[None, :]
    key_group = tl.arange(0, KEY_HALF // 16)[None, :]
    tl.store(at + MAIN + line * HALF + pair[None, :], payload, mask=mask)
    tl.store(at + MAIN_SCALES + line * (HALF // 8) + group, scales, mask=mask)
    tl.store(at + INDEX + line * KEY_HALF + j[None, :], key_payload, mask=mask)
    tl.store(at + INDEX_SCALES + line * (KEY_HALF // 16) + key_group, key_scales, mask=mask)


def write_entries(
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor,
    key_weight: torch.Tensor,
    key_norm_weight: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    pages: torch.Tensor,
    planes: tuple[tuple[int, int, int], ...],
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
) -> None:
    """kv and gate fp32 [G, m, D], or gate None and kv the pooled bf16 [G, D], into entries entry[g] of
    sequences seq[g].

    rope = (cos, sin) fp32 [G, R/2] at each group's first position; planes as `EntryPlanes`; a negative
    entry is not written.
    """
    count, width = kv.shape[0], kv.shape[-1]
    if count == 0:
        return
    group = kv.shape[1] if kv.dim() == 3 else 1
    kv, gate = kv.contiguous(), gate.contiguous() if gate is not None else None
    rope = (rope[0].contiguous(), rope[1].contiguous())
    fits = width == 512 and key_weight.shape[0] == 128 and key_weight.dtype == torch.bfloat16 and group <= 2
    if fits and kv.is_cuda and rope[0].shape[1] <= 64 and hopper(kv.device.index or 0):
        from cedar.kernels import compress_hopper

        compress_hopper.write_entries(
            kv, gate, norm_weight.contiguous(), key_weight.contiguous(), key_norm_weight.contiguous(), rope,
            eps, pages, planes, page_table.contiguous(), seq.contiguous(), entry.contiguous(),
        )  # fmt: skip
        return
    rows = 16
    _entries[(triton.cdiv(count, rows),)](
        kv, gate if gate is not None else kv, norm_weight, key_weight.contiguous(), key_norm_weight, *rope,
        pages, page_table.contiguous(), seq.contiguous(), entry.contiguous(), count, pages.shape[0],
        page_table.shape[0], page_table.shape[1], eps, planes[0][2], pages.stride(0), planes[0][0],
        planes[1][0], planes[2][0], planes[3][0], width // 2, key_weight.shape[0] // 2, rope[0].shape[1],
        group, rows, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _window(
    k_ptr, norm_ptr, cos_ptr, sin_ptr, ring_ptr, place_ptr, count, ring_rows, eps,
    HALF: tl.constexpr, HALF_ROPE: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(count / R))."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    pair = tl.arange(0, HALF)
    inside = (row < count)[:, None]
    words = tl.load(k_ptr + row[:, None] * HALF + pair[None, :], mask=inside, other=0)  # two bf16 a word
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    if NORM:
        even, odd = _norm(even, odd, norm_ptr, eps, HALF)
    if HALF_ROPE > 0:
        even, odd = _rotate(even, odd, cos_ptr, sin_ptr, row, count, HALF, HALF_ROPE)
    groups: tl.constexpr = HALF // 16
    size = tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), [R, groups, 16])
    code = fp8_scale(tl.max(size, axis=2))
    down = ((254 - code) << 23).to(tl.float32, bitcast=True)
    down = tl.reshape(tl.broadcast_to(down[:, :, None], [R, groups, 16]), [R, HALF])
    low = to_e4m3(tl.clamp(even * down, -448.0, 448.0)).to(tl.uint8, bitcast=True).to(tl.int32)
    high = to_e4m3(tl.clamp(odd * down, -448.0, 448.0)).to(tl.uint8, bitcast=True).to(tl.int32)
    place = tl.load(place_ptr + row, mask=row < count, other=-1).to(tl.int64)
    kept = ((place >= 0) & (place < ring_rows))[:, None]
    at = tl.maximum(place, 0)[:, None] * (2 * HALF + groups)
    tl.store(ring_ptr + at + 2 * pair[None, :], low.to(tl.uint8), mask=kept)
    tl.store(ring_ptr + at + 2 * pair[None, :] + 1, high.to(tl.uint8), mask=kept)
    tl.store(ring_ptr + at + 2 * HALF + tl.arange(0, groups)[None, :], code.to(tl.uint8), mask=kept)


def write_window(
    k: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    ring: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """k bf16 [N, D] (before its norm, or after with norm_weight None) into rows places[n] of ring uint8
    [R, D + D/32].

    rope = (cos, sin) fp32 [N, R/2] or None; a place outside the ring is not written.
    """
    count, width = k.shape
    if count == 0:
        return
    cos, sin = (t.contiguous() for t in rope) if rope is not None else (k, k)
    rows = 1 if count <= 256 else 4
    _window[(triton.cdiv(count, rows),)](
        k.contiguous().view(torch.int32), norm_weight if norm_weight is not None else k, cos, sin, ring,
        places.contiguous(),
        count, ring.shape[0], eps, width // 2, rope[0].shape[1] if rope is not None else 0, rows,
        norm_weight is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def pack_window_rows(k: torch.Tensor) -> torch.Tensor:
    """uint8 [N, D + D/32] of k bf16 [N, D] (after RoPE)."""
    out = torch.empty(k.shape[0], k.shape[1] + k.shape[1] // 32, dtype=torch.uint8, device=k.device)
    write_window(k, None, None, 0.0, out, torch.arange(k.shape[0], device=k.device, dtype=torch.int32))
    return out


@triton.jit
def _pack(x_ptr, payload_ptr, scale_ptr, count, HALF: tl.constexpr, E4M3: tl.constexpr, R: tl.constexpr):
    """Grid (ceil(count / R))."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    pair = tl.arange(0, HALF)
    inside = (row < count)[:, None]
    words = tl.load(x_ptr + row[:, None] * HALF + pair[None, :], mask=inside, other=0)
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    groups: tl.constexpr = HALF // 8 if E4M3 else HALF // 16
    if E4M3:
        payload, scales = pack_fp4_e4m3(even, odd, groups)
    else:
        payload, scales = pack_fp4_e8m0(even, odd, groups)
    tl.store(payload_ptr + row[:, None] * HALF + pair[None, :], payload, mask=inside)
    tl.store(scale_ptr + row[:, None] * groups + tl.arange(0, groups)[None, :], scales, mask=inside)


def pack_fp4(x: torch.Tensor, e4m3: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload uint8 [..., C/2], scale bytes) of x bf16 [..., C], C a power of two: E4M3 groups of 16 or
    E8M0 groups of 32.
    """
    width = x.shape[-1]
    payload = torch.empty(*x.shape[:-1], width // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], width // (16 if e4m3 else 32), dtype=torch.uint8, device=x.device)
    count = payload.numel() // (width // 2)
    if count:
        rows = max(1, 2048 // width)
        _pack[(triton.cdiv(count, rows),)](
            x.contiguous().view(torch.int32),
            payload,
            scales,
            count,
            width // 2,
            e4m3,
            rows,
            enable_fp_fusion=False,
        )
    return payload, scales
