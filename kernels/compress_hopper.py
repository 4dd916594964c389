# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The compressor on Hopper, one launch: a warp takes two groups, one after another, their 512 channels four
neighbours a thread; the second's rows come to the registers that the first's have left.

Same bytes as `compress_triton._entries` for finite values, in a fraction of its instructions: quotients by a
reciprocal and its remainder, norms in fp32 (the product of two bf16 values is exact, the scale comes in two
parts, one fused rounding), FP4 codes by rounding pairs of fp16, a scale a lane. The index key's products run
on wgmma while entries are packed, their weights on the way before the launch before has ended.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.compress_codes_hopper import codes, words, write_codes, write_scales
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, half
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

WIDTH, KEY_WIDTH = 512, 128  # what the kernel is written for
SLAB = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 128],
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
    """1 / b correctly rounded, b in [1, 2]."""
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
    """a / b correctly rounded for b = 1 + a, r = reciprocal(b)."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 n, q, m;
neg.f32 n, $3; mul.rn.f32 q, $1, $2; fma.rn.f32 m, n, q, $1; fma.rn.f32 $0, m, $2, q; }""",
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
    rest = divided(less, r, total)
    first = g0 >= g1
    return half(v0 * gl.where(first, r, rest) + v1 * gl.where(first, rest, r)).to(gl.float32)


@gluon.jit
def squares(x):
    """float64 sums of squares of rows."""
    wide = x.to(gl.float64)
    return gl.sum(wide * wide, axis=1)


@gluon.jit
def squares_of_four(x0, x1, x2, x3):
    """float64 sums of squares of rows in four parts; a square of a bf16 value is exact."""
    x0 = x0.to(gl.float64)
    x1 = x1.to(gl.float64)
    x2 = x2.to(gl.float64)
    x3 = x3.to(gl.float64)
    return gl.sum(gl.fma(x3, x3, gl.fma(x2, x2, gl.fma(x1, x1, x0 * x0))), axis=1)


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
    scaled = gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $1, $3; fma.rn.f32 $0, $1, $2, t; }", "=f,f,f,f",
        [p, high[:, None], low[:, None]], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return half(scaled).to(gl.float32)


