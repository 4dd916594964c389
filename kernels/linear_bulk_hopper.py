# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""FP8 products of many tokens on Hopper: rows of weights are wgmma's rows, expanded to bf16 with their scales
in registers, tokens its columns, whole sums in one program. Nothing is expanded in memory.

Three trades: one asks for weights and activations, two have half of a tile's rows each and wait for nobody
else, so one expands while the other multiplies. Programs stay, one a multiprocessor, so the next tile's
operands come while a tile is being written.

A thread has eight of every 32 channels side by side, so weights go from shared memory to the left operand
without moving between threads; activations lie in the order in which they meet them (GROUPED), quantised and
read back as bf16. Where a producer has not left them so, all programs do it first, each a share, and
activations are asked for when all are there; that takes what a launch of its own does.

GATED: gate and up in one launch with SwiGLU. Of 16 rows that a warp has eight are gate's and eight up's, so
that a thread holds both of a hidden channel.
"""

from __future__ import annotations

import torch
import triton
from cedar.kernels.codes_hopper import TILE8, natural
from cedar.kernels.experts_hopper import round_trip, round_trip_rows
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait, wait_for
from cedar.kernels.linear_triton import GROUPED, _zeros, multiprocessors
from cedar.kernels.prepared import Prepared
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

ROWS = 128  # of weights a program
TOKENS = 256  # a program
STAGES = 3  # of weights, 128 channels each
AHEAD = 5  # of activations, 64 channels each
TOGETHER = 8  # tiles of tokens whose programs are neighbours, so that weights come from the cache
PIECE = 32  # tokens that a program quantises at a time, 128 channels of them
LEFT = gl.constexpr(65536)  # what a program that leaves adds to the counter of those who have quantised
TILE16 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

# Four E4M3 bytes and four bf16 scales to four bf16: 2^-120 of their value times those.
_EXPAND = gl.constexpr("""
{
.reg .b32 t0, t1, a0, a1;
prmt.b32 t0, $2, 0, 0x1404;
prmt.b32 t1, $2, 0, 0x3424;
shr.b32 a0, t0, 4;
shr.b32 a1, t1, 4;
and.b32 a0, a0, 0x07F007F0;
and.b32 a1, a1, 0x07F007F0;
lop3.b32 a0, t0, 0x80008000, a0, 0xEA;
lop3.b32 a1, t1, 0x80008000, a1, 0xEA;
mul.rn.bf16x2 $0, a0, $3;
mul.rn.bf16x2 $1, a1, $4;
}
""")
_LANES = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
_BYTES = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]]
# Bytes of 64 rows, and of 32 of which a warp has eight: a thread has a quarter of every 32 channels of a row.
_RAW = gl.constexpr(gl.DistributedLinearLayout([*_BYTES, [8, 0]], _LANES, [[16, 0], [32, 0]], [], [64, 128]))
_RAW_HALF = gl.constexpr(gl.DistributedLinearLayout(_BYTES, _LANES, [[8, 0], [16, 0]], [], [32, 128]))
# The same by scale groups: [rows, group, channel].
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [8, 0, 0]],
        [[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 32],
    )
)
CONSUMER_REGISTERS = 232
LOADER_REGISTERS = 40


@gluon.constexpr_function
def sums(n):
    """wgmma's sum [64 rows, n tokens]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def left(n):
    """wgmma's left operand [64 rows, 64]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16]), 2)


@gluon.jit
def _fence():
    """What other programs' stores wrote can be copied in bulk, once it can be read."""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def quantise_share(x_ptr, out_ptr, number, sharers, tokens, x_stride, BLOCKS: gl.constexpr, P: gl.constexpr):
    """Every `sharers`-th piece of P tokens and 128 channels, from `number` on, quantised, read back and put
    into the order GROUPED. The next piece is on its way meanwhile.
    """
    L: gl.constexpr = natural(4, P)
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
        seen = round_trip(gl.reshape(x.to(gl.float32), [P, 4, 32])).to(gl.bfloat16)
        parts = gl.permute(gl.reshape(seen, [P, 4, 4, 2, 2, 2]), (0, 1, 3, 4, 2, 5))
        t = piece // BLOCKS * P + i
        to = t.to(gl.int64)[:, None] * (BLOCKS * 128) + (piece % BLOCKS * 128 + c)[None, :]
        gl.store(out_ptr + to, gl.convert_layout(gl.reshape(parts, [P, 128]), L), mask=(t < tokens)[:, None])


