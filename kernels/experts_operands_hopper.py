# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""MXFP4 weights as the left operand of bf16 products on Hopper: expanded in registers, half a block of 128
channels at a time, while the half before is multiplied.

What is expanded is exact, times 2^-32. ptxas keeps the order only while registers last: with 64 channels it
does, with 128 it expanded after the product (docs/performance.md, "Experts").
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

SHARED_W = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))
SHARED_X = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Eight E2M1 channels and their scale (two bf16, value·2^126) to eight bf16, by nibbles (3, 7), (2, 6), (1,
# 5), (0, 4).
_FP4_ASM = gl.constexpr("""
{
.reg .b32 a, b, c, d, s;
shr.b32 a, $8, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 a, $8, 0x80008000, a, 0xEA;
mul.rn.bf16x2 a, a, $9;
mov.b32 {$0, $1}, a;
shr.b32 b, $8, 2;
and.b32 b, b, 0x01C001C0;
shl.b32 s, $8, 4;
lop3.b32 b, s, 0x80008000, b, 0xEA;
mul.rn.bf16x2 b, b, $9;
mov.b32 {$2, $3}, b;
and.b32 c, $8, 0x00F000F0;
mul.lo.u32 c, c, 0x104;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 c, c, $9;
mov.b32 {$4, $5}, c;
and.b32 d, $8, 0x000F000F;
mul.lo.u32 d, d, 0x1040;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 d, d, $9;
mov.b32 {$6, $7}, d;
}
""")

# Words of 64 rows, 128 channels: a thread has four of rows g and g + 8, a scale group of each.
_WORDS4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
)
_GROUPS4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)


# The same of two words of each group, 64 channels.
_WORDS2 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
_GROUPS2 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 2],
    )
)


@gluon.constexpr_function
def wide(warps, n):
    """wgmma's sum [16 warps, n]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16])


@gluon.constexpr_function
def wide_left(warps, n):
    """wgmma's left operand [16 warps, 128]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16]), 2)


@gluon.jit
def scales_of(scale, block, columns: gl.constexpr):
    """E8M0 bytes [64, 4] of 64 rows, channels 128·block on."""
    r3 = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS4)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _GROUPS4)))
    return gl.load(scale + r3[:, None] * (columns // 32) + block * 4 + group[None, :])


@gluon.jit
def _halves(words):
    """Words [64, 16] as those of the first and the last 64 channels in the product's order, [64, 8] each."""
    parts = gl.permute(gl.reshape(words, [64, 4, 2, 2]), (0, 1, 3, 2))
    low, high = gl.split(parts)
    return (
        gl.convert_layout(gl.reshape(low, [64, 8]), _WORDS2, assert_trivial=True),
        gl.convert_layout(gl.reshape(high, [64, 8]), _WORDS2, assert_trivial=True),
    )


@gluon.jit
def expand(words, scales, N: gl.constexpr):
    """wgmma's left operand bf16·2^-32 [64, 64] of words [64, 8] and their scales."""
    power = gl.minimum(scales.to(gl.int32) + 94, 254) * 0x00800080
    power = gl.convert_layout(power, gl.SliceLayout(2, _GROUPS2), assert_trivial=True)
    wide_ = power[:, :, None] + gl.full([64, 4, 2], 0, gl.int32, _GROUPS2)
    scale = gl.convert_layout(gl.reshape(wide_, [64, 8]), _WORDS2, assert_trivial=True)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _FP4_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale], is_pure=True, pack=1,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16),
    )  # fmt: skip
    front = gl.join(gl.join(d0, d1), gl.join(c0, c1))
    both = gl.join(front, gl.join(gl.join(b0, b1), gl.join(a0, a1)))  # [64, word, half, 2, 2]
    parts = gl.reshape(gl.permute(both, (0, 1, 4, 3, 2)), [64, 4, 4, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [64, 64]), wide_left(4, N))


@gluon.jit
def _start(left, right, acc, extra, more, WIDE: gl.constexpr, E: gl.constexpr):
    """A product with left added to acc and, of a wide tile, to more: under way."""
    acc = warpgroup_mma(left, right, acc, is_async=True)
    if WIDE:
        more = warpgroup_mma(gl.convert_layout(left, wide_left(4, E)), extra, more, is_async=True)
    return acc, more


@gluon.jit
def ended(acc, more, WIDE: gl.constexpr):
    """The products that `_start` began, done."""
    if WIDE:
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, more


@gluon.jit
def multiply_rows(
    shared, START: gl.constexpr, scales, x, e, acc, more, last, last_more, FIRST: gl.constexpr,
    WIDE: gl.constexpr, N: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """Begins acc + 64 rows of weights times 128 channels of x, in two halves: one is expanded while the one
    before, of `last` unless FIRST, is multiplied.
    """
    low, high = _halves(shared.slice(START, 64, dim=0).load(_WORDS4))
    left = expand(low, scales, N)
    if not FIRST:
        last, last_more = ended(last, last_more, WIDE)
    acc, more = _start(
        left, x.slice(0, 64, dim=1).permute((1, 0)), acc, e.slice(0, 64, dim=1).permute((1, 0)), more, WIDE, E
    )
    left = expand(high, scales, N)
    acc, more = ended(acc, more, WIDE)
    acc, more = _start(
        left,
        x.slice(64, 64, dim=1).permute((1, 0)),
        acc,
        e.slice(64, 64, dim=1).permute((1, 0)),
        more,
        WIDE,
        E,
    )
    return acc, more, last, last_more
