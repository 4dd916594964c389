# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The compressor on Hopper, one launch: a warp takes two groups, one after another, their 512 channels four
neighbours a thread; the second's rows come to shared memory meanwhile.

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
    async_copy,
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
LATENT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 128], [0, 256]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 512],
    )
)
PAIR = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 128], [0, 256], [0, 512]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 1024],
    )
)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
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
def tokens_of(pair):
    """The first and the second token [8, 512] of groups [8, 1024]."""
    first, second = gl.split(gl.permute(gl.reshape(pair, [8, 2, 512]), (0, 2, 1)))
    return (
        gl.convert_layout(first, LATENT, assert_trivial=True),
        gl.convert_layout(second, LATENT, assert_trivial=True),
    )


@gluon.jit
def slabs(x):
    """Four times 128 channels [8, 128] of rows [8, 512]."""
    low, high = gl.split(gl.permute(gl.reshape(x, [8, 2, 256]), (0, 2, 1)))
    x0, x1 = gl.split(gl.permute(gl.reshape(low, [8, 2, 128]), (0, 2, 1)))
    x2, x3 = gl.split(gl.permute(gl.reshape(high, [8, 2, 128]), (0, 2, 1)))
    return (
        gl.convert_layout(x0, SLAB, assert_trivial=True),
        gl.convert_layout(x1, SLAB, assert_trivial=True),
        gl.convert_layout(x2, SLAB, assert_trivial=True),
        gl.convert_layout(x3, SLAB, assert_trivial=True),
    )


@gluon.jit
def pooled(kv, gate):
    """bf16 values in fp32 [8, 512] of groups [8, 1024]: kv weighted by gate's softmax over the tokens."""
    g0, g1 = tokens_of(gate)
    v0, v1 = tokens_of(kv)
    less = power(gl.abs(g0 - g1))  # the greater one's is 1
    total = less + 1.0
    r = reciprocal(total)
    most = divided(gl.full([8, 512], 1.0, gl.float32, LATENT), r, total)
    rest = divided(less, r, total)
    first = g0 >= g1
    return half(v0 * gl.where(first, most, rest) + v1 * gl.where(first, rest, most)).to(gl.float32)


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
def turns(cos_ptr, sin_ptr, row, mask, ROWS: gl.constexpr, HALF_ROPE: gl.constexpr, L: gl.constexpr):
    """Cosine and sine for `turned` of x [ROWS, 128] in layout L."""
    pairs = gl.reshape(gl.full([ROWS, 128], 0.0, gl.float32, L), [ROWS, 64, 2])
    P: gl.constexpr = gl.split(pairs)[0].type.layout
    pair = gl.arange(0, 64, layout=gl.SliceLayout(0, P)) - (64 - HALF_ROPE)
    at = gl.convert_layout(row, gl.SliceLayout(1, P))[:, None] * HALF_ROPE + pair[None, :]
    inside = (pair >= 0)[None, :] & gl.convert_layout(mask, gl.SliceLayout(1, P))[:, None]
    return gl.load(cos_ptr + at, mask=inside, other=1.0), gl.load(sin_ptr + at, mask=inside, other=0.0)


@gluon.jit
def turned(x, cos, sin, ROWS: gl.constexpr):
    """The last channels of x [ROWS, 128] turned, rounded to bf16."""
    L: gl.constexpr = x.type.layout
    even, odd = gl.split(gl.reshape(x, [ROWS, 64, 2]))
    out = gl.join(even * cos - odd * sin, even * sin + odd * cos)
    return half(gl.convert_layout(gl.reshape(out, [ROWS, 128]), L)).to(gl.float32)


