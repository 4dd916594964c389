# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sparse attention of a few queries, shared out over many small programs, and the join of split queries
(spec §3).

A program takes a few keys and heads, so that the chain of loads (entry, page, row) is all that one query
waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from cedar.kernels.packed_triton import INTERPRETED, bf16_round, e2m1, to_bf16
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Four bytes and four scales (fp16, value·2^7) to four even and four odd E2M1 channels, fp16, times 2^-7.
_FP4_HALF = tl.constexpr("""
{
.reg .b32 t0, t1, a, c;
prmt.b32 t0, $4, 0, 0x1404;
prmt.b32 t1, $4, 0, 0x3424;
shr.b32 a, t0, 3;
and.b32 a, a, 0x0E000E00;
lop3.b32 a, t0, 0x80008000, a, 0xEA;
mul.rn.f16x2 $2, a, $5;
shr.b32 a, t1, 3;
and.b32 a, a, 0x0E000E00;
lop3.b32 a, t1, 0x80008000, a, 0xEA;
mul.rn.f16x2 $3, a, $6;
shl.b32 a, t0, 1;
and.b32 a, a, 0x0E000E00;
shl.b32 c, t0, 4;
lop3.b32 a, c, 0x80008000, a, 0xEA;
mul.rn.f16x2 $0, a, $5;
shl.b32 a, t1, 1;
and.b32 a, a, 0x0E000E00;
shl.b32 c, t1, 4;
lop3.b32 a, c, 0x80008000, a, 0xEA;
mul.rn.f16x2 $1, a, $6;
}
""")


@triton.jit
def half(x):
    """Operand of a dot: fp16, which holds FP4 and FP8 keys exactly; wide where the interpreter wants it."""
    return x if INTERPRETED else x.to(tl.float16)