@gluon.jit
def latents(x, w0, w1, w2, w3, eps):
    """Groups' values [8, 512] normed, four slabs."""
    x0, x1, x2, x3 = slabs(x)
    factor = inverse_root(squares_of_four(x0, x1, x2, x3) * (1.0 / 512) + eps)
    high = factor.to(gl.float32)
    low = (factor - high.to(gl.float64)).to(gl.float32)
    return (
        normed(x0, w0, high, low),
        normed(x1, w1, high, low),
        normed(x2, w2, high, low),
        normed(x3, w3, high, low),
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
def named(entry_ptr, seq_ptr, row, count):
    """Groups' entries and sequences; an entry of -1 is not written."""
    here = row < count
    entry = gl.load(entry_ptr + row, mask=here, other=-1).to(gl.int32)
    return entry, gl.load(seq_ptr + row, mask=here, other=0).to(gl.int64)


@gluon.jit
def places(
    entry, sequence, table_ptr, sequences, table_width, page_count, ROWS: gl.constexpr, PAGE: gl.constexpr
):
    """Where groups' entries go: their page's first byte, their line in it, and whether at all."""
    here = entry >= 0
    sequence = gl.minimum(gl.maximum(sequence, 0), sequences - 1)
    column = gl.minimum(gl.maximum(entry, 0) // ROWS, table_width - 1)
    page = gl.load(table_ptr + sequence * table_width + column, mask=here, other=0).to(gl.int64)
    return gl.minimum(gl.maximum(page, 0), page_count - 1) * PAGE, gl.maximum(entry, 0) % ROWS, here


@gluon.jit
def keep_order():
    """Keeps loads in front of it where they stand: the assembler would put them off until they are used."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


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
    # Pieces of their own, for the compiler puts a barrier between accesses to one. Six of eight blocks of key
    # weights, which leaves room for a second program.
    lat0_s = gl.allocate_shared_memory(gl.bfloat16, [16, 128], TILE)
    lat1_s = gl.allocate_shared_memory(gl.bfloat16, [16, 128], TILE)
    lat2_s = gl.allocate_shared_memory(gl.bfloat16, [16, 128], TILE)
    lat3_s = gl.allocate_shared_memory(gl.bfloat16, [16, 128], TILE)
    key0_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    key1_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    key2_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    key3_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    key4_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    key5_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    early = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    last = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(early, count=1)
    mbarrier.init(last, count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(early, 65536)
    tma.async_copy_global_to_shared(key_desc, [0, 0], early, key0_s)
    tma.async_copy_global_to_shared(key_desc, [0, 64], early, key1_s)
    tma.async_copy_global_to_shared(key_desc, [0, 128], early, key2_s)
    tma.async_copy_global_to_shared(key_desc, [0, 192], early, key3_s)
    mbarrier.expect(last, 32768)
    tma.async_copy_global_to_shared(key_desc, [0, 256], last, key4_s)
    tma.async_copy_global_to_shared(key_desc, [0, 320], last, key5_s)
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, SLAB))
    w0 = gl.load(norm_ptr + c)
    w1 = gl.load(norm_ptr + 128 + c)
    w2 = gl.load(norm_ptr + 256 + c)
    w3 = gl.load(norm_ptr + 384 + c)
    grid_wait()
    grid_release()
    row = gl.program_id(0) * 16 + gl.arange(0, 8, layout=gl.SliceLayout(1, SLAB))
    entry0, seq0 = named(entry_ptr, seq_ptr, row, count)
    entry1, seq1 = named(entry_ptr, seq_ptr, row + 8, count)
    barrier()  # or these loads would come last
    row8 = gl.program_id(0) * 16 + gl.arange(0, 8, layout=gl.SliceLayout(1, GROUP))
    column = gl.arange(0, M * D, layout=gl.SliceLayout(0, GROUP))[None, :]
    at = row8.to(gl.int64)[:, None] * (M * D) + column
    later = (row8 + 8 < count)[:, None] & (at >= 0)
    first = gl.minimum(row8, count - 1).to(gl.int64)[:, None] * (M * D) + column  # a mask clears registers
    kv = gl.load(kv_ptr + first)
    if M == 2:
        gate = gl.load(gate_ptr + first)
    keep_order()
    start0, line0, here0 = places(entry0, seq0, table_ptr, sequences, table_width, page_count, ROWS, PAGE)
    start1, line1, here1 = places(entry1, seq1, table_ptr, sequences, table_width, page_count, ROWS, PAGE)
    cos, sin = turns(cos_ptr, sin_ptr, row, row < count, 8, HALF_ROPE, SLAB)
    x = pooled(kv, gate) if M == 2 else kv.to(gl.float32)
    kv = gl.load(kv_ptr + at + 8 * M * D, mask=later)  # into the registers that pooling has freed
    if M == 2:
        gate = gl.load(gate_ptr + at + 8 * M * D, mask=later)
    keep_order()
    x0, x1, x2, x3 = latents(x, w0, w1, w2, w3, eps)
    lat0_s.slice(0, 8, dim=0).store(half(x0))
    lat1_s.slice(0, 8, dim=0).store(half(x1))
    lat2_s.slice(0, 8, dim=0).store(half(x2))
    lat3_s.slice(0, 8, dim=0).store(half(x3))
    x3 = turned(x3, cos, sin, 8)
    payload = pages_ptr + start0 + MAIN + line0 * (D // 2)
    inverse = write_scales(x0, x1, x2, x3, pages_ptr + start0 + MAIN_SCALES + line0 * (D // 16), here0)
    write_codes(x0, inverse, payload, here0, 0, "0")
    write_codes(x1, inverse, payload, here0, 1, "1")
    write_codes(x2, inverse, payload, here0, 2, "2")
    write_codes(x3, inverse, payload, here0, 3, "3")
    cos, sin = turns(cos_ptr, sin_ptr, row + 8, row + 8 < count, 8, HALF_ROPE, SLAB)
    x = pooled(kv, gate) if M == 2 else kv.to(gl.float32)
    x0, x1, x2, x3 = latents(x, w0, w1, w2, w3, eps)
    lat0_s.slice(8, 8, dim=0).store(half(x0))
    lat1_s.slice(8, 8, dim=0).store(half(x1))
    lat2_s.slice(8, 8, dim=0).store(half(x2))
    lat3_s.slice(8, 8, dim=0).store(half(x3))
    fence_async_shared()
    barrier()
    # The keys' products, while the second groups' entries are packed.
    acc = gl.full([128, 16], 0.0, gl.float32, KACC)
    mbarrier.wait(early, 0)
    acc = warpgroup_mma(key0_s, lat0_s.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(key1_s, lat0_s.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(key2_s, lat1_s.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(key3_s, lat1_s.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
    mbarrier.wait(last, 0)
    acc = warpgroup_mma(key4_s, lat2_s.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(key5_s, lat2_s.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(4, deps=[acc])
    barrier()
    mbarrier.expect(early, 32768)
    tma.async_copy_global_to_shared(key_desc, [0, 384], early, key0_s)
    tma.async_copy_global_to_shared(key_desc, [0, 448], early, key1_s)
    x3 = turned(x3, cos, sin, 8)
    payload = pages_ptr + start1 + MAIN + line1 * (D // 2)
    inverse = write_scales(x0, x1, x2, x3, pages_ptr + start1 + MAIN_SCALES + line1 * (D // 16), here1)
    write_codes(x0, inverse, payload, here1, 0, "0")
    write_codes(x1, inverse, payload, here1, 1, "1")
    write_codes(x2, inverse, payload, here1, 2, "2")
    write_codes(x3, inverse, payload, here1, 3, "3")
    row = gl.program_id(0) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, KEYS))
    cos, sin = turns(cos_ptr, sin_ptr, row, row < count, 16, HALF_ROPE, KEYS)
    start = pages_ptr + both(start0, start1)
    line = both(line0, line1)
    here = both(here0, here1)
    key_weight = gl.load(key_norm_ptr + gl.arange(0, 128, layout=gl.SliceLayout(0, KEYS)))
    mbarrier.wait(early, 1)
    acc = warpgroup_mma(key0_s, lat3_s.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(key1_s, lat3_s.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    key = gl.convert_layout(gl.permute(acc, (1, 0)), KEYS)
    key = half(key).to(gl.float32)
    factor = inverse_root(squares(key) * (1.0 / 128) + eps)
    high = factor.to(gl.float32)
    low = (factor - high.to(gl.float64)).to(gl.float32)
    key = normed(key, key_weight, high, low)
    key = turned(key, cos, sin, 16)
    parts = gl.reshape(gl.abs(key), [16, 4, 32])
    amax = gl.maximum(gl.max(parts, axis=2), 7.052966104933725e-38)
    code = ((amax * 0.16666667163372040).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - code) << 23).to(gl.float32, bitcast=True) * 6.103515625e-05
    byte = codes(gl.reshape(gl.reshape(key, [16, 4, 32]) * inverse[:, :, None], [16, 32, 2, 2]))
    P: gl.constexpr = byte.type.layout
    b = gl.arange(0, 32, layout=gl.SliceLayout(0, P))
    at = words(gl.convert_layout(start + INDEX + line * 64, gl.SliceLayout(1, P)))[:, None] + b[None, :]
    gl.store(at, byte, mask=gl.convert_layout(here, gl.SliceLayout(1, P))[:, None])
    Q: gl.constexpr = code.type.layout
    g = gl.arange(0, 4, layout=gl.SliceLayout(0, Q))
    at = gl.convert_layout(start + INDEX_SCALES + line * 4, gl.SliceLayout(1, Q))[:, None] + g[None, :]
    gl.store(at, code.to(gl.uint8), mask=gl.convert_layout(here, gl.SliceLayout(1, Q))[:, None])
    mbarrier.invalidate(early)
    mbarrier.invalidate(last)


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