@gluon.jit
def places(
    entry_ptr, seq_ptr, table_ptr, row, count, sequences, table_width, page_count,
    ROWS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Where groups' entries go: their page's first byte, their line in it, and whether at all."""
    here = row < count
    entry = gl.load(entry_ptr + row, mask=here, other=-1).to(gl.int32)
    sequence = gl.load(seq_ptr + row, mask=here, other=0).to(gl.int64)
    here = here & (entry >= 0)
    sequence = gl.minimum(gl.maximum(sequence, 0), sequences - 1)
    column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
    page = gl.load(table_ptr + sequence * table_width + column, mask=here, other=0).to(gl.int64)
    return gl.minimum(gl.maximum(page, 0), page_count - 1) * PAGE, gl.maximum(entry, 0) % ROWS, here


@gluon.jit
def both(first, second):
    """[16], in the keys' layout, of two passes' [8]."""
    out = gl.reshape(gl.permute(gl.join(first, second), (1, 0)), [16])
    return gl.convert_layout(out, gl.SliceLayout(1, KEYS), assert_trivial=True)


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
    GROUP: gl.constexpr = PAIR if M == 2 else LATENT
    lat_s = gl.allocate_shared_memory(gl.bfloat16, [16, 512], TILE)
    key_s = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], TILE)
    # The second groups' rows, then four blocks of key weights. Two, for the compiler puts a barrier between
    # accesses to one.
    late0_s = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], TILE)
    late1_s = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], TILE)
    kv_s = late0_s._reinterpret(gl.float32 if M == 2 else gl.bfloat16, [8, M * D], PLAIN)
    gate_s = late1_s._reinterpret(gl.float32, [8, M * D], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(6):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(2):
        mbarrier.expect(bars.index(i), 16384)
        tma.async_copy_global_to_shared(key_desc, [0, i * 64], bars.index(i), key_s.index(i))
    grid_wait()
    grid_release()
    row8 = gl.program_id(0) * 16 + gl.arange(0, 8, layout=gl.SliceLayout(1, GROUP))
    at = row8.to(gl.int64)[:, None] * (M * D) + gl.arange(0, M * D, layout=gl.SliceLayout(0, GROUP))[None, :]
    mask = (row8 < count)[:, None] & (at >= 0)
    later = (row8 + 8 < count)[:, None] & (at >= 0)
    kv = gl.load(kv_ptr + at, mask=mask, other=0.0)
    if M == 2:
        gate = gl.load(gate_ptr + at, mask=mask, other=0.0)
    barrier()  # or these loads, which are used first, would come last
    async_copy.async_copy_global_to_shared(kv_s, kv_ptr + at + 8 * M * D, mask=later)
    if M == 2:
        async_copy.async_copy_global_to_shared(gate_s, gate_ptr + at + 8 * M * D, mask=later)
    async_copy.commit_group()
    row = gl.program_id(0) * 16 + gl.arange(0, 8, layout=gl.SliceLayout(1, SLAB))
    start0, line0, here0 = places(
        entry_ptr, seq_ptr, table_ptr, row, count, sequences, table_width, page_count, ROWS, PAGE
    )
    start1, line1, here1 = places(
        entry_ptr, seq_ptr, table_ptr, row + 8, count, sequences, table_width, page_count, ROWS, PAGE
    )
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, SLAB))
    w0 = gl.load(norm_ptr + c)
    w1 = gl.load(norm_ptr + 128 + c)
    w2 = gl.load(norm_ptr + 256 + c)
    w3 = gl.load(norm_ptr + 384 + c)
    for p in gl.static_range(2):
        cos, sin = turns(cos_ptr, sin_ptr, row + p * 8, row + p * 8 < count, 8, HALF_ROPE, SLAB)
        if p == 1:
            async_copy.wait_group(0)
            kv = kv_s.load(GROUP)
            if M == 2:
                gate = gate_s.load(GROUP)
            barrier()
            for i in gl.static_range(4):
                mbarrier.expect(bars.index(2 + i), 16384)
                tma.async_copy_global_to_shared(
                    key_desc, [0, (2 + i) * 64], bars.index(2 + i),
                    late0_s.index(i) if i < 2 else late1_s.index(i - 2),
                )  # fmt: skip
        x = pooled(kv, gate) if M == 2 else kv.to(gl.float32)
        x0, x1, x2, x3 = slabs(x)
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
        start = start0 if p == 0 else start1
        line = line0 if p == 0 else line1
        here = here0 if p == 0 else here1
        payload = pages_ptr + start + MAIN + line * (D // 2)
        scales = pages_ptr + start + MAIN_SCALES + line * (D // 16)
        write_slab(x0, payload, scales, here, 0)
        write_slab(x1, payload, scales, here, 1)
        write_slab(x2, payload, scales, here, 2)
        write_slab(turned(x3, cos, sin, 8), payload, scales, here, 3)
    fence_async_shared()
    barrier()
    row = gl.program_id(0) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, KEYS))
    cos, sin = turns(cos_ptr, sin_ptr, row, row < count, 16, HALF_ROPE, KEYS)
    start = pages_ptr + both(start0, start1)
    line = both(line0, line1)
    here = both(here0, here1)
    kc = gl.arange(0, 128, layout=gl.SliceLayout(0, KEYS))
    key_weight = gl.load(key_norm_ptr + kc)
    acc = gl.full([128, 16], 0.0, gl.float32, KACC)
    for i in gl.static_range(8):
        mbarrier.wait(bars.index(i % 6), i // 6)
        if i % 6 < 2:
            block = key_s.index(i % 6)
        else:
            block = late0_s.index(i - 2) if i < 4 else late1_s.index(i - 4)
        acc = warpgroup_mma(block, lat_s.slice(i * 64, 64, dim=1).permute((1, 0)), acc)
        if i < 2:
            barrier()
            mbarrier.expect(bars.index(i), 16384)
            tma.async_copy_global_to_shared(key_desc, [0, (i + 6) * 64], bars.index(i), key_s.index(i))
    key = gl.convert_layout(gl.permute(acc, (1, 0)), KEYS)
    key = half(key).to(gl.float32)
    factor = inverse_root(squares(key) / 128 + eps)
    high = factor.to(gl.float32)
    low = (factor - high.to(gl.float64)).to(gl.float32)
    key = normed(key, key_weight, high, low)
    key = turned(key, cos, sin, 16)
    parts = gl.reshape(gl.abs(key), [16, 4, 32])
    amax = gl.maximum(gl.max(parts, axis=2), 7.052966104933725e-38)
    code = ((amax * 0.16666667163372040).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - code) << 23).to(gl.float32, bitcast=True)
    B: gl.constexpr = parts.type.layout
    inverse = gl.convert_layout(inverse, gl.SliceLayout(2, B))
    wide = gl.reshape(inverse[:, :, None] + gl.full([16, 4, 32], 0.0, gl.float32, B), [16, 128])
    byte = packed(codes(key * gl.convert_layout(wide, KEYS), key), 16)
    P: gl.constexpr = byte.type.layout
    b = gl.arange(0, 64, layout=gl.SliceLayout(0, P))
    at = gl.convert_layout(start + INDEX + line * 64, gl.SliceLayout(1, P))[:, None] + b[None, :]
    gl.store(at, byte, mask=gl.convert_layout(here, gl.SliceLayout(1, P))[:, None])
    Q: gl.constexpr = code.type.layout
    g = gl.arange(0, 4, layout=gl.SliceLayout(0, Q))
    at = gl.convert_layout(start + INDEX_SCALES + line * 4, gl.SliceLayout(1, Q))[:, None] + g[None, :]
    gl.store(at, code.to(gl.uint8), mask=gl.convert_layout(here, gl.SliceLayout(1, Q))[:, None])
    for j in gl.static_range(6):
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
        rope[0].shape[1], kv.shape[1] if kv.dim() == 3 else 1, num_warps=8, maxnreg=128,
        enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
