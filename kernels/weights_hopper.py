# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of few tokens with bf16 weights on Hopper: every weight byte is read once and goes to registers
directly.

A warp holds 16 rows of weights; four threads share a row, each with 32 neighbouring channels of every 128.
Which of a thread's 32 channels meets which step of the product does not matter so long as activations are
permuted alike, so no value moves between threads, and no warp waits for another.
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

_ROW_LANES = [[1, 0], [2, 0], [4, 0]]
_ROW_WARPS = [[16, 0], [32, 0]]
# Values of 64 rows: a thread has rows g and g + 8 and a quarter of the channels.
_VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        [[0, 32], [0, 64], *_ROW_LANES],
        _ROW_WARPS,
        [],
        [64, 128],
    )
)
# Activations [tokens, 128]: a warp's thread has token g (and g + 8) and the same quarter of the channels;
# warps alike.
_TOKENS8 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[0, 32], [0,
64], *_ROW_LANES], [[0, 0], [0, 0]], [], [8, 128]))  # fmt: skip
_TOKENS16 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]], [[0,
32], [0, 64], *_ROW_LANES], [[0, 0], [0, 0]], [], [16, 128]))  # fmt: skip
_ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _ACC, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _ACC, 2))


@gluon.jit
def _operand(values, RIGHT: gl.constexpr, N: gl.constexpr):
    """[N, 128] with 32 channels a thread, as mma's operand (left [N, 128], right [128, N]): a renaming."""
    parts = gl.reshape(values, [N, 4, 8, 2, 2])
    if RIGHT:
        out = gl.convert_layout(gl.reshape(gl.permute(parts, (2, 3, 1, 4, 0)), [128, N]), _RIGHT)
    else:
        out = gl.convert_layout(gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [N, 128]), _LEFT)
    return out


@gluon.jit
def load_bf16(weight, block, rows, columns: gl.constexpr):
    """bf16 rows [64, 128]; the last of `rows` again for those that are not there."""
    r = gl.minimum(gl.arange(0, 64, layout=gl.SliceLayout(1, _VALUES)), rows - 1)
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _VALUES))
    return gl.load(weight + r[:, None] * columns + block * 128 + c[None, :])


@gluon.jit
def load_tokens(x, rows, present, block, T: gl.constexpr):
    """Activations [T, 128]: channels 128·block on of the rows at offsets `rows`; zeros where not present."""
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(x + rows[:, None] + block * 128 + c[None, :], mask=present[:, None], other=0.0)


@gluon.jit
def linear_rows(
    x_ptr, weight_ptr, out_ptr, part_ptr, count_ptr, tokens, outputs, x_stride,
    columns: gl.constexpr, T: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(outputs / 64), ceil(tokens / T), SPLITS): x·Wᵀ of T tokens with 64 rows of bf16 weights, the
    channels shared out over SPLITS.

    The last split to finish adds the parts in order; count_ptr (zeros) is left as it was found. For
    `launch_pdl`.
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
    words = load_bf16(weight, gl.minimum(first, end), outputs - row, columns)
    grid_wait()
    grid_release()
    x = load_tokens(x_ptr, rows, present, gl.minimum(first, end), T)
    for block in range(first, last):
        left = _operand(words, False, 64)
        right = _operand(x, True, T)
        words = load_bf16(weight, gl.minimum(block + 1, end), outputs - row, columns)
        x = load_tokens(x_ptr, rows, present, gl.minimum(block + 1, end), T)
        acc = mma_v2(left, right, acc)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
    t = gl.program_id(1) * T + gl.arange(0, T, layout=gl.SliceLayout(0, _ACC))
    at = t[None, :].to(gl.int64) * outputs + r[:, None]
    mine = (t < tokens)[None, :] & (r < outputs)[:, None]
    if SPLITS == 1:
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mine)
    else:
        size = tokens * outputs
        gl.store(part_ptr + gl.program_id(2) * size + at, acc, mask=mine)
        barrier()
        cell = count_ptr + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        if gl.atomic_add(cell, 1, sem="acq_rel") == SPLITS - 1:
            total = gl.full([64, T], 0.0, gl.float32, _ACC)
            for i in gl.static_range(SPLITS):
                total += gl.load(part_ptr + i * size + at, mask=mine, other=0.0, cache_modifier=".cg")
            gl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mine)
            gl.atomic_xchg(cell, 0)
