# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Activations as E4M3 codes for Hopper's FP8 matrix units: quantised into shared memory by the product itself
or into memory by a launch of its own.

A scale is an E8M0 byte for 32 channels; four of them, those of a block of 128 channels, make a word.
"""

from __future__ import annotations

from cedar.kernels.grid_hopper import grid_release, grid_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE8 = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def power_of_two(n):
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def natural(warps, n):
    """Activations [n, 128], eight neighbouring channels a thread."""
    regs = [[0, 1], [0, 2], [0, 4]]
    warp_rows = []
    row = 2
    for _ in range(warps.bit_length() - 1):
        warp_rows.append([row, 0] if row < n else [0, 0])
        row *= 2
    while row < n:
        regs.append([row, 0])
        row *= 2
    lanes = [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warp_rows, [], [n, 128])


@gluon.constexpr_function
def piece(n, i):
    """The i-th of the powers of two that add up to n, the greatest first; 0 beyond them."""
    for _ in range(i):
        n -= 1 << (n.bit_length() - 1) if n else 0
    return 1 << (n.bit_length() - 1) if n else 0


@gluon.jit
def codes_of(x, N: gl.constexpr):
    """[N, 128] bf16 to E4M3 [N, 128] and a word of scales a row [N]."""
    groups = gl.reshape(x.to(gl.float32), [N, 4, 32])
    amax = gl.maximum(gl.max(gl.abs(groups), axis=2), 1e-4)
    code = ((amax * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    byte = gl.arange(0, 4, layout=gl.SliceLayout(0, code.type.layout))
    word = gl.sum(code << (byte * 8)[None, :], axis=1)
    wide = gl.convert_layout(code, gl.SliceLayout(2, groups.type.layout))[:, :, None]
    down = ((254 - wide) << 23).to(gl.float32, bitcast=True)
    return gl.reshape((groups * down).to(gl.float8e4nv), [N, 128]), word  # the conversion saturates


@gluon.jit
def quantise(x_ptr, out_ptr, word_ptr, tokens, columns, x_stride):
    """Grid (ceil(tokens / 8), columns / 128)."""
    L: gl.constexpr = natural(4, 8)
    grid_wait()
    grid_release()
    t = gl.program_id(0) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    mine = (t < tokens)[:, None]
    row = t.to(gl.int64)[:, None]
    y, word = codes_of(gl.load(x_ptr + row * x_stride + c[None, :], mask=mine, other=0.0), 8)
    gl.store(out_ptr + row * columns + c[None, :], gl.convert_layout(y, L), mask=mine)
    t2 = gl.program_id(0) * 8 + gl.arange(0, 8, layout=word.type.layout)
    gl.store(word_ptr + t2 * (columns // 128) + gl.program_id(1), word, mask=t2 < tokens)


@gluon.jit
def _fetch(x_ptr, first, count, token, tokens, stride, START: gl.constexpr, BLOCKS: gl.constexpr,
           N: gl.constexpr, EACH: gl.constexpr, SHARE: gl.constexpr, SHARES: gl.constexpr,
           WARPS: gl.constexpr):  # fmt: skip
    """bf16 [BLOCKS N, 128]: blocks START on of row n: token n % EACH, share n // EACH of the channels."""
    L: gl.constexpr = natural(WARPS, BLOCKS * N)
    i = gl.arange(0, BLOCKS * N, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    share = i % N // EACH
    block = START + i // N
    t = token + i % N % EACH
    at = t.to(gl.int64) * stride + (share * SHARE + first + block) * 128
    mine = (t < tokens) & (share < SHARES) & (block < count)
    return gl.load(x_ptr + at[:, None] + c[None, :], mask=mine[:, None], other=0.0)


@gluon.jit
def _keep(x_s, words_s, x, START: gl.constexpr, BLOCKS: gl.constexpr, N: gl.constexpr):
    y, word = codes_of(x, BLOCKS * N)
    x_s.index(START)._reinterpret(gl.float8e4nv, [BLOCKS * N, 128], TILE8).store(y)
    words_s.index(START)._reinterpret(gl.int32, [BLOCKS * N], FLAT).store(word)


@gluon.jit
def quantise_into(x_s, words_s, x_ptr, first, count, token, tokens, stride, NB: gl.constexpr,
                  N: gl.constexpr, EACH: gl.constexpr, SHARE: gl.constexpr, SHARES: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """Blocks `first` on, `count` of at most NB, to x_s [NB, N, 128] and words_s [NB, N].

    In at most four pieces, each a power of two: all are asked for before the first is quantised, and between
    two stores to one allocation stands a barrier.
    """
    A: gl.constexpr = piece(NB, 0)
    B: gl.constexpr = piece(NB, 1)
    C: gl.constexpr = piece(NB, 2)
    D: gl.constexpr = piece(NB, 3)
    xa = _fetch(x_ptr, first, count, token, tokens, stride, 0, A, N, EACH, SHARE, SHARES, WARPS)
    if B > 0:
        xb = _fetch(x_ptr, first, count, token, tokens, stride, A, B, N, EACH, SHARE, SHARES, WARPS)
    if C > 0:
        xc = _fetch(x_ptr, first, count, token, tokens, stride, A + B, C, N, EACH, SHARE, SHARES, WARPS)
    if D > 0:
        xd = _fetch(x_ptr, first, count, token, tokens, stride, A + B + C, D, N, EACH, SHARE, SHARES, WARPS)
    _keep(x_s, words_s, xa, 0, A, N)
    if B > 0:
        _keep(x_s, words_s, xb, A, B, N)
    if C > 0:
        _keep(x_s, words_s, xc, A + B, C, N)
    if D > 0:
        _keep(x_s, words_s, xd, A + B + C, D, N)


@gluon.jit
def fetch_words(words_s, word_ptr, first, count, token, tokens, NB: gl.constexpr, N: gl.constexpr,
                EACH: gl.constexpr, SHARE: gl.constexpr, SHARES: gl.constexpr, BLOCKS: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """Words of scales [tokens, BLOCKS] to words_s, laid out as `quantise_into` does."""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1], [32 // N, N] if N <= 16 else [8, 4], [WARPS, 1] if N <= 16 else [1, WARPS], [1, 0]
    )
    block = gl.arange(0, power_of_two(NB), layout=gl.SliceLayout(1, L))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    t = gl.minimum(token + n % EACH, tokens - 1)
    share = gl.minimum(n // EACH, SHARES - 1)
    at = (t * BLOCKS + share * SHARE + first)[None, :] + gl.minimum(block, count - 1)[:, None]
    words = gl.load(word_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at)
    words_s._reinterpret(gl.int32, [power_of_two(NB), N], FLAT2).store(words)


@gluon.jit
def power(word, k: gl.constexpr):
    """fp32 2^(code - 127) of byte k of a word; 0 for code 0."""
    bits = (word << (23 - 8 * k)) if k < 3 else (word >> 1)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)
