# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Queries whose keys several programs share: which keys each takes, and the join at the end of the launch of
the parts; pairs of channels as words (spec §3).
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import SINGLES, arrive, wait_for
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def bf16_words(even, odd):
    """Pairs of channels, fp32, rounded, a word each."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def half_words(even, odd):
    """Pairs of channels, fp32, rounded to fp16, a word each."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def channels_of(words):
    """The two bf16 channels of words, fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def span_of(split, used, TILES: gl.constexpr, SPLITS: gl.constexpr):
    """A split's first tile and how many it takes: the first has the window's two, then its share of
    entries.
    """
    if SPLITS == 1:
        base = 0
        count = 2 + used
    else:
        share: gl.constexpr = (TILES + 2 + SPLITS - 1) // SPLITS
        beside: gl.constexpr = share - 2 if share > 2 else 0
        each: gl.constexpr = (TILES - beside + SPLITS - 2) // (SPLITS - 1)
        base = gl.where(split == 0, 0, 2 + beside + (split - 1) * each)
        count = gl.maximum(gl.minimum(gl.where(split == 0, 2 + beside, each), 2 + used - base), 0)
    return base, count


@gluon.jit
def most_used(used_space):
    """The greatest of 32 numbers in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(used_space.load(layout), axis=0)


@gluon.jit
def _singles(words):
    """The two fp16 of words, fp32."""
    return gl.inline_asm_elementwise(
        SINGLES, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.jit
def join_share(
    part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
    COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Writes 256 channels from COLUMN on of this program's share of the heads, once all parts are there.

    For four warps, two of such trades a program: COLUMN 0 and COLUMN 256.
    part fp16 [tokens, SPLITS, 64, 512], lse fp32 [tokens, SPLITS, 64].
    """
    arrive(spot, gl.where(split == 0, 65 - 2 * SPLITS, 1) if COLUMN == 0 else 1)
    wait_for(spot, goal)
    SHARE: gl.constexpr = (64 + SPLITS - 1) // SPLITS
    HEADS: gl.constexpr = 4 if SPLITS > 4 else 8 if SPLITS > 2 else 16
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    pair = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    words = part_ptr.to(gl.pointer_type(gl.int32)) + token * SPLITS * 16384 + pair[None, :]
    last = gl.minimum((split + 1) * SHARE, 64)
    for beginning in range(split * SHARE, last, HEADS):
        head = beginning + gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
        real = head < last
        sink = gl.load(sink_ptr + head, mask=real, other=0.0) * 1.4426950408889634
        peak = sink
        for i in gl.static_range(SPLITS):
            peak = gl.maximum(peak, gl.load(lse_ptr + (token * SPLITS + i) * 64 + head, mask=real, other=0.0))
        total = gl.exp2(sink - peak)
        even = gl.full([HEADS, 128], 0.0, gl.float32, layout)
        odd = gl.full([HEADS, 128], 0.0, gl.float32, layout)
        for i in gl.static_range(SPLITS):
            weight = gl.exp2(gl.load(lse_ptr + (token * SPLITS + i) * 64 + head, mask=real, other=0.0) - peak)
            total += weight
            a, b = _singles(gl.load(words + (i * 16384 + head * 256)[:, None], mask=real[:, None], other=0))
            even += weight[:, None] * a
            odd += weight[:, None] * b
        inverse = (1.0 / total)[:, None]
        even = even * inverse
        odd = odd * inverse
        if HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE:
            turn = pair - (256 - HALF_ROPE)
            cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
            sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
            out = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
        else:
            out = bf16_words(even, odd)
        start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
        gl.store(start + (head * 256)[:, None] + pair[None, :], out, mask=real[:, None])
