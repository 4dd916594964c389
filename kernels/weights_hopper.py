# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of few tokens with packed weights on Hopper: every weight byte is read once and goes to
registers directly.

A warp holds 16 rows of weights; four threads share a row, each with 32 neighbouring channels of every 128:
one scale group a
thread. Which of a thread's 32 channels meets which step of the product does not matter so long as
activations are permuted
alike (`permuted` of `linear_triton`), so no value moves between threads, and no warp waits for another.
For 64 tokens and more the same operand goes to wgmma, activations coming through shared memory.
Values are exact in bf16: E2M1 or E4M3 times a power of two, here times 2^-32, which the caller of the sum
gives back.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mma_v2,
)

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed after Triton 3.6

# Four E4M3 channels and their scale (two bf16, value·2^120) to four bf16, by bytes (1, 3), (0, 2).
_FP8_ASM = gl.constexpr("""
{
.reg .b32 a, b, s;
shr.b32 a, $4, 4;
and.b32 a, a, 0x07F007F0;
lop3.b32 a, $4, 0x80008000, a, 0xEA;
mul.rn.bf16x2 a, a, $5;
mov.b32 {$0, $1}, a;
shl.b32 b, $4, 4;
and.b32 b, b, 0x07F007F0;
shl.b32 s, $4, 8;
lop3.b32 b, s, 0x80008000, b, 0xEA;
mul.rn.bf16x2 b, b, $5;
mov.b32 {$2, $3}, b;
}
""")

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
shl.b32 c, $8, 2;
and.b32 c, c, 0x01C001C0;
shl.b32 s, $8, 8;
lop3.b32 c, s, 0x80008000, c, 0xEA;
mul.rn.bf16x2 c, c, $9;
mov.b32 {$4, $5}, c;
shl.b32 d, $8, 6;
and.b32 d, d, 0x01C001C0;
shl.b32 s, $8, 12;
lop3.b32 d, s, 0x80008000, d, 0xEA;
mul.rn.bf16x2 d, d, $9;
mov.b32 {$6, $7}, d;
}
""")

_ROW_LANES = [[1, 0], [2, 0], [4, 0]]
_ROW_WARPS = [[16, 0], [32, 0]]
# Words of 64 rows: FP4 [64, 16], FP8 [64, 32], bf16 [64, 64]; a thread has rows g and g + 8 and a quarter
# of the words.
_WORDS4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_ROW_LANES], _ROW_WARPS, [], [64, 16]
    )
)
_WORDS8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], *_ROW_LANES], _ROW_WARPS, [], [64, 32]
    )
)
_VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        [[0, 32], [0, 64], *_ROW_LANES],
        _ROW_WARPS,
        [],
        [64, 128],
    )
)
_GROUPS4 = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2,
0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4]))  # fmt: skip
_GROUPS8 = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]], [[0, 1,
0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 4, 8]))  # fmt: skip
# Activations [tokens, 128]: a warp's thread has token g (and g + 8) and the same quarter of the channels;
# warps alike.
_TOKENS8 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[0, 32], [0,
64], *_ROW_LANES], [[0, 0], [0, 0]], [], [8, 128]))  # fmt: skip
_TOKENS16 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]], [[0,
32], [0, 64], *_ROW_LANES], [[0, 0], [0, 0]], [], [16, 128]))  # fmt: skip
_ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_WIDE_LEFT = gl.constexpr(gl.DotOperandLayout(0, _WIDE, 2))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [64, 128] bf16, 16 bytes a thread
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _ACC, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _ACC, 2))


@gluon.jit
def _operand(values, SIDE: gl.constexpr, N: gl.constexpr):
    """[N, 128] with 32 channels a thread, as mma's operand (left [N, 128], right [128, N]): a renaming."""
    parts = gl.reshape(values, [N, 4, 8, 2, 2])
    if SIDE == 0:
        out = gl.convert_layout(gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [N, 128]), _LEFT)
    elif SIDE == 2:
        out = gl.convert_layout(gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [N, 128]), _WIDE_LEFT)
    else:
        out = gl.convert_layout(gl.reshape(gl.permute(parts, (2, 3, 1, 4, 0)), [128, N]), _RIGHT)
    return out


@gluon.jit
def load_fp4(weight, scale, block, columns: gl.constexpr):
    """Raw bytes of 64 rows, channels 128·block on: words [64, 16] and E8M0 bytes [64, 4]; rows of
    `columns`.
    """
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS4))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS4))
    words = gl.load(
        weight.to(gl.pointer_type(gl.int32), bitcast=True)
        + r[:, None] * (columns // 8)
        + block * 16
        + word[None, :]
    )
    r3 = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS4)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _GROUPS4)))
    return words, gl.load(scale + r3[:, None] * (columns // 32) + block * 4 + group[None, :])


@gluon.jit
def expand_fp4(words, scales, SIDE: gl.constexpr = 0):
    """mma's left operand bf16·2^-32 [64, 128]."""
    power = gl.minimum(scales.to(gl.int32) + 94, 254) * 0x00800080
    wide = power[:, :, None] + gl.full([64, 4, 4], 0, gl.int32, _GROUPS4)
    scale = gl.convert_layout(gl.reshape(wide, [64, 16]), _WORDS4)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _FP4_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale], is_pure=True, pack=1,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        gl.bfloat16),
    )  # fmt: skip
    front = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    both = gl.join(front, gl.join(gl.join(c0, c1), gl.join(d0, d1)))  # [64, word, pair, 2, 2]
    return _operand(gl.reshape(gl.permute(both, (0, 1, 4, 3, 2)), [64, 128]), SIDE, 64)


