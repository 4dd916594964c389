# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""q and the output of 64 heads on Hopper, channels in the order of `sparse_attention_keys_hopper`'s tiles."""

from __future__ import annotations

from cedar.kernels.grid_hopper import SINGLES, arrive, wait_for
from cedar.kernels.sparse_attention_join_hopper import bf16_words, channels_of, half_words
from cedar.kernels.sparse_attention_keys_hopper import TILE_WORDS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.constexpr_function
def _query_layout(N):
    """Of words [64, N / 2] of N channels: a thread has eight neighbours at a time, its own in a left operand
    or in sums of products where channels have a tile's order.
    """
    groups = [[0, 16 << i] for i in range((N // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *groups],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, N // 2],
    )


_WORDS = gl.constexpr(_query_layout(256))  # of 256 channels
# Words [64, 64] of a quarter of q for shared memory: a thread has 32 neighbouring channels.
_Q_PART = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 16], [0, 32]],
        [[8, 0], [16, 0]],
        [],
        [64, 64],
    )
)
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))


@gluon.jit
def _turned(words, pair, cos_ptr, sin_ptr, token, COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr):
    """Words of two bf16 channels as two fp32, turned; COLUMN: one past the last pair."""
    even, odd = channels_of(words)
    if COLUMN > 256 - HALF_ROPE:
        turn = pair - (256 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        even, odd = channels_of(bf16_words(even * cos - odd * sin, even * sin + odd * cos))
    return even, odd


@gluon.jit
def _far_pairs(x, N: gl.constexpr):
    """[64, N], a channel of each pair, as those of channels 0 to 3 of each eight and those of 4 to 7."""
    x = gl.permute(gl.reshape(x, [64, N // 16, 4, 2, 2]), (0, 1, 2, 4, 3))
    return gl.split(x)


@gluon.jit
def query_left(q_ptr, cos_ptr, sin_ptr, token, HALF_ROPE: gl.constexpr):
    """The first 256 channels of q, in the tile's order, as a left operand in registers."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS))
    pair = gl.arange(0, 128, layout=gl.SliceLayout(0, _WORDS))
    start = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    words = gl.load(start + head[:, None] * 256 + pair[None, :])
    even, odd = _turned(words, pair, cos_ptr, sin_ptr, token, 128, HALF_ROPE)
    even_low, even_high = _far_pairs(even, 128)
    odd_low, odd_high = _far_pairs(odd, 128)
    both = gl.join(half_words(even_low, even_high), half_words(odd_low, odd_high))
    both = gl.permute(both, (0, 1, 3, 4, 2))  # [64, 8, 2, 2, 4]
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [both], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, 256]), LEFT, assert_trivial=True)


@gluon.jit
def query_shared(q_ptr, cos_ptr, sin_ptr, q_tile, token, PART: gl.constexpr, HALF_ROPE: gl.constexpr):
    """128 channels from 256 + 128 PART on to shared memory."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _Q_PART))
    pair = 128 + 64 * PART + gl.arange(0, 64, layout=gl.SliceLayout(0, _Q_PART))
    start = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    words = gl.load(start + head[:, None] * 256 + pair[None, :])
    even, odd = _turned(words, pair, cos_ptr, sin_ptr, token, 192 + 64 * PART, HALF_ROPE)
    even_low, even_high = _far_pairs(even, 64)
    odd_low, odd_high = _far_pairs(odd, 64)
    both = gl.join(half_words(even_low, even_high), half_words(odd_low, odd_high))
    both = gl.permute(both, (0, 1, 3, 4, 2))  # [64, 4, 2, 2, 4]
    parts = q_tile._reinterpret(gl.int32, [2, 64, 64], TILE_WORDS)
    parts.index(PART).store(gl.reshape(both, [64, 64]))
    fence_async_shared()


@gluon.jit
def _last_half(x, layout: gl.constexpr):
    """The last half of the columns of [64, N]."""
    _, x = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def keep_angles(angles, cos_ptr, sin_ptr, token, HALF_ROPE: gl.constexpr):
    """The angles of the last 32 pairs to shared memory; 1 and 0 where nothing turns."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turn = gl.arange(0, 32, layout=line) - (32 - HALF_ROPE)
    angles.index(0).store(gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0))
    angles.index(1).store(gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0))


@gluon.jit
def write_half(
    o, factor, angles, out_ptr, cos_ptr, sin_ptr, token, COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr
):  # fmt: skip
    """Writes 256 channels from COLUMN on, eight neighbours a thread; `angles` as `keep_angles` left them."""
    TURNED: gl.constexpr = HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE
    o = gl.permute(gl.reshape(o * factor[:, None], [64, 8, 2, 2, 4, 2]), (0, 1, 4, 5, 2, 3))
    even, odd = gl.split(o)  # [64, 8 groups, 4, 2, 2]
    even = gl.convert_layout(gl.reshape(even, [64, 128]), _WORDS, assert_trivial=True)
    odd = gl.convert_layout(gl.reshape(odd, [64, 128]), _WORDS, assert_trivial=True)
    words = bf16_words(even, odd)
    if TURNED and HALF_ROPE > 32:
        turn = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, _WORDS)) - (256 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
        words = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
    if TURNED and HALF_ROPE <= 32:
        half: gl.constexpr = _query_layout(128)
        last: gl.constexpr = _query_layout(64)
        cos = angles.index(0).load(gl.SliceLayout(0, last))[None, :]
        sin = angles.index(1).load(gl.SliceLayout(0, last))[None, :]
        even = _last_half(_last_half(even, half), last)
        odd = _last_half(_last_half(odd, half), last)
        turned = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
        first, second = gl.split(gl.permute(gl.reshape(words, [64, 2, 64]), (0, 2, 1)))
        third, _ = gl.split(gl.permute(gl.reshape(second, [64, 2, 32]), (0, 2, 1)))
        second = gl.permute(gl.join(gl.convert_layout(third, last, assert_trivial=True), turned), (0, 2, 1))
        second = gl.convert_layout(gl.reshape(second, [64, 64]), half, assert_trivial=True)
        first = gl.convert_layout(first, half, assert_trivial=True)
        words = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [64, 128])
        words = gl.convert_layout(words, _WORDS, assert_trivial=True)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS))
    pair = COLUMN // 2 + gl.arange(0, 128, layout=gl.SliceLayout(0, _WORDS))
    start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384
    gl.store(start + head[:, None] * 256 + pair[None, :], words)


@gluon.jit
def _singles(words):
    """The two fp16 of words, fp32."""
    return gl.inline_asm_elementwise(
        SINGLES, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """The two halves of the columns of [64, N]."""
    first, second = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(
        second, layout, assert_trivial=True
    )


@gluon.jit
def swap_halves(
    o, factor, lse_shared, part_ptr, lse_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, spot, goal, token, split,
    COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr,
):  # fmt: skip
    """For a query that two programs share: each gives the other one half of its 256 channels from COLUMN on,
    and joins and writes the other half, which it keeps in registers.
    """
    layout: gl.constexpr = _query_layout(128)
    o = gl.permute(gl.reshape(o * factor[:, None], [64, 8, 2, 2, 4, 2]), (0, 1, 4, 5, 2, 3))
    even, odd = gl.split(o)
    even_first, even_second = _halves(gl.reshape(even, [64, 128]), layout)
    odd_first, odd_second = _halves(gl.reshape(odd, [64, 128]), layout)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    pair = COLUMN // 2 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    here = split * 64
    there = 64 - here
    words = part_ptr.to(gl.pointer_type(gl.int32)) + token * 32768 + (head * 256)[:, None] + pair[None, :]
    given = half_words(
        gl.where(split == 0, even_second, even_first), gl.where(split == 0, odd_second, odd_first)
    )
    gl.store(words + (split * 16384 + there), given)
    own = lse_shared.load(gl.SliceLayout(1, layout))
    if COLUMN == 0:
        gl.store(lse_ptr + (token * 2 + split) * 64 + head, own)
    sink = gl.load(sink_ptr + head) * 1.4426950408889634
    TURNED: gl.constexpr = HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE
    if TURNED:
        turn = pair + (here - 256 + HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)[None, :]
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)[None, :]
    even = gl.where(split == 0, even_first, even_second)
    odd = gl.where(split == 0, odd_first, odd_second)
    arrive(spot, gl.where(split == 0, 61, 1) if COLUMN == 0 else 1)
    wait_for(spot, goal)
    other = gl.load(lse_ptr + (token * 2 + 1 - split) * 64 + head)
    a, b = _singles(gl.load(words + ((1 - split) * 16384 + here)))
    peak = gl.maximum(gl.maximum(own, other), sink)
    own = gl.exp2(own - peak)
    other = gl.exp2(other - peak)
    inverse = 1.0 / (gl.exp2(sink - peak) + own + other)
    own = (own * inverse)[:, None]
    other = (other * inverse)[:, None]
    even = own * even + other * a
    odd = own * odd + other * b
    if TURNED:
        out = bf16_words(even * cos + odd * sin, odd * cos - even * sin)
    else:
        out = bf16_words(even, odd)
    start = out_ptr.to(gl.pointer_type(gl.int32)) + token * 16384 + (head * 256)[:, None] + pair[None, :]
    gl.store(start + here, out)