@gluon.jit
def _raw(w, HALF: gl.constexpr, GATED: gl.constexpr):
    """Bytes [64, 128] of a stage: one half of its rows; gate's and up's beside each other."""
    if GATED:  # rows 8 w + g of gate and of up become 16 w + g and 16 w + 8 + g
        gate = w.slice(32 * HALF, 32, dim=0).load(_RAW_HALF)
        both = gl.join(gate, w.slice(64 + 32 * HALF, 32, dim=0).load(_RAW_HALF))
        parts = gl.permute(gl.reshape(both, [4, 8, 128, 2]), (0, 3, 1, 2))
        out = gl.convert_layout(gl.reshape(parts, [64, 128]), _RAW)
    else:
        out = w.slice(64 * HALF, 64, dim=0).load(_RAW)
    return out


@gluon.jit
def _halves(v):
    """The first and the last 64 channels of [64, 128]."""
    return gl.split(gl.permute(gl.reshape(v, [64, 2, 64]), (0, 2, 1)))


@gluon.jit
def _powers(code):
    """bf16 2^(code - 127 + 120 - 32) of scale bytes [64, 4], for every channel of half a block [64, 64]:
    weights are 2^-32 of their value, which leaves bf16 room for their scales.
    """
    power = (gl.minimum(code.to(gl.int32) + 88, 254) << 7).to(gl.int16)
    every = power[:, :, None] + gl.full([64, 4, 32], 0, gl.int16, _SCALES)
    return _halves(gl.reshape(every, [64, 128]))


