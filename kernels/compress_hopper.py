# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The compressor on Hopper, one launch: a warp takes a group at a time, its 512 channels four neighbours a
thread.

Same bytes as `compress_triton._entries`, in a fraction of its instructions: quotients by a reciprocal and its
remainders, norms in fp32 (the product of two bf16 values is exact, the scale comes in two parts, one fused
rounding), FP4 codes by integer rounding, the index key on wgmma with its weights on the way from the start.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, half
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WIDTH, KEY_WIDTH = 512, 128  # what the kernel is written for
SLAB = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[1, 0], [2, 0], [4, 0]], [], [8, 128]
    )
)
KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [16, 128],
    )
)
KACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 16, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def reciprocal(b):
    """1 / b within an ulp, b in [1, 2]."""
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.inline_asm_elementwise(
        "{ .reg .f32 n, e; neg.f32 n, $2; fma.rn.f32 e, n, $1, 0f3F800000; fma.rn.f32 $0, $1, e, $1; }",
        "=f,f,f",
        [r, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def power(x):
    """e^-x."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, t; }", "=f,f", [x],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def divided(a, r, b):
    """a / b correctly rounded, r = reciprocal(b)."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 n, q, m;
neg.f32 n, $3; mul.rn.f32 q, $1, $2; fma.rn.f32 m, n, q, $1; fma.rn.f32 q, m, $2, q;
fma.rn.f32 m, n, q, $1; fma.rn.f32 $0, m, $2, q; }""",
        "=f,f,f,f",
        [a, r, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pooled(kv, gate, D: gl.constexpr, M: gl.constexpr, mask):
    """bf16 values in fp32 of a slab: kv weighted by the softmax of gate over two tokens, or kv (bf16)."""
    if M == 1:
        out = gl.load(kv, mask=mask, other=0.0).to(gl.float32)
    else:
        g0 = gl.load(gate, mask=mask, other=0.0)
        g1 = gl.load(gate + D, mask=mask, other=0.0)
        v0 = gl.load(kv, mask=mask, other=0.0)
        v1 = gl.load(kv + D, mask=mask, other=0.0)
        less = power(gl.abs(g0 - g1))  # the greater one's is 1
        total = less + 1.0
        r = reciprocal(total)
        most = divided(gl.full([8, 128], 1.0, gl.float32, SLAB), r, total)
        rest = divided(less, r, total)
        first = g0 >= g1
        out = half(v0 * gl.where(first, most, rest) + v1 * gl.where(first, rest, most)).to(gl.float32)
    return out


@gluon.jit
def squares(x):
    """float64 sums of squares of rows."""
    wide = x.to(gl.float64)
    return gl.sum(wide * wide, axis=1)


@gluon.jit
def inverse_root(x):
    """float64 1 / sqrt(x) within a few ulps: an approximation to 20 bits, twice corrected."""
    r = gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [x], dtype=gl.float64, is_pure=True, pack=1
    )
    r = r * (1.5 - 0.5 * x * r * r)
    return r * (1.5 - 0.5 * x * r * r)


@gluon.jit
def normed(x, weight, high, low):
    """x·weight·(high + low) as bf16 values: the product of bf16 values is exact, so one fused rounding is
    fp64's.
    """
    p = x * weight.to(gl.float32)[None, :]
    return half(gl.fma(p, gl.where(p == p, high[:, None], p), p * low[:, None])).to(gl.float32)


@gluon.jit
def near(x):
    """x to 13 bits: what an inexact reciprocal put beside a tie returns to it."""
    return ((x.to(gl.int32, bitcast=True) + 0x200) & -1024).to(gl.float32, bitcast=True)


@gluon.jit
def codes(scaled, x):
    """E2M1 codes of scaled, the sign taken of x: scaled·2^-126 rounded to its first mantissa bit, nearest
    even.
    """
    bits = (gl.minimum(gl.abs(scaled), 6.0) * 1.1754943508222875e-38).to(gl.int32, bitcast=True)
    code = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22
    return code | ((x.to(gl.int32, bitcast=True) >> 28) & 8)


@gluon.jit
def packed(code, ROWS: gl.constexpr):
    """Bytes [ROWS, 64] of codes [ROWS, 128]."""
    low, high = gl.split(gl.reshape(code, [ROWS, 64, 2]))
    return (low | (high << 4)).to(gl.uint8)


@gluon.jit
def write_slab(x, payload, scales, mask, S: gl.constexpr):
    """FP4 with E4M3 scales over 16: slab S of an entry at pointers [8]."""
    L: gl.constexpr = x.type.layout
    amax = gl.max(gl.reshape(gl.abs(x), [8, 8, 16]), axis=2)
    scale = gl.minimum(near(gl.maximum(amax, 0.01171875) * 0.16666667163372040), 448.0).to(gl.float8e4nv)
    inverse = 1.0 / scale.to(gl.float32)
    parts = gl.reshape(x, [8, 8, 16])
    B: gl.constexpr = parts.type.layout
    inverse = gl.convert_layout(inverse, gl.SliceLayout(2, B))
    wide = gl.reshape(inverse[:, :, None] + gl.full([8, 8, 16], 0.0, gl.float32, B), [8, 128])
    wide = gl.convert_layout(wide, L)
    byte = packed(codes(near(x * wide), x), 8)
    P: gl.constexpr = byte.type.layout
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, P))
    at = gl.convert_layout(payload, gl.SliceLayout(1, P))[:, None] + (S * 64 + c)[None, :]
    gl.store(at, byte, mask=gl.convert_layout(mask, gl.SliceLayout(1, P))[:, None])
    Q: gl.constexpr = scale.type.layout
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, Q))
    at = gl.convert_layout(scales, gl.SliceLayout(1, Q))[:, None] + (S * 8 + g)[None, :]
    gl.store(
        at, scale.to(gl.uint8, bitcast=True), mask=gl.convert_layout(mask, gl.SliceLayout(1, Q))[:, None]
    )


@gluon.jit
def turned(x, cos_ptr, sin_ptr, row, mask, ROWS: gl.constexpr, HALF_ROPE: gl.constexpr):
    """The last 2·HALF_ROPE of 128 channels turned, rounded to bf16."""
    L: gl.constexpr = x.type.layout
    even, odd = gl.split(gl.reshape(x, [ROWS, 64, 2]))
    P: gl.constexpr = even.type.layout
    pair = gl.arange(0, 64, layout=gl.SliceLayout(0, P)) - (64 - HALF_ROPE)
    at = gl.convert_layout(row, gl.SliceLayout(1, P))[:, None] * HALF_ROPE + pair[None, :]
    turns = (pair >= 0)[None, :] & gl.convert_layout(mask, gl.SliceLayout(1, P))[:, None]
    cos = gl.load(cos_ptr + at, mask=turns, other=1.0)
    sin = gl.load(sin_ptr + at, mask=turns, other=0.0)
    out = gl.join(even * cos - odd * sin, even * sin + odd * cos)
    return half(gl.convert_layout(gl.reshape(out, [ROWS, 128]), L)).to(gl.float32)


@gluon.jit
def entries(
    key_desc,
    kv_ptr,
    gate_ptr,
    norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    pages_ptr,
    table_ptr,
    seq_ptr,
    entry_ptr,
    count,
    page_count,
    sequences,
    table_width,
    eps,
    ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    MAIN: gl.constexpr,
    MAIN_SCALES: gl.constexpr,
    INDEX: gl.constexpr,
    INDEX_SCALES: gl.constexpr,
    HALF_ROPE: gl.constexpr,
    M: gl.constexpr,
):
    """Grid (ceil(count / 16)), 8 warps: 16 groups, a warp each; width 512, keys 128."""
    D: gl.constexpr = 512
    lat_s = gl.allocate_shared_memory(gl.bfloat16, [16, 512], TILE)
    key_s = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], TILE)
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(4):
        mbarrier.expect(bars.index(i), 16384)
        tma.async_copy_global_to_shared(key_desc, [0, i * 64], bars.index(i), key_s.index(i))
    grid_wait()
    grid_release()
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, SLAB))
    w0 = gl.load(norm_ptr + c)
    w1 = gl.load(norm_ptr + 128 + c)
    w2 = gl.load(norm_ptr + 256 + c)
    w3 = gl.load(norm_ptr + 384 + c)
    for p in gl.static_range(2):
        row = gl.program_id(0) * 16 + p * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, SLAB))
        here = row < count
        at = row.to(gl.int64)[:, None] * (M * D) + c[None, :]
        mask = here[:, None] & (c >= 0)[None, :]
        x0 = pooled(kv_ptr + at, gate_ptr + at, D, M, mask)
        x1 = pooled(kv_ptr + at + 128, gate_ptr + at + 128, D, M, mask)
        x2 = pooled(kv_ptr + at + 256, gate_ptr + at + 256, D, M, mask)
        x3 = pooled(kv_ptr + at + 384, gate_ptr + at + 384, D, M, mask)
        factor = inverse_root((squares(x0) + squares(x1) + squares(x2) + squares(x3)) / 512 + eps)
        high = factor.to(gl.float32)
        low = (factor - high.to(gl.float64)).to(gl.float32)
        x0 = normed(x0, w0, high, low)
        x1 = normed(x1, w1, high, low)
        x2 = normed(x2, w2, high, low)
        x3 = normed(x3, w3, high, low)
        mine = lat_s.slice(p * 8, 8, dim=0)
        mine.slice(0, 128, dim=1).store(half(x0))
        mine.slice(128, 128, dim=1).store(half(x1))
        mine.slice(256, 128, dim=1).store(half(x2))
        mine.slice(384, 128, dim=1).store(half(x3))
        entry = gl.load(entry_ptr + row, mask=here, other=-1).to(gl.int32)
        here = here & (entry >= 0)
        sequence = gl.load(seq_ptr + row, mask=here, other=0).to(gl.int64)
        sequence = gl.minimum(gl.maximum(sequence, 0), sequences - 1)
        column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
        page = gl.load(table_ptr + sequence * table_width + column, mask=here, other=0).to(gl.int64)
        start = pages_ptr + gl.minimum(gl.maximum(page, 0), page_count - 1) * PAGE
        line = gl.maximum(entry, 0) % ROWS
        payload = start + MAIN + line * (D // 2)
        scales = start + MAIN_SCALES + line * (D // 16)
        write_slab(x0, payload, scales, here, 0)
        write_slab(x1, payload, scales, here, 1)
        write_slab(x2, payload, scales, here, 2)
        write_slab(turned(x3, cos_ptr, sin_ptr, row, row < count, 8, HALF_ROPE), payload, scales, here, 3)
    fence_async_shared()
    barrier()
    acc = gl.full([128, 16], 0.0, gl.float32, KACC)
    for i in gl.static_range(8):
        mbarrier.wait(bars.index(i % 4), i // 4)
        acc = warpgroup_mma(key_s.index(i % 4), lat_s.slice(i * 64, 64, dim=1).permute((1, 0)), acc)
        if i < 4:
            barrier()
            mbarrier.expect(bars.index(i), 16384)
            tma.async_copy_global_to_shared(key_desc, [0, (i + 4) * 64], bars.index(i), key_s.index(i))
    key = gl.convert_layout(gl.permute(acc, (1, 0)), KEYS)
    key = half(key).to(gl.float32)
    kc = gl.arange(0, 128, layout=gl.SliceLayout(0, KEYS))
    factor = inverse_root(squares(key) / 128 + eps)
    high = factor.to(gl.float32)
    low = (factor - high.to(gl.float64)).to(gl.float32)
    key = normed(key, gl.load(key_norm_ptr + kc), high, low)
    row = gl.program_id(0) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, KEYS))
    here = row < count
    key = turned(key, cos_ptr, sin_ptr, row, here, 16, HALF_ROPE)
    parts = gl.reshape(gl.abs(key), [16, 4, 32])
    amax = gl.maximum(gl.max(parts, axis=2), 7.052966104933725e-38)
    code = ((amax * 0.16666667163372040).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - code) << 23).to(gl.float32, bitcast=True)
    B: gl.constexpr = parts.type.layout
    inverse = gl.convert_layout(inverse, gl.SliceLayout(2, B))
    wide = gl.reshape(inverse[:, :, None] + gl.full([16, 4, 32], 0.0, gl.float32, B), [16, 128])
    byte = packed(codes(key * gl.convert_layout(wide, KEYS), key), 16)
    entry = gl.load(entry_ptr + row, mask=here, other=-1).to(gl.int32)
    here = here & (entry >= 0)
    sequence = gl.load(seq_ptr + row, mask=here, other=0).to(gl.int64)
    sequence = gl.minimum(gl.maximum(sequence, 0), sequences - 1)
    column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
    page = gl.load(table_ptr + sequence * table_width + column, mask=here, other=0).to(gl.int64)
    start = pages_ptr + gl.minimum(gl.maximum(page, 0), page_count - 1) * PAGE
    line = gl.maximum(entry, 0) % ROWS
    P: gl.constexpr = byte.type.layout
    b = gl.arange(0, 64, layout=gl.SliceLayout(0, P))
    at = gl.convert_layout(start + INDEX + line * 64, gl.SliceLayout(1, P))[:, None] + b[None, :]
    gl.store(at, byte, mask=gl.convert_layout(here, gl.SliceLayout(1, P))[:, None])
    Q: gl.constexpr = code.type.layout
    g = gl.arange(0, 4, layout=gl.SliceLayout(0, Q))
    at = gl.convert_layout(start + INDEX_SCALES + line * 4, gl.SliceLayout(1, Q))[:, None] + g[None, :]
    gl.store(at, code.to(gl.uint8), mask=gl.convert_layout(here, gl.SliceLayout(1, Q))[:, None])
    for j in gl.static_range(4):
        mbarrier.invalidate(bars.index(j))


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
    """As `compress_triton.write_entries`, for width 512, bf16 keys of 128 and groups of one or two; all
    contiguous.
    """
    count = kv.shape[0]
    desc = TensorDescriptor.from_tensor(key_weight, [KEY_WIDTH, 64], TILE.value)
    entries[(triton.cdiv(count, 16),)](
        desc, kv, gate if gate is not None else kv, norm_weight, key_norm_weight, rope[0], rope[1], pages,
        page_table, seq, entry, count, pages.shape[0], page_table.shape[0], page_table.shape[1], eps,
        planes[0][2], pages.stride(0), planes[0][0], planes[1][0], planes[2][0], planes[3][0],
        rope[0].shape[1], kv.shape[1] if kv.dim() == 3 else 1, num_warps=8, enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
