# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Quantised activations written in the channel order in which packed weights meet them, from inside a kernel.

The orders are those of `linear_triton.permuted`, here from the producer's side: where a channel goes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from cedar.kernels.packed_triton import fp8_round_trip, to_bf16


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
    if ORDER >= 4:  # a thread's 32 channels, two here and two there of every sixteen
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