@gluon.jit
def load_fp8(weight, scale, block, columns: gl.constexpr):
    """The same of E4M3 rows: words [64, 32]; one E8M0 byte per 32x32 block, [64, 4]."""
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS8))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, _WORDS8))
    words = gl.load(
        weight.to(gl.pointer_type(gl.int32), bitcast=True)
        + r[:, None] * (columns // 4)
        + block * 32
        + word[None, :]
    )
    r3 = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS8)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _GROUPS8)))
    return words, gl.load(scale + (r3 // 32)[:, None] * (columns // 32) + block * 4 + group[None, :])


@gluon.jit
def expand_fp8(words, scales, SIDE: gl.constexpr = 0):
    """mma's left operand bf16·2^-32 [64, 128]."""
    power = gl.minimum(scales.to(gl.int32) + 88, 254) * 0x00800080
    wide = power[:, :, None] + gl.full([64, 4, 8], 0, gl.int32, _GROUPS8)
    scale = gl.convert_layout(gl.reshape(wide, [64, 32]), _WORDS8)
    a0, a1, b0, b1 = gl.inline_asm_elementwise(
        _FP8_ASM, "=h,=h,=h,=h,r,r", [words, scale], is_pure=True, pack=1,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    both = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [64, word, pair, 2]
    return _operand(gl.reshape(gl.permute(both, (0, 1, 3, 2)), [64, 128]), SIDE, 64)


@gluon.jit
def load_bf16(weight, block, columns: gl.constexpr):
    """bf16 rows [64, 128]."""
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, _VALUES))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _VALUES))
    return gl.load(weight + r[:, None] * columns + block * 128 + c[None, :])


@gluon.jit
def load_tokens(x, rows, present, block, T: gl.constexpr):
    """Activations [T, 128]: channels 128·block on of the rows at offsets `rows`; zeros where not present."""
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(x + rows[:, None] + block * 128 + c[None, :], mask=present[:, None], other=0.0)


@gluon.jit
def _copy_tokens(shared, x_ptr, rows, block):
    """Starts copying channels 128·block on of 64 rows at offsets `rows` into shared memory."""
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))
    async_copy.async_copy_global_to_shared(shared, x_ptr + rows[:, None] + block * 128 + c[None, :])
    async_copy.commit_group()


@gluon.jit
def linear_rows(
    x_ptr, weight_ptr, out_ptr, part_ptr, count_ptr, tokens, outputs, x_stride,
    columns: gl.constexpr, T: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / 64, ceil(tokens / T), SPLITS): x·Wᵀ of T tokens with 64 rows of bf16 weights, the
    channels shared out over SPLITS.

    The last split to finish adds the parts in order; count_ptr (zeros) is left as it was found.
    """
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    row = gl.program_id(0) * 64
    token = gl.program_id(1) * T + gl.arange(0, T, layout=gl.SliceLayout(1, LAYOUT))
    present = token < tokens
    rows = gl.minimum(token, tokens - 1).to(gl.int64) * x_stride
    blocks = columns // 128
    each = (blocks + SPLITS - 1) // SPLITS
    first = gl.program_id(2) * each
    last = gl.minimum(first + each, blocks)
    weight = weight_ptr + row.to(gl.int64) * columns
    acc = gl.full([64, T], 0.0, gl.float32, _ACC)
    end = blocks - 1
    words = load_bf16(weight, gl.minimum(first, end), columns)
    x = load_tokens(x_ptr, rows, present, gl.minimum(first, end), T)
    for block in range(first, last):
        left = _operand(words, 0, 64)
        right = _operand(x, 1, T)
        words = load_bf16(weight, gl.minimum(block + 1, end), columns)
        x = load_tokens(x_ptr, rows, present, gl.minimum(block + 1, end), T)
        acc = mma_v2(left, right, acc)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
    t = gl.program_id(1) * T + gl.arange(0, T, layout=gl.SliceLayout(0, _ACC))
    at = t[None, :].to(gl.int64) * outputs + r[:, None]
    mine = (t < tokens)[None, :]
    if SPLITS == 1:
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mine)
    else:
        size = tokens * outputs
        gl.store(part_ptr + gl.program_id(2) * size + at, acc, mask=mine)
        _barrier()
        cell = count_ptr + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        if gl.atomic_add(cell, 1, sem="acq_rel") == SPLITS - 1:
            total = gl.full([64, T], 0.0, gl.float32, _ACC)
            for i in range(SPLITS):
                total += gl.load(part_ptr + i * size + at, mask=mine, other=0.0, cache_modifier=".cg")
            gl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mine)
            gl.atomic_xchg(cell, 0)
