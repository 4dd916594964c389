# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""q and the output of 64 heads on Hopper, channels in the order of `sparse_attention_keys_hopper`'s tiles."""

from __future__ import annotations

from cedar.kernels.sparse_attention_join_hopper import bf16_words, channels_of, half_words
from cedar.kernels.sparse_attention_keys_hopper import COPY_WIDE, RAW_WIDE, TILE_WORDS
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy


@gluon.constexpr_function
def words_layout(N):
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


_WORDS = gl.constexpr(words_layout(256))  # of 256 channels
# Words [64, 64] of a quarter of q: a thread has 32 neighbouring channels.
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
def ask_query(q_ptr, place, token, quarter: gl.constexpr):
    """Asks for 128 channels of q, to wait in a place of 16 KB."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY_WIDE))
    pair = 64 * quarter + gl.arange(0, 64, layout=gl.SliceLayout(0, COPY_WIDE))
    source = q_ptr.to(gl.pointer_type(gl.int32)) + token * 16384 + head[:, None] * 256 + pair[None, :]
    async_copy.async_copy_global_to_shared(place._reinterpret(gl.int32, [64, 64], RAW_WIDE), source)


@gluon.jit
def turn_query(
    place, angles, cos_ptr, sin_ptr, token, quarter: gl.constexpr, HALF_ROPE: gl.constexpr
):  # fmt: skip
    """What `ask_query` brought, turned and in a tile's order, where it lay. `angles` as `keep_angles` left
    them.

    Not from memory through registers: ptxas would put the conversion off until the last wait is over.
    """
    words = place._reinterpret(gl.int32, [64, 64], RAW_WIDE).load(_Q_PART)
    if quarter < 3 or HALF_ROPE == 0 or HALF_ROPE > 64:
        pair = 64 * quarter + gl.arange(0, 64, layout=gl.SliceLayout(0, _Q_PART))
        even, odd = _turned(words, pair, cos_ptr, sin_ptr, token, 64 * quarter + 64, HALF_ROPE)
    else:
        even, odd = channels_of(words)
        cos = angles.index(0).load(gl.SliceLayout(0, _Q_PART))[None, :]
        sin = angles.index(1).load(gl.SliceLayout(0, _Q_PART))[None, :]
        even, odd = channels_of(bf16_words(even * cos - odd * sin, even * sin + odd * cos))
    even_low, even_high = _far_pairs(even, 64)
    odd_low, odd_high = _far_pairs(odd, 64)
    both = gl.join(half_words(even_low, even_high), half_words(odd_low, odd_high))
    both = gl.permute(both, (0, 1, 3, 4, 2))  # [64, 4, 2, 2, 4]
    place._reinterpret(gl.int32, [64, 64], TILE_WORDS).store(gl.reshape(both, [64, 64]))


@gluon.jit
def _last_half(x, layout: gl.constexpr):
    """The last half of the columns of [64, N]."""
    _, x = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def load_angles(cos_ptr, sin_ptr, token, HALF_ROPE: gl.constexpr):
    """The angles of the last 64 pairs; 1 and 0 where nothing turns."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    cos = 1.0
    sin = 0.0
    if HALF_ROPE > 0 and HALF_ROPE <= 64:
        turn = gl.arange(0, 64, layout=line) - (64 - HALF_ROPE)
        cos = gl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)
        sin = gl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)
    return cos, sin


@gluon.jit
def keep_angles(angles, cos, sin, HALF_ROPE: gl.constexpr):
    """What `load_angles` gave to shared memory [2, 64]."""
    if HALF_ROPE > 0 and HALF_ROPE <= 64:
        angles.index(0).store(cos)
        angles.index(1).store(sin)


@gluon.jit
def write_half(
    o, factor, angles, out_ptr, cos_ptr, sin_ptr, token, COLUMN: gl.constexpr, HALF_ROPE: gl.constexpr
):  # fmt: skip
    """Writes 256 channels from COLUMN on, eight neighbours a thread; `angles` as `keep_angles` left them."""
    TURNED: gl.constexpr = HALF_ROPE > 0 and COLUMN + 256 > 512 - 2 * HALF_ROPE
    last_angles = angles._reinterpret(gl.float32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
        half: gl.constexpr = words_layout(128)
        last: gl.constexpr = words_layout(64)
        cos = last_angles.index(1).load(gl.SliceLayout(0, last))[None, :]
        sin = last_angles.index(3).load(gl.SliceLayout(0, last))[None, :]
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
def halves(x, layout: gl.constexpr):
    """The two halves of the columns of [64, N]."""
    first, second = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(
        second, layout, assert_trivial=True
    )
