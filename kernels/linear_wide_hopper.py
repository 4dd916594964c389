# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of some hundred tokens on Hopper with what stands before or after them in the same launch:
activations quantised first, or SwiGLU, quantised, behind.

Otherwise as `linear_many_hopper` with all channels in one program. Quantising is shared out over the programs
that surely run at once, which put the codes into memory; all wait until they are there. That takes what a
launch of its own does. Gate and up of the same hidden channels are the halves of one tile, so a program has
whole groups of 32 hidden channels.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.codes_hopper import FLAT, FLAT2, TILE8, codes_of, natural, power_of_two
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, wait_for
from cedar.kernels.linear_many_hopper import part, scaled, sums, written
from cedar.kernels.linear_triton import _zeros, multiprocessors
from cedar.kernels.prepared import CODES, Prepared, empty_codes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TOKENS = 128  # a program
ROWS = 128  # of weights
STAGES = 4
PIECE = 32  # tokens that a program quantises at a time, 128 channels of them
LEFT = gl.constexpr(65536)  # what a program that leaves adds to the counter of those that have quantised


@gluon.jit
def _fence():
    """What other programs' stores wrote can be copied in bulk, once it can be read."""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def quantise_share(
    x_ptr, code_ptr, word_ptr, number, sharers, tokens, x_stride, BLOCKS: gl.constexpr, P: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Every `sharers`-th piece of P tokens and 128 channels, from `number` on, to codes and words of scales.
    The next piece is on its way while one is quantised.
    """
    L: gl.constexpr = natural(WARPS, P)
    i = gl.arange(0, P, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    pieces = (tokens + P - 1) // P * BLOCKS
    t = number // BLOCKS * P + i
    at = t.to(gl.int64) * x_stride + number % BLOCKS * 128
    ahead = gl.load(x_ptr + at[:, None] + c[None, :], mask=(t < tokens)[:, None], other=0.0)
    for piece in range(number, pieces, sharers):
        x = ahead
        next = piece + sharers
        t = next // BLOCKS * P + i
        at = t.to(gl.int64) * x_stride + next % BLOCKS * 128
        ahead = gl.load(
            x_ptr + at[:, None] + c[None, :], mask=((t < tokens) & (next < pieces))[:, None], other=0.0
        )
        y, word = codes_of(x, P)
        t = piece // BLOCKS * P + i
        to = t.to(gl.int64)[:, None] * (BLOCKS * 128) + (piece % BLOCKS * 128 + c)[None, :]
        gl.store(code_ptr + to, gl.convert_layout(y, L), mask=(t < tokens)[:, None])
        t2 = piece // BLOCKS * P + gl.arange(0, P, layout=word.type.layout)
        gl.store(word_ptr + t2 * BLOCKS + piece % BLOCKS, word, mask=t2 < tokens)


@gluon.jit
def store_hidden(
    total, out_ptr, out_scale_ptr, row, token, tokens, width, limit, M: gl.constexpr, H: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """SwiGLU of total [M, 2 H], gate and up side by side, quantised: codes [tokens, width] from column `row`
    on, and a scale byte for every 32.
    """
    gate, up = gl.split(gl.permute(gl.reshape(total, [M, 2, H]), (0, 2, 1)))
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
    up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
    hidden = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16).to(gl.float32)
    groups = gl.reshape(hidden, [M, H // 32, 32])
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    C: gl.constexpr = code.type.layout
    t3 = token + gl.arange(0, M, layout=gl.SliceLayout(1, C))
    g3 = row // 32 + gl.arange(0, H // 32, layout=gl.SliceLayout(0, C))
    at = out_scale_ptr + t3[:, None] * (width // 32) + g3[None, :]
    gl.store(at, code.to(gl.uint8), mask=(t3 < tokens)[:, None])
    wide = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    down = ((254 - wide) << 23).to(gl.float32, bitcast=True)
    J: gl.constexpr = gl.BlockedLayout([1, 16], [512 // H, H // 16], [WARPS, 1], [1, 0])
    byte = gl.convert_layout(gl.reshape((groups * down).to(gl.float8e4nv), [M, H]), J)
    t2 = token + gl.arange(0, M, layout=gl.SliceLayout(1, J))
    r2 = row + gl.arange(0, H, layout=gl.SliceLayout(0, J))
    gl.store(out_ptr + t2[:, None].to(gl.int64) * width + r2[None, :], byte, mask=(t2 < tokens)[:, None])


@gluon.jit
def wide(
    w_desc, x_desc, x_ptr, code_ptr, word_ptr, scale_ptr, out_ptr, out_scale_ptr, count_ptr, tokens, outputs,
    x_stride, sharers, limit,
    COLUMNS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    P: gl.constexpr, QUANTISE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / R, ceil(tokens / M)): x [tokens, COLUMNS] times weights [outputs, COLUMNS].

    QUANTISE: x_ptr is bf16; the first `sharers` programs put its codes where x_desc (code_ptr) and word_ptr
    read them. count_ptr is 0 and is left so. GATED: the weights are gate over up, of outputs / 2 rows each;
    out E4M3 [tokens, outputs / 2] and its scale bytes. Else out bf16 [tokens, outputs].
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    NB: gl.constexpr = power_of_two(BLOCKS)
    H: gl.constexpr = R // 2
    row = gl.program_id(0) * (H if GATED else R)
    token = gl.program_id(1) * M
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], TILE8)
    sw_s = gl.allocate_shared_memory(gl.int32, [NB, R // 32], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), (M + R) * 128)
        if GATED:
            w = w_s.index(i)
            tma.async_copy_global_to_shared(w_desc, [row, i * 128], bars.index(i), w.slice(0, H, dim=0))
            tma.async_copy_global_to_shared(
                w_desc, [outputs // 2 + row, i * 128], bars.index(i), w.slice(H, H, dim=0)
            )
        else:
            tma.async_copy_global_to_shared(w_desc, [row, i * 128], bars.index(i), w_s.index(i))
    S: gl.constexpr = gl.BlockedLayout([1, R // 32], [32, 1], [WARPS, 1], [1, 0])
    b4 = gl.arange(0, NB, layout=gl.SliceLayout(1, S))
    g4 = gl.arange(0, R // 32, layout=gl.SliceLayout(0, S))
    of_rows = row // 32 + g4
    if GATED:
        of_rows += gl.where(g4 < H // 32, 0, (outputs // 2 - H) // 32)
    at4 = (of_rows * BLOCKS)[None, :] + gl.minimum(b4, BLOCKS - 1)[:, None]
    words = gl.load(scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at4)
    sw_s._reinterpret(gl.int32, [NB, R // 32], FLAT2).store(words)
    grid_wait()
    grid_release()
    if QUANTISE:
        number = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        if number < sharers:
            word_to = word_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
            quantise_share(x_ptr, code_ptr, word_to, number, sharers, tokens, x_stride, BLOCKS, P, WARPS)
            _fence()
            barrier()
            gl.atomic_add(count_ptr, 1, sem="release")
        wait_for(count_ptr, sharers)
        _fence()
        barrier()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [token, i * 128], bars.index(i), x_s.index(i))
    barrier()
    W: gl.constexpr = sums(WARPS, M, R)
    a = gl.full([M, R], 0.0, gl.float32, W)
    d = a
    acc = gl.reshape(a, [M, R // 32, 32])
    C: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    t = gl.minimum(token + gl.arange(0, M, layout=gl.SliceLayout(1, C)), tokens - 1)
    word_at = word_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + t * BLOCKS
    ahead = gl.load(word_at)
    for turn in range(BLOCKS):
        slot = turn % STAGES
        sx = ahead
        ahead = gl.load(word_at + gl.minimum(turn + 1, BLOCKS - 1))
        sw = sw_s.index(turn).load(gl.SliceLayout(0, C))
        mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
        x = x_s.index(slot)
        w = w_s.index(slot)
        p = part(x, w, 0, a)
        q = part(x, w, 1, d)
        a, q = warpgroup_mma_wait(1, deps=[p, q])
        acc = scaled(acc, a, sx, sw, 0, M, R)
        p = part(x, w, 2, a)
        d, p = warpgroup_mma_wait(1, deps=[q, p])
        acc = scaled(acc, d, sx, sw, 1, M, R)
        q = part(x, w, 3, d)
        a, q = warpgroup_mma_wait(1, deps=[p, q])
        acc = scaled(acc, a, sx, sw, 2, M, R)
        d = warpgroup_mma_wait(0, deps=[q])
        barrier()
        next = turn + STAGES
        more = next < BLOCKS
        mbarrier.expect(bars.index(slot), (M + R) * 128, pred=more)
        if GATED:
            tma.async_copy_global_to_shared(
                w_desc, [row, next * 128], bars.index(slot), w.slice(0, H, dim=0), pred=more
            )
            tma.async_copy_global_to_shared(
                w_desc, [outputs // 2 + row, next * 128], bars.index(slot), w.slice(H, H, dim=0), pred=more
            )
        else:
            tma.async_copy_global_to_shared(w_desc, [row, next * 128], bars.index(slot), w, pred=more)
        tma.async_copy_global_to_shared(x_desc, [token, next * 128], bars.index(slot), x, pred=more)
        acc = scaled(acc, d, sx, sw, 3, M, R)
    total = gl.convert_layout(gl.reshape(acc, [M, R]), W)
    if GATED:
        store_hidden(total, out_ptr, out_scale_ptr, row, token, tokens, outputs // 2, limit, M, H, WARPS)
    else:
        J: gl.constexpr = written(WARPS, R)
        r3 = row + gl.arange(0, R, layout=gl.SliceLayout(0, J))
        t3 = token + gl.arange(0, M, layout=gl.SliceLayout(1, J))
        goal = out_ptr + t3[:, None].to(gl.int64) * outputs + r3[None, :]
        gl.store(goal, gl.convert_layout(total.to(gl.bfloat16), J), mask=(t3 < tokens)[:, None])
    if QUANTISE:
        programs = gl.num_programs(0) * gl.num_programs(1)
        if gl.atomic_add(count_ptr, LEFT, sem="relaxed") // LEFT == programs - 1:
            gl.atomic_xchg(count_ptr, 0, sem="relaxed")


def quantising(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """out bf16 [N, O] = x bf16 [N, I] (rows contiguous), quantised, times E4M3 [O, I]: one launch."""
    codes = empty_codes(x)
    assert codes.scale is not None
    _launch(x, codes, weight, scale, out, out, 0.0)


def gated(x: Prepared, weight: torch.Tensor, scale: torch.Tensor, limit: float) -> Prepared:
    """SwiGLU of x [N, d] times gate over up, E4M3 [2 I, d], as codes [N, I]: one launch."""
    tokens, hidden = x.values.shape[0], weight.shape[0] // 2
    values = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(tokens, hidden // 32, dtype=torch.uint8, device=weight.device)
    _launch(None, x, weight, scale, values, scales, limit)
    return Prepared(values, CODES, scales)


def _launch(
    x: torch.Tensor | None,
    codes: Prepared,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    limit: float,
) -> None:
    outputs, columns = weight.shape
    tokens, index, gates = out.shape[0], out.device.index or 0, x is None
    grid = outputs // ROWS, triton.cdiv(tokens, TOKENS)
    wide[grid](
        TensorDescriptor(
            weight, [outputs, columns], [columns, 1], [ROWS // 2 if gates else ROWS, 128], TILE8.value
        ),
        TensorDescriptor(codes.values, [tokens, columns], [columns, 1], [TOKENS, 128], TILE8.value),
        out if x is None else x, codes.values, codes.scale, scale, out, out_scale, _zeros(index), tokens,
        outputs, columns if x is None else x.stride(0), min(grid[0] * grid[1], multiprocessors(index)), limit,
        columns, TOKENS, ROWS, STAGES, 8, PIECE, not gates, gates, num_warps=8, launch_pdl=True,
    )  # fmt: skip
