# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A query that two programs share, a cluster: each gives the other half of its output's channels and writes
the half that it keeps. 64 heads of 512 (spec §3).

    area = cluster.end(AREA); prepare(area)  # before the trades begin; each: cluster.arrive_ready()
    cluster.wait(); let_go(area, 1 - split)  # thread 0's trade, when a tile here is not read any more
    cluster.wait(); swap_halves(...)         # two trades of four warps, 256 channels each

What comes lies in the tile that the one who gets it reads no more, by its address: tiles must be what Gluon
allocates first, which is the largest.
"""

from __future__ import annotations

from cedar.kernels import cluster_hopper as cluster
from cedar.kernels.grid_hopper import SINGLES
from cedar.kernels.sparse_attention_heads_hopper import halves, words_layout
from cedar.kernels.sparse_attention_join_hopper import bf16_words, half_words
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AREA = gl.constexpr(48)  # barriers: a trade's half is here, of each trade; the other's place is free
_FREE = gl.constexpr(32)
_TILE, _HALF, _LSE = gl.constexpr(65536), gl.constexpr(16384), gl.constexpr(2048)  # bytes
# A head's eight copies of a number, four a thread.
_COPIES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)


@gluon.jit
def _tiles():
    """The address of what Gluon allocated first."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def prepare(area):
    """Sets up the barriers."""
    cluster.expect(area, _HALF + _LSE)
    cluster.expect(area + 16, _HALF + _LSE)
    gl.inline_asm_elementwise(
        """{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [$1], 1;
mov.b32 $0, t;
}""",
        "=r,r", [area + _FREE], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def let_go(area, rank):
    """Thread 0 tells program `rank` that it may send."""
    gl.inline_asm_elementwise(
        """{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
mapa.shared::cluster.u32 t, $1, $2;
@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [t];
mov.b32 $0, t;
}""",
        "=r,r,r", [area + _FREE, rank], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _send(address, barrier, words, rank):
    """Words, four that follow one another in a thread at a time, to the address of the first in program
    `rank`, where they count for `barrier`.
    """
    gl.inline_asm_elementwise(
        """{
.reg .b32 a, b;
mapa.shared::cluster.u32 a, $4, $16;
mapa.shared::cluster.u32 b, $8, $16;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$12, $13, $14, $15}, [b];
mov.b32 $0, a;
mov.b32 $1, a;
mov.b32 $2, a;
mov.b32 $3, a;
}""",
        "=r,=r,=r,=r" + ",r" * 16, [address, barrier + address * 0, words, rank + address * 0],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def swap_halves(
    o, factor, lse_shared, angles, sink_ptr, cos_ptr, sin_ptr, out_ptr, token, split, area, tile, other_tile,
    PART: gl.constexpr, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """256 channels from 256 PART on. tile, other_tile: which of two is free, here and in the other program;
    `angles` as `keep_angles` left them.
    """
    COLUMN: gl.constexpr = 256 * PART
    layout: gl.constexpr = words_layout(128)
    o = gl.permute(gl.reshape(o * factor[:, None], [64, 8, 2, 2, 4, 2]), (0, 1, 4, 5, 2, 3))
    even, odd = gl.split(o)
    even_first, even_second = halves(gl.reshape(even, [64, 128]), layout)
    odd_first, odd_second = halves(gl.reshape(odd, [64, 128]), layout)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    given = half_words(
        gl.where(split == 0, even_second, even_first), gl.where(split == 0, odd_second, odd_first)
    )
    # four words a thread and turn, all threads of a turn beside one another
    at = ((head & 7) * 64 + (head >> 4) * 512 + (head >> 3 & 1) * 2048)[:, None]
    at += ((pair >> 2 & 3) * 16 + (pair >> 4) * 4096 + (pair & 3) * 4)[None, :]
    at += _tiles() + PART * _HALF
    copy = gl.arange(0, 8, layout=gl.SliceLayout(0, _COPIES))
    lse_at = (gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIES)) * 32)[:, None] + (copy * 4)[None, :]
    lse_at += _tiles() + (2 * _HALF + PART * _LSE)
    lse = lse_shared.load(gl.SliceLayout(1, _COPIES)).to(gl.int32, bitcast=True)[:, None] + lse_at * 0
    bar = area + 16 * PART
    cluster.received(area + _FREE)
    _send(at + other_tile * _TILE, bar, given, 1 - split)
    _send(lse_at + other_tile * _TILE, bar, lse, 1 - split)
    own = lse_shared.load(gl.SliceLayout(1, layout))
    sink = gl.load(sink_ptr + head) * 1.4426950408889634
    even = gl.where(split == 0, even_first, even_second)
    odd = gl.where(split == 0, odd_first, odd_second)
    cluster.received(bar)
    other = gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [head * 32 + (_tiles() + 2 * _HALF + PART * _LSE + tile * _TILE)],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    words = cluster.pull(at + tile * _TILE).to(gl.int32, bitcast=True)
    a, b = gl.inline_asm_elementwise(
        SINGLES, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    peak = gl.maximum(gl.maximum(own, other), sink)
    own = gl.exp2(own - peak)
    other = gl.exp2(other - peak)
    inverse = 1.0 / (gl.exp2(sink - peak) + own + other)
    own = (own * inverse)[:, None]
    other = (other * inverse)[:, None]
    even = own * even + other * a
    odd = own * odd + other * b
    if HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE:
        if HALF_ROPE <= 64:  # the second program's half
            cos = gl.where(split == 1, angles.index(0).load(gl.SliceLayout(0, layout)), 1.0)[None, :]
            sin = gl.where(split == 1, angles.index(1).load(gl.SliceLayout(0, layout)), 0.0)[None, :]
        else:
            turn = COLUMN // 2 + split * 64 + pair + (HALF_ROPE - 256)
            cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
            sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        out = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
    else:
        out = bf16_words(even, odd)
    start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384 + (head * 256)[:, None] + pair[None, :]
    gl.store(start + (COLUMN // 2 + split * 64), out)
