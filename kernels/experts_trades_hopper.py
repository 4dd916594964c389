# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts of many tokens on Hopper, on packed MXFP4 weights: `products` is gate, up and SwiGLU in one
launch and down in another (spec §3).

A program stays on its multiprocessor and takes item after item from a counter: 128 rows of each of two
weights (gate and up; or twice 128 of down) times a tile of at most 80 slots. One trade fetches, by bulk
copies into a ring of stages of 128 channels, and says what each item is. Four trades of four warps have 64 of
an item's rows each: they expand weights in registers to exact bf16 (times 2^-32), which wgmma multiplies with
the slots' activations in shared memory. A trade meets the others only through the ring, so that one's
expansion and SwiGLU run beside the others' products. A product has as many columns as the tile has slots,
in steps of eight; Gluon knows powers of two only, so products are inline assembly and sums are pieces of one
register a thread.

A warp's wgmma has rows 0 to 7 from the first weight and 8 to 15 from the second: gate and up of a channel
meet in one thread, and a trade's 32 channels are one group of the FP8 round trip.
"""

from __future__ import annotations

from functools import cache

import torch
from cedar.kernels.experts_hidden_hopper import PIECE, join, write, write_hidden
from cedar.kernels.grid_hopper import barrier, grid_release, grid_wait
from cedar.kernels.linear_triton import multiprocessors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TRADE_REGISTERS, FETCH_REGISTERS = 112, 24
SHARED_W = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))
SHARED_X = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_STAGES = gl.constexpr(5)
# One allocation, at the beginning of a program's shared memory, by its bytes: weights (a stage's two blocks
# of 128 rows of 16 words), activations (a stage's two halves of 80 rows of 64 channels, 16 rows a copy),
# barriers (of free stages, then of full ones), what eight items are (a trade may be five stages, which may be
# five items, behind the one that fetches), their slots' routing weights, and the trades' greatest hidden
# values (of 4 lanes and 4 warps ten words, 12 with what aligns them).
_X = gl.constexpr(_STAGES.value * 16384)
_X_STAGE = gl.constexpr(20480)
BARRIERS = gl.constexpr(_STAGES.value * 36864)
_FULL = gl.constexpr(8)
_ITEMS = gl.constexpr(BARRIERS.value + 256)
_ROUTING = gl.constexpr(BARRIERS.value + 512)
_GREATEST = gl.constexpr(BARRIERS.value + 4608)
_BYTES = gl.constexpr(BARRIERS.value + 12288)

# Words of 32 rows, 128 channels: a thread has the four of a scale group.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
)
_USED = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))

# Eight E2M1 channels and their scale (two bf16, value·2^126) to four words of two bf16, exact but for 2^-32:
# nibbles (3, 7), (2, 6), (1, 5), (0, 4).
_EXPAND = gl.constexpr("""{
.reg .b32 a, b, c, d, s;
shr.b32 a, $4, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 a, $4, 0x80008000, a, 0xEA;
mul.rn.bf16x2 $0, a, $5;
shr.b32 b, $4, 2;
and.b32 b, b, 0x01C001C0;
shl.b32 s, $4, 4;
lop3.b32 b, s, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $1, b, $5;
and.b32 c, $4, 0x00F000F0;
mul.lo.u32 c, c, 0x104;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 $2, c, $5;
and.b32 d, $4, 0x000F000F;
mul.lo.u32 d, d, 0x1040;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 $3, d, $5;
}""")
_FREE = gl.constexpr("""{
.reg .pred p;
.reg .b32 l;
mov.u32 l, %laneid;
setp.eq.u32 p, l, 0;
@p mbarrier.arrive.shared::cta.b64 _, [$1];
mov.b32 $0, l;
}""")
_UNTIL = gl.constexpr("""{
.reg .pred p;
AGAIN:
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [$1], $2;
@!p bra AGAIN;
mov.b32 $0, 0;
}""")


@gluon.constexpr_function
def _product(n):
    """Two products of 16 channels with n columns, under way. Operands: n/2 sums, in wgmma's order, given and
    returned; four words of the first row, four of the second; the activations' address / 16.
    """
    sums = ", ".join(f"${i}" for i in range(n // 2))
    lines = ["{", ".reg .b64 d;", ".reg .b32 t;", "wgmma.fence.sync.aligned;"]
    for step in range(2):  # the first takes words d and c, the second b and a
        low, high = n + 3 - 2 * step, n + 2 - 2 * step
        lines += [
            f"add.u32 t, ${n + 8}, {2 * step};",
            "mov.b64 d, {t, 0x40000040};",  # 128-byte swizzle, 1,024 bytes from eight rows to the next
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, "
            f"{{${low}, ${low + 4}, ${high}, ${high + 4}}}, d, 1, 1, 1, 0;",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def _tied(n, more):
    """Constraints of n/2 sums given and returned, and of `more` words."""
    sums = range(n // 2)
    return ",".join(["=f" for _ in sums] + [str(i) for i in sums] + ["r"] * more)


@gluon.constexpr_function
def _floats(n):
    return tuple([gl.float32] * (n // 2))


@gluon.constexpr_function
def _wait(left):
    return f"wgmma.wait_group.sync.aligned {left}; // $0"


@gluon.jit
def _start(sums, first, second, address, N: gl.constexpr):
    """Begins sums + 64 rows of weights (words a, b, c, d of the first and the second) times 32 channels."""
    at = gl.full([32, 4], address, gl.int32, PIECE)
    return gl.inline_asm_elementwise(
        _product(N), _tied(N, 9), sums + first + second + (at,), dtype=_floats(N), is_pure=False, pack=1
    )


@gluon.jit
def _ended(sums, N: gl.constexpr, LEFT: gl.constexpr):
    """The products begun before the last LEFT, done."""
    return gl.inline_asm_elementwise(_wait(LEFT), _tied(N, 0), sums, dtype=_floats(N), is_pure=False, pack=1)


@gluon.jit
def _expand(words, scale):
    return gl.inline_asm_elementwise(
        _EXPAND, "=&r,=&r,=&r,=&r,r,r", [words, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _base():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _until(base, number, phase):
    """Waits for a phase of barrier `number`: of a free stage, or _FULL and it."""
    gl.inline_asm_elementwise(
        _UNTIL, "=r,r,r", [base + (BARRIERS + 8 * number), phase], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _free(base, stage):
    """This warp has read stage `stage`."""
    gl.inline_asm_elementwise(
        _FREE, "=r,r", [base + (BARRIERS + 8 * stage)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _say(base, turn, item, expert, count):
    """Leaves what item `turn` of this program is, for those who wait for its first stage."""
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $4};\nmov.b32 $0, 0;", "=r,r,r,r,r",
        [base + (_ITEMS + turn % 8 * 16), item, expert, count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _read(offset):
    return f"ld.shared.b32 $0, [$1 + {offset}];"


@gluon.jit
def _said(base, turn, OFFSET: gl.constexpr):
    """Item `turn`'s number (0), its expert (4; -1: there is none any more), how many slots it has (8)."""
    return gl.inline_asm_elementwise(
        _read(OFFSET), "=r,r", [base + (_ITEMS + turn % 8 * 16)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _expert(base, turn, BLOCKS: gl.constexpr):
    """Item `turn`'s expert, when its first stage is there."""
    block = turn * BLOCKS
    _until(base, _FULL + block % _STAGES, block // _STAGES & 1)
    return _said(base, turn, 4)


@gluon.jit
def _quarters(words):
    """Words [32, 16] by their number in a group: four pieces."""
    low, high = gl.split(gl.permute(gl.reshape(words, [32, 4, 2, 2]), (0, 1, 3, 2)))
    w0, w1 = gl.split(low)
    w2, w3 = gl.split(high)
    return (
        gl.convert_layout(w0, PIECE, assert_trivial=True),
        gl.convert_layout(w1, PIECE, assert_trivial=True),
        gl.convert_layout(w2, PIECE, assert_trivial=True),
        gl.convert_layout(w3, PIECE, assert_trivial=True),
    )


@gluon.jit
def _power(scale):
    return gl.minimum(scale.to(gl.int32) + 94, 254) * 0x00800080


@gluon.jit
def _sums(
    w_s, base, before, scale1, scale2, COLUMNS: gl.constexpr, N: gl.constexpr, TRADE: gl.constexpr
):  # fmt: skip
    """A trade's sums with N slots, zeros up to 80; `before`: blocks that this program has had."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    sums = ()
    for _ in gl.static_range(N // 2):
        sums += (gl.full([32, 4], 0.0, gl.float32, PIECE),)  # type: ignore[assignment]
    next1 = gl.load(scale1)
    next2 = gl.load(scale2)
    for block in range(BLOCKS):
        stage = (before + block) % _STAGES
        _until(base, _FULL + stage, (before + block) // _STAGES & 1)
        f0, f1, f2, f3 = _quarters(w_s.index(2 * stage).slice(32 * TRADE, 32, dim=0).load(_WORDS))
        s0, s1, s2, s3 = _quarters(w_s.index(2 * stage + 1).slice(32 * TRADE, 32, dim=0).load(_WORDS))
        x = (base + (_X + _X_STAGE * stage)) >> 4
        p1 = _power(next1)
        p2 = _power(next2)
        ahead = gl.minimum(block + 1, BLOCKS - 1) * 4
        next1 = gl.load(scale1 + ahead)
        next2 = gl.load(scale2 + ahead)
        sums = _start(sums, _expand(f0, p1), _expand(s0, p2), x, N)
        sums = _start(sums, _expand(f1, p1), _expand(s1, p2), x + 4, N)
        sums = _ended(sums, N, 1)
        sums = _start(sums, _expand(f2, p1), _expand(s2, p2), x + _X_STAGE // 32, N)
        sums = _ended(sums, N, 1)
        sums = _start(sums, _expand(f3, p1), _expand(s3, p2), x + (_X_STAGE // 32 + 4), N)
        sums = _ended(sums, N, 0)
        _free(base, stage)
    for _ in gl.static_range(40 - N // 2):
        sums += (gl.full([32, 4], 0.0, gl.float32, PIECE),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _sums_of(
    count, w_s, base, before, scale1, scale2, COLUMNS: gl.constexpr, TRADE: gl.constexpr
):  # fmt: skip
    """`_sums` with as many columns as `count` slots need."""
    if count > 72:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 80, TRADE)
    elif count > 64:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 72, TRADE)
    elif count > 56:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 64, TRADE)
    elif count > 48:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 56, TRADE)
    elif count > 32:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 48, TRADE)
    elif count > 16:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 32, TRADE)
    else:
        sums = _sums(w_s, base, before, scale1, scale2, COLUMNS, 16, TRADE)
    return sums


@gluon.jit
def _multiply(
    slots_ptr, scale1_ptr, scale2_ptr, out_ptr, outputs, limit, w_s,
    COLUMNS: gl.constexpr, GATED: gl.constexpr, TRADE: gl.constexpr,
):  # fmt: skip
    """The trade of rows 32 TRADE to 32 TRADE + 31 of both blocks."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    TALL: gl.constexpr = 128 if GATED else 256
    each = outputs // TALL
    base = _base()
    row = 32 * TRADE + gl.arange(0, 32, layout=gl.SliceLayout(1, PIECE))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, PIECE))
    offset = row[:, None] * (COLUMNS // 32) + group[None, :]
    turn = 0
    while _expert(base, turn, BLOCKS) >= 0:
        item = _said(base, turn, 0)
        count = _said(base, turn, 8)
        tile = item // each
        first = (item - tile * each) * TALL
        at = (_said(base, turn, 4) * outputs + first).to(gl.int64) * (COLUMNS // 32)
        scale1 = scale1_ptr + at + offset
        scale2 = scale2_ptr + at + (0 if GATED else 128) * (COLUMNS // 32) + offset
        sums = _sums_of(count, w_s, base, turn * BLOCKS, scale1, scale2, COLUMNS, TRADE)
        place = tile * 80
        slots = slots_ptr + place
        if GATED:
            routing = base + (_ROUTING + turn % 8 * 512)
            area = base + (_GREATEST + 768 * TRADE)
            write_hidden(sums, count, routing, area, out_ptr, place, first, outputs, limit, TRADE)
        else:
            out = out_ptr + first + 32 * TRADE
            write(join(sums, 0, 8), slots, out, outputs, 64)
            write(join(sums, 2, 8), slots, out + 128, outputs, 64)
            if count > 64:
                write(join(sums, 32, 2), slots + 64, out, outputs, 16)
                write(join(sums, 34, 2), slots + 64, out + 128, outputs, 16)
        turn += 1


@gluon.jit
def _announce(base, turn, item, slots_ptr, owners_ptr, weight_ptr, each, tiles, GATED: gl.constexpr):
    """Says what `item` is."""
    tile = gl.minimum(item // each, tiles - 1)
    place = gl.arange(0, 128, layout=_USED)
    slot = gl.load(slots_ptr + tile * 80 + place, mask=place < 80, other=-1)
    if GATED:
        weight = gl.load(weight_ptr + gl.maximum(slot, 0)) * 18446744073709551616.0
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2;\nmov.b32 $0, 0;", "=r,r,f",
            [base + (_ROUTING + turn % 8 * 512) + place * 4, weight], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    owner = gl.load(owners_ptr + tile)
    owner = gl.where(item < tiles * each, owner, -1)
    _say(base, turn, item, owner, gl.sum((slot >= 0).to(gl.int32), axis=0))


@gluon.jit
def _fill(x_desc, place, block, bar, x_s, to, SIXTEENS: gl.constexpr):
    """Says how much a stage gets, and starts the copies of its activations: 16 SIXTEENS rows."""
    mbarrier.expect(bar, 16384 + 4096 * SIXTEENS)
    for h in gl.static_range(2):
        for i in gl.static_range(SIXTEENS):
            tma.async_copy_global_to_shared(
                x_desc, [place + 16 * i, block * 128 + 64 * h], bar, x_s.index(to + 5 * h + i)
            )


@gluon.jit
def _fetch(
    first_desc, second_desc, x_desc, slots_ptr, owners_ptr, weight_ptr, count_ptr, outputs, tiles, w_s, x_s,
    bars,
    COLUMNS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The trade that fills the ring."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    TALL: gl.constexpr = 128 if GATED else 256
    SECOND: gl.constexpr = 0 if GATED else 128
    each = outputs // TALL
    base = _base()
    _announce(base, 0, gl.program_id(0), slots_ptr, owners_ptr, weight_ptr, each, tiles, GATED)
    turn = 0
    while _said(base, turn, 4) >= 0:
        item = _said(base, turn, 0)
        count = _said(base, turn, 8)
        tile = item // each
        row = _said(base, turn, 4) * outputs + (item - tile * each) * TALL
        for block in range(BLOCKS):
            number = turn * BLOCKS + block
            stage = number % _STAGES
            _until(base, stage, (number // _STAGES & 1) ^ 1)
            bar = bars.index(BARRIERS // 8 + _FULL + stage)
            place = tile * 80
            to = (_X + stage * _X_STAGE) // 2048
            if count > 64:
                _fill(x_desc, place, block, bar, x_s, to, 5)
            elif count > 32:
                _fill(x_desc, place, block, bar, x_s, to, 4)
            elif count > 16:
                _fill(x_desc, place, block, bar, x_s, to, 2)
            else:
                _fill(x_desc, place, block, bar, x_s, to, 1)
            tma.async_copy_global_to_shared(first_desc, [row, block * 16], bar, w_s.index(2 * stage))
            tma.async_copy_global_to_shared(
                second_desc, [row + SECOND, block * 16], bar, w_s.index(2 * stage + 1)
            )
            if block == 0:
                item_after = gl.num_programs(0) + gl.atomic_add(count_ptr, 1)
                _announce(base, turn + 1, item_after, slots_ptr, owners_ptr, weight_ptr, each, tiles, GATED)
        turn += 1
    end = turn * BLOCKS
    _until(base, end % _STAGES, (end // _STAGES & 1) ^ 1)
    mbarrier.expect(bars.index(BARRIERS // 8 + _FULL + end % _STAGES), 0)  # nobody waits any more
    if gl.atomic_add(count_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.atomic_xchg(count_ptr, 0)
        gl.atomic_xchg(count_ptr + 1, 0)


@gluon.jit
def products(
    first_desc, second_desc, x_desc, slots_ptr, owners_ptr, weight_ptr, scale1_ptr, scale2_ptr, out_ptr,
    count_ptr, outputs, tiles, limit,
    COLUMNS: gl.constexpr, GATED: gl.constexpr,
    TRADE_REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (multiprocessors): tiles of 80 places times expanded weights [experts, outputs, COLUMNS].

    GATED: two weights, gate and up; clamp, SwiGLU, routing weight and the FP8 round trip; out bf16 [places,
    outputs] in the order in which w2 meets it. Else one weight, given twice; out bf16 [slots, outputs].
    x_desc: activations of all places, as `quantise` orders them. A tile's slots come first among its places,
    tiles without an owner (-1) last. count_ptr: two zeros, left so.
    """
    memory = gl.allocate_shared_memory(gl.bfloat16, [_BYTES // 2048, 16, 64], SHARED_X)
    w_s = memory._reinterpret(gl.int32, [_BYTES // 8192, 128, 16], SHARED_W)
    bars = memory._reinterpret(gl.int64, [_BYTES // 8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(bars.index(BARRIERS // 8 + i), count=16)  # warps
        mbarrier.init(bars.index(BARRIERS // 8 + _FULL + i), count=1)
    fence_async_shared()
    barrier()
    grid_wait()
    grid_release()
    gl.warp_specialize(
        [
            (_multiply, (
                slots_ptr, scale1_ptr, scale2_ptr, out_ptr, outputs, limit, w_s, COLUMNS, GATED, 0,
            )),
            (_multiply, (
                slots_ptr, scale1_ptr, scale2_ptr, out_ptr, outputs, limit, w_s, COLUMNS, GATED, 1,
            )),
            (_multiply, (
                slots_ptr, scale1_ptr, scale2_ptr, out_ptr, outputs, limit, w_s, COLUMNS, GATED, 2,
            )),
            (_multiply, (
                slots_ptr, scale1_ptr, scale2_ptr, out_ptr, outputs, limit, w_s, COLUMNS, GATED, 3,
            )),
            (_fetch, (
                first_desc, second_desc, x_desc, slots_ptr, owners_ptr, weight_ptr, count_ptr, outputs, tiles,
                w_s, memory, bars, COLUMNS, GATED,
            )),
        ],
        [4, 4, 4, 1], [TRADE_REGISTERS, TRADE_REGISTERS, TRADE_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


@cache
def _counters(index: int) -> torch.Tensor:
    """Zeros of CUDA device `index` that launches of `products` share, so one stream at a time."""
    return torch.zeros(2, dtype=torch.int32, device=f"cuda:{index}")


def launch(
    weights: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    x: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    routing: torch.Tensor,
    out: torch.Tensor,
    limit: float,
    gated: bool,
) -> None:
    """Starts `products` of two weights (payload, scale), the same one twice unless `gated`."""
    (first, scale1), (second, scale2) = weights
    count, outputs, columns = first.shape[0], first.shape[1], first.shape[2] * 2
    if columns % 128 or outputs % (128 if gated else 256) or x.shape != (tiles[2] * 80, columns):
        raise ValueError(f"x {x.shape}, weights [{outputs}, {columns}]: whole blocks, 80 places a tile")
    index = x.device.index or 0
    d1, d2 = (
        TensorDescriptor.from_tensor(
            w.view(torch.int32).view(count * outputs, columns // 8), [128, 16], SHARED_W.value
        )
        for w in (first, second)
    )
    dx = TensorDescriptor.from_tensor(x, [16, 64], SHARED_X.value)
    products[(multiprocessors(index),)](
        d1, d2, dx, tiles[0], tiles[1], routing, scale1, scale2, out, _counters(index), outputs, tiles[2],
        limit, columns, gated, TRADE_REGISTERS, FETCH_REGISTERS, num_warps=4, launch_pdl=True,
    )  # fmt: skip
