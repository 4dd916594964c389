# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Quantised activations written in the channel order in which packed weights meet them, from inside a kernel.

The orders are those of `linear_triton.permuted`, here from the producer's side: where a channel goes; or the
codes themselves, in natural order, with their scales (`prepared.CODES`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from cedar.kernels.packed_triton import fp8_round_trip, fp8_scale, to_bf16, to_e4m3


@triton.jit
def place_of(channel, ORDER: tl.constexpr):
    """Where `channel` (int32 tensor) of a row lies in `ORDER`."""
    place = channel
    if ORDER % 4 == 1:  # bytes 1, 3, 0, 2 of every four come first, second, third, fourth
        c = channel % 4
        place = channel - c + tl.where(c % 2 == 1, c // 2, 2 + c // 2)
    elif ORDER % 4 == 2:  # nibbles 3, 7, 2, 6, 1, 5, 0, 4 of every eight
        c = channel % 8
        place = channel - c + tl.where(c < 4, 2 * (3 - c), 2 * (7 - c) + 1)
    if ORDER == 16:  # a thread's eight of 32 channels, two here and two there of every sixteen
        m = place % 32
        place = place - m + (m % 8 // 4) * 16 + (m // 2 % 2) * 8 + (m // 8) * 2 + m % 2
    elif ORDER >= 4:  # a thread's 32 channels, two here and two there of every sixteen
        m = place % 128
        place = place - m + (m % 32 // 4) * 16 + (m // 2 % 2) * 8 + (m // 32) * 2 + m % 2
    return place


@triton.jit
def store_prepared(out_ptr, x, channel, inside, ORDER: tl.constexpr, B: tl.constexpr):
    """Quantises fp32 channels x [B] (bf16 values, B a multiple of 32, from channel 0 of a group on), reads
    them back and stores them at out_ptr (the row's start).
    """
    seen = tl.reshape(fp8_round_trip(tl.reshape(x, [1, B]), B // 32), [B])
    tl.store(out_ptr + place_of(channel, ORDER), to_bf16(seen), mask=inside)


@triton.jit
def store_codes(out_ptr, scale_ptr, x, channel, inside, B: tl.constexpr):
    """Quantises fp32 channels x [B] (bf16 values, B a multiple of 32, from channel 0 of a group on), stores
    E4M3 bytes at out_ptr and E8M0 bytes at scale_ptr (both uint8, the row's start); `channel` int32 [B].
    """
    code = fp8_scale(tl.max(tl.reshape(tl.abs(x), [B // 32, 32]), axis=1))
    down = ((254 - code) << 23).to(tl.float32, bitcast=True)
    down = tl.reshape(tl.broadcast_to(down[:, None], [B // 32, 32]), [B])
    byte = to_e4m3(tl.clamp(x * down, -448.0, 448.0)).to(tl.uint8, bitcast=True)
    tl.store(out_ptr + channel, byte, mask=inside)
    group = tl.min(tl.reshape(channel, [B // 32, 32]), axis=1) // 32
    held = tl.max(tl.reshape(inside.to(tl.int32), [B // 32, 32]), axis=1) > 0
    tl.store(scale_ptr + group, code.to(tl.uint8), mask=held)


@triton.jit
def _words(byte, T: tl.constexpr, B: tl.constexpr):
    """Bytes int32 [T, B] of channels in natural order, four even ones a word and four odd ones: two [T,
    B / 8]. A thread that loaded eight channels has both; a store of bytes would go through the layout of
    bytes, which the compiler gets wrong.
    """
    even, odd = tl.split(tl.reshape(byte, [T, B // 8, 4, 2]))
    shift = (tl.arange(0, 4) * 8)[None, None, :]
    return tl.sum(even << shift, axis=2), tl.sum(odd << shift, axis=2)


@triton.jit
def store_bands(out_ptr, scale_ptr, x, token, there, base, width):
    """Quantises fp32 x [T, B] (bf16 values), channels `base` on of tokens int64 [T], as `bands_hopper` reads
    it: E4M3 bytes [tokens, 2, width], even channels of a group of 32 first, the coarse ones (16 and more) in
    the first half and the others in the second, zeros where they are not; scales times 2^6, fp32 [tokens,
    width / 32]. base and B are multiples of 32; there [T]: which tokens are. out_ptr is a pointer to int32.
    """
    T: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    code = fp8_scale(tl.max(tl.reshape(tl.abs(x), [T, B // 32, 32]), axis=2))
    down = ((254 - code) << 23).to(tl.float32, bitcast=True)
    down = tl.reshape(tl.broadcast_to(down[:, :, None], [T, B // 32, 32]), [T, B])
    byte = to_e4m3(tl.clamp(x * down, -448.0, 448.0)).to(tl.uint8, bitcast=True).to(tl.int32)
    coarse = tl.where((byte & 0x7F) >= 0x58, byte, 0)
    eight = tl.arange(0, B // 8)
    out = out_ptr + token[:, None] * (width // 2) + (base // 4 + eight // 4 * 8 + eight % 4)[None, :]
    mine = there[:, None] & (base + eight * 8 < width)[None, :]
    even, odd = _words(coarse, T, B)
    tl.store(out, even, mask=mine)
    tl.store(out + 4, odd, mask=mine)
    even, odd = _words(byte - coarse, T, B)
    tl.store(out + width // 4, even, mask=mine)
    tl.store(out + width // 4 + 4, odd, mask=mine)
    group = base // 32 + tl.arange(0, B // 32)
    power = (code << 23).to(tl.float32, bitcast=True) * 64.0
    to = scale_ptr + token[:, None] * (width // 32) + group[None, :]
    tl.store(to, power, mask=there[:, None] & (group < width // 32)[None, :])