@triton.jit
def _entry_keys(packed, code, HALF: tl.constexpr):
    """Even and odd channels [R, HALF] times 2^-7 of packed bytes [R, HALF] and E4M3 bytes [R, HALF/8];
    fp16.
    """
    rows: tl.constexpr = packed.shape[0]
    if INTERPRETED:
        scale = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 0.0078125
        wide = tl.reshape(tl.broadcast_to(scale[:, :, None], [rows, HALF // 8, 8]), [rows, HALF])
        byte = packed.to(tl.int32)
        even, odd = e2m1(byte & 15) * wide, e2m1(byte >> 4) * wide
    else:
        scale = (code.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 32768.0
        scale = scale.to(tl.float16)
        wide = tl.reshape(tl.broadcast_to(scale[:, :, None], [rows, HALF // 8, 8]), [rows, HALF])
        even, odd = tl.inline_asm_elementwise(
            _FP4_HALF,
            "=r,=r,=r,=r,r,r,r",
            [packed, wide],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return even, odd


@triton.jit
def _turned(even, odd, cos, sin):
    """Pairs rotated by (cos, sin), rounded to bf16, fp32."""
    a = even * cos - odd * sin
    b = even * sin + odd * cos
    if INTERPRETED:
        a, b = bf16_round(a), bf16_round(b)
    else:
        words = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
        a = (words << 16).to(tl.float32, bitcast=True)
        b = (words & -65536).to(tl.float32, bitcast=True)
    return a, b


@triton.jit
def attend_part(
    q_ptr, cos_ptr, sin_ptr, pages_ptr, table_ptr, seq_ptr, entries_ptr, window_ptr, rows_ptr,
    part_ptr, lse_ptr,
    page_count, sequences, table_width, window_count, entry_count, row_count, heads, scale,
    ROWS: tl.constexpr, PAGE: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    NEAR: tl.constexpr, HALF: tl.constexpr, HALF_ROPE: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, NEAR + far, ceil(heads / BH)), BN keys a program: NEAR of them take window rows, the
    rest entries.
    """
    if not INTERPRETED:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BH + tl.arange(0, BH)
    pair = tl.arange(0, HALF)
    lane = tl.arange(0, BN)
    if split < NEAR:
        where = split * BN + lane
        near_row = tl.load(rows_ptr + token * row_count + where, mask=where < row_count, other=-1)
        present = near_row >= 0
        near_row = tl.minimum(tl.maximum(near_row, 0), window_count - 1).to(tl.int64)
        place = window_ptr + near_row[:, None] * (2 * HALF + HALF // 16)
        exponent = tl.load(place + 2 * HALF + tl.arange(0, HALF // 16)[None, :]).to(tl.int32)
        stored = tl.load(place + tl.arange(0, 2 * HALF)[None, :])
        power = (exponent << 23).to(tl.float32, bitcast=True) * 0.0078125
        wide = tl.reshape(tl.broadcast_to(power[:, :, None], [BN, HALF // 16, 16]), [BN, HALF])
        low, high = tl.split(tl.reshape(stored, [BN, HALF, 2]))
        k_even = half(low.to(tl.float8e4nv, bitcast=True).to(tl.float32) * wide)
        k_odd = half(high.to(tl.float8e4nv, bitcast=True).to(tl.float32) * wide)
    else:
        where = (split - NEAR) * BN + lane
        entry = tl.load(entries_ptr + token * entry_count + where, mask=where < entry_count, other=-1)
        present = entry >= 0
        sequence = tl.minimum(tl.maximum(tl.load(seq_ptr + token), 0), sequences - 1).to(tl.int64)
        column = tl.minimum(tl.maximum(entry, 0) // ROWS, table_width - 1)
        page = tl.load(table_ptr + sequence * table_width + column)
        page = tl.minimum(tl.maximum(page, 0), page_count - 1).to(tl.int64)
        row = tl.maximum(entry, 0) % ROWS
        start = pages_ptr + page * PAGE
        packed = tl.load(start[:, None] + PAYLOAD + row[:, None] * HALF + pair[None, :])
        code = tl.load(
            start[:, None] + SCALES + row[:, None] * (HALF // 8) + tl.arange(0, HALF // 8)[None, :]
        )
        code = tl.where(present[:, None], code, 0)
        k_even, k_odd = _entry_keys(packed, code, HALF)
    q_at = (token * heads + head)[:, None] * (2 * HALF)
    q = tl.load(q_ptr + q_at + tl.arange(0, 2 * HALF)[None, :], mask=head[:, None] < heads, other=0.0)
    q_even, q_odd = tl.split(tl.reshape(q.to(tl.float32), [BH, HALF, 2]))
    if HALF_ROPE > 0:
        turn = pair - (HALF - HALF_ROPE)
        cos = tl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = tl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        q_even, q_odd = _turned(q_even, q_odd, cos, sin)
    s = tl.dot(half(q_even), tl.trans(k_even), input_precision="ieee")
    s += tl.dot(half(q_odd), tl.trans(k_odd), input_precision="ieee")
    s = tl.where(present[None, :], s * (scale * 128.0), float("-inf"))
    top = tl.maximum(tl.max(s, axis=1), -1e30)
    p = tl.exp2(s - top[:, None])
    total = tl.sum(p, axis=1)
    inverse = tl.where(total > 0, 128.0 / tl.where(total > 0, total, 1.0), 0.0)[:, None]
    even = tl.dot(half(p), k_even, input_precision="ieee") * inverse
    odd = tl.dot(half(p), k_odd, input_precision="ieee") * inverse
    cell = (token * tl.num_programs(1) + split) * heads
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + cell + head, lse, mask=head < heads)
    out = tl.reshape(tl.join(even, odd), [BH, 2 * HALF]).to(part_ptr.dtype.element_ty)
    at = part_ptr + (cell + head)[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(at, out, mask=head[:, None] < heads)


@triton.jit
def join_parts(
    part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, heads,
    HALF: tl.constexpr, HALF_ROPE: tl.constexpr, SPLITS: tl.constexpr, BH: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, ceil(heads / BH)): the splits' outputs weighted by their sums, with the sink, turned
    back.

    WAIT: launched beside the kernel that writes the parts (`launch_pdl`), so it waits for that one's end
    itself.
    """
    if WAIT:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    real = head < heads
    channel = tl.arange(0, 2 * HALF)
    sink = tl.load(sink_ptr + head, mask=real, other=0.0) * 1.4426950408889634
    peak = sink
    for i in tl.static_range(SPLITS):
        lse = tl.load(lse_ptr + (token * SPLITS + i) * heads + head, mask=real, other=float("-inf"))
        peak = tl.maximum(peak, lse)
    total = tl.exp2(sink - peak)
    acc = tl.zeros([BH, 2 * HALF], tl.float32)
    for i in tl.static_range(SPLITS):
        row = (token * SPLITS + i) * heads + head
        weight = tl.exp2(tl.load(lse_ptr + row, mask=real, other=float("-inf")) - peak)
        total += weight
        at = part_ptr + row[:, None] * (2 * HALF) + channel[None, :]
        acc += weight[:, None] * tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(acc * (1.0 / total)[:, None], [BH, HALF, 2]))
    if HALF_ROPE > 0:
        turn = tl.arange(0, HALF) - (HALF - HALF_ROPE)
        cos = tl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = tl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        turned = even * cos + odd * sin
        odd = odd * cos - even * sin
        even = turned
    at = out_ptr + (token * heads + head)[:, None] * (2 * HALF) + channel[None, :]
    tl.store(at, to_bf16(tl.reshape(tl.join(even, odd), [BH, 2 * HALF])), mask=real[:, None])