@gluon.jit
def _operand(raw, power, N: gl.constexpr):
    """wgmma's left operand of bytes [64, 64]: a renaming."""
    power = gl.convert_layout(power, raw.type.layout).to(gl.bfloat16, bitcast=True)
    wide = gl.inline_asm_elementwise(
        _EXPAND, "=r,=r,r,r,r", [raw, power], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    parts = gl.permute(gl.reshape(wide, [64, 2, 4, 2, 2, 2]), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.reshape(parts, [64, 64]), left(N))


@gluon.jit
def _ask_w(w_desc, bar, w, row, up, block, pred, GATED: gl.constexpr):
    mbarrier.expect(bar, 128 * 128, pred=pred)
    if GATED:
        tma.async_copy_global_to_shared(w_desc, [row, block * 128], bar, w.slice(0, 64, dim=0), pred=pred)
        tma.async_copy_global_to_shared(w_desc, [up, block * 128], bar, w.slice(64, 64, dim=0), pred=pred)
    else:
        tma.async_copy_global_to_shared(w_desc, [row, block * 128], bar, w, pred=pred)


@gluon.jit
def _ask_x(x_desc, bar, x, token, step, pred, N: gl.constexpr):
    mbarrier.expect(bar, N * 128, pred=pred)
    tma.async_copy_global_to_shared(x_desc, [token, step * 64], bar, x, pred=pred)


@gluon.jit
def tile_of(number, tokens, outputs, N: gl.constexpr, TOGETHER: gl.constexpr, GATED: gl.constexpr):
    """First row and token of a tile; tiles of TOGETHER times N tokens go through all rows together."""
    tiles = outputs // 128
    tall = (tokens + N - 1) // N
    group = number // (TOGETHER * tiles)
    some = gl.minimum(TOGETHER, tall - group * TOGETHER)
    within = number - group * (TOGETHER * tiles)
    return within // some * (64 if GATED else 128), (group * TOGETHER + within % some) * N


@gluon.jit
def _load(
    w_desc, x_desc, count_ptr, w_s, x_s, bars, xbars, free, xfree, tokens, outputs, programs, quantised,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, N: gl.constexpr, TOGETHER: gl.constexpr,
    QUANTISE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Asks for all weights and activations in turn, tile after tile."""
    first = 0
    for number in range(gl.program_id(0), programs, gl.num_programs(0)):
        row, token = tile_of(number, tokens, outputs, N, TOGETHER, GATED)
        for block in range(BLOCKS):
            turn = first + block
            slot = turn % STAGES
            mbarrier.wait(free.index(slot), (turn // STAGES - 1) & 1, pred=turn >= STAGES)
            _ask_w(w_desc, bars.index(slot), w_s.index(slot), row, row + outputs // 2, block, True, GATED)
            if QUANTISE:  # noqa: SIM102  (the one is known when this is compiled, the other is not)
                if turn == 0:
                    wait_for(count_ptr, quantised)
                    _fence()
            for half in gl.static_range(2):
                step = 2 * turn + half
                to = step % AHEAD
                mbarrier.wait(xfree.index(to), (step // AHEAD - 1) & 1, pred=step >= AHEAD)
                _ask_x(x_desc, xbars.index(to), x_s.index(to), token, 2 * block + half, True, N)
        first += BLOCKS


@gluon.jit
def _multiply(
    x_ptr, seen_ptr, scale_ptr, out_ptr, count_ptr, w_s, x_s, bars, xbars, free, xfree, tokens, outputs,
    programs, x_stride, limit,
    HALF: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, N: gl.constexpr,
    TOGETHER: gl.constexpr, P: gl.constexpr, QUANTISE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One half of the tiles' rows: four warps, which wait for nobody but the loader, so that one half's
    weights are expanded while the other's are multiplied.
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    if QUANTISE:
        own, all = 2 * gl.program_id(0) + HALF, 2 * gl.num_programs(0)
        quantise_share(x_ptr, seen_ptr, own, all, tokens, x_stride, BLOCKS, P)
        _fence()
        barrier()
        gl.atomic_add(count_ptr, 1, sem="release")
    r4 = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _SCALES)))
    g4 = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _SCALES)))
    if GATED:
        r4 = 32 * HALF + r4 // 16 * 8 + r4 % 8 + gl.where(r4 % 16 < 8, 0, outputs // 2)
    else:
        r4 = 64 * HALF + r4
    first = 0
    for number in range(gl.program_id(0), programs, gl.num_programs(0)):
        row, token = tile_of(number, tokens, outputs, N, TOGETHER, GATED)
        scale_at = scale_ptr + ((row + r4) // 32 * (COLUMNS // 32))[:, None] + g4[None, :]
        code = gl.load(scale_at)
        acc = gl.full([64, N], 0.0, gl.float32, sums(N))
        for block in range(BLOCKS):
            turn = first + block
            slot = turn % STAGES
            one = 2 * turn % AHEAD
            two = (2 * turn + 1) % AHEAD
            mbarrier.wait(bars.index(slot), (turn // STAGES) & 1)
            front, back = _halves(_raw(w_s.index(slot), HALF, GATED))
            power, power2 = _powers(code)
            code = gl.load(scale_at + 4 * gl.minimum(block + 1, BLOCKS - 1))
            a = _operand(front, power, N)
            b = _operand(back, power2, N)
            mbarrier.arrive(free.index(slot), count=1)
            mbarrier.wait(xbars.index(one), (2 * turn // AHEAD) & 1)
            acc = warpgroup_mma(a, x_s.index(one).permute((1, 0)), acc, is_async=True)
            mbarrier.wait(xbars.index(two), ((2 * turn + 1) // AHEAD) & 1)
            acc = warpgroup_mma(b, x_s.index(two).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(xfree.index(one), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(xfree.index(two), count=1)
        first += BLOCKS
        acc = acc * 4294967296.0
        J: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8] if GATED else [8, 4], [1, 4], [0, 1])
        t = gl.arange(0, N, layout=gl.SliceLayout(0, J))
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, N]), (0, 2, 3, 1)))
            gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
            up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
            hidden = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16).to(gl.float32)
            seen = round_trip_rows(gl.reshape(hidden, [1, 32, N])).to(gl.bfloat16)
            parts = gl.permute(gl.reshape(seen, [4, 2, 2, 2, N]), (1, 2, 0, 3, 4))
            y = gl.convert_layout(gl.reshape(parts, [32, N]), J)
            width = outputs // 2
            place = row + 32 * HALF + gl.arange(0, 32, layout=gl.SliceLayout(1, J))
        else:
            y = gl.convert_layout(acc.to(gl.bfloat16), J)
            width = outputs
            place = row + 64 * HALF + gl.arange(0, 64, layout=gl.SliceLayout(1, J))
        to = out_ptr + token.to(gl.int64) * width + (t[None, :] * width + place[:, None])
        gl.store(to, y, mask=(token + t < tokens)[None, :])


@gluon.jit
def bulk(
    w_desc, x_desc, x_ptr, seen_ptr, scale_ptr, out_ptr, count_ptr, tokens, outputs, programs, x_stride,
    limit,
    COLUMNS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    TOGETHER: gl.constexpr, P: gl.constexpr, QUANTISE: gl.constexpr, GATED: gl.constexpr,
    CONSUMERS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Grid (at most a program a multiprocessor), 4 warps and 8 more: weights [outputs, COLUMNS] times x
    [tokens, COLUMNS], in `programs` tiles of 128 rows and N tokens.

    QUANTISE: x_ptr is bf16; seen_ptr is written first, which x_desc reads. count_ptr is 0 and is left so.
    GATED: weights are gate over up; out bf16 [tokens, outputs / 2] is SwiGLU, quantised, read back and in the
    order GROUPED. Else out bf16 [tokens, outputs].
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 128, 128], TILE8)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, N, 64], TILE16)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    xbars = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    xfree = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(AHEAD):
        mbarrier.init(xbars.index(i), count=1)
        mbarrier.init(xfree.index(i), count=2)
    fence_async_shared()
    grid_wait()
    grid_release()
    gl.warp_specialize(
        [
            (_multiply, (
                x_ptr, seen_ptr, scale_ptr, out_ptr, count_ptr, w_s, x_s, bars, xbars, free, xfree, tokens,
                outputs, programs, x_stride, limit, 0, COLUMNS, STAGES, AHEAD, N, TOGETHER, P, QUANTISE,
                GATED,
            )),
            (_multiply, (
                x_ptr, seen_ptr, scale_ptr, out_ptr, count_ptr, w_s, x_s, bars, xbars, free, xfree, tokens,
                outputs, programs, x_stride, limit, 1, COLUMNS, STAGES, AHEAD, N, TOGETHER, P, QUANTISE,
                GATED,
            )),
            (_load, (
                w_desc, x_desc, count_ptr, w_s, x_s, bars, xbars, free, xfree, tokens, outputs, programs,
                2 * gl.num_programs(0), BLOCKS, STAGES, AHEAD, N, TOGETHER, QUANTISE, GATED,
            )),
        ],
        [4, 4], [CONSUMERS, LOADER],
    )  # fmt: skip
    if QUANTISE:  # noqa: SIM102
        if gl.atomic_add(count_ptr, LEFT, sem="relaxed") // LEFT == gl.num_programs(0) - 1:
            gl.atomic_xchg(count_ptr, 0, sem="relaxed")


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    prepared: tuple[Prepared, ...] = (),
) -> torch.Tensor:
    """bf16 [N, O] of x bf16 [N, I] (rows contiguous), quantised, times E4M3 [O, I] with 32x32 scales: one
    launch. `prepared`: x in the order GROUPED, if somebody has it.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    _launch(x, weight, scale, prepared, out, 0.0, False)
    return out


def gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    limit: float,
    prepared: tuple[Prepared, ...] = (),
) -> Prepared:
    """SwiGLU of x [N, d] times gate over up, E4M3 [2 I, d], quantised and in the order GROUPED [N, I]: one
    launch.
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=torch.bfloat16, device=x.device)
    _launch(x, weight, scale, prepared, out, limit, True)
    return Prepared(out, GROUPED)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    prepared: tuple[Prepared, ...],
    out: torch.Tensor,
    limit: float,
    gates: bool,
) -> None:
    outputs, columns = weight.shape
    tokens, index = x.shape[0], x.device.index or 0
    ready = next((copy.values for copy in prepared if copy.order == GROUPED), None)
    seen = torch.empty(tokens, columns, dtype=torch.bfloat16, device=x.device) if ready is None else ready
    programs = outputs // ROWS * triton.cdiv(tokens, TOKENS)
    bulk[(min(programs, multiprocessors(index)),)](
        TensorDescriptor(
            weight.view(torch.uint8), [outputs, columns], [columns, 1], [64 if gates else ROWS, 128],
            TILE8.value,
        ),
        TensorDescriptor(seen, [tokens, columns], [columns, 1], [TOKENS, 64], TILE16.value),
        x, seen, scale, out, _zeros(index), tokens, outputs, programs, x.stride(0), limit, columns, TOKENS,
        STAGES, AHEAD, TOGETHER, PIECE, ready is None, gates, CONSUMER_REGISTERS, LOADER_REGISTERS,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
