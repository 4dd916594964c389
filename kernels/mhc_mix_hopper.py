# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What both kernels of a sublayer's boundary on Hopper end with: the sums of its projection become pre, post
and comb, a row of comb a lane (spec §6).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def parts_layout(SP2, TS, NW):
    """[SP2, TS, 32]: columns in lanes, tokens over warps, then splits over warps; the rest in registers."""
    regs: list[list[int]] = []
    warps: list[list[int]] = []
    room = NW.bit_length() - 1
    for i in range(TS.bit_length() - 1):
        (warps if len(warps) < room else regs).append([0, 1 << i, 0])
    for i in range(SP2.bit_length() - 1):
        (warps if len(warps) < room else regs).append([1 << i, 0, 0])
    while len(warps) < room:
        warps.append([0, 0, 0])
    return gl.DistributedLinearLayout(regs, [[0, 0, 1 << i] for i in range(5)], warps, [], [SP2, TS, 32])


@gluon.constexpr_function
def comb_layout(TS, NW):
    """[TS, 2, 4, 4]: a row of comb a lane; tokens over warps, then lanes."""
    regs, lanes = [[0, 0, 0, 1], [0, 0, 0, 2]], [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]]
    warps: list[list[int]] = []
    room = NW.bit_length() - 1
    for i in range(TS.bit_length() - 1):
        (warps if len(warps) < room else lanes if len(lanes) < 5 else regs).append([1 << i, 0, 0, 0])
    while len(lanes) < 5:
        lanes.append([0, 0, 0, 0])
    while len(warps) < room:
        warps.append([0, 0, 0, 0])
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [TS, 2, 4, 4])


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _inverse(x):
    """1 / x within an ulp."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def coefficients(
    z,
    scale_ptr,
    base_ptr,
    width,
    mix_eps,
    hc_eps,
    rounds,
    TS: gl.constexpr,
    NW: gl.constexpr,
):
    """[TS, 32] of sums z [TS, 32], whose place L holds column (L + 8) % 32: comb from 0 on, pre from 24, post
    from 28.
    """
    L: gl.constexpr = z.type.layout
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    column = (place + 8) % 32
    square = gl.sum(gl.where((place == 23)[None, :], z, 0.0), axis=1)
    which = gl.where(column < 4, 0, gl.where(column < 8, 1, 2))
    known = column < 24
    scale = gl.load(scale_ptr + which)
    base = gl.load(base_ptr + column, mask=known, other=0.0)
    rms = 1.0 / gl.sqrt(square / (4 * width) + mix_eps)
    z = z * rms[:, None] * scale[None, :] + base[None, :]
    z = gl.where((column < 24)[None, :], z, 0.0)
    gate = _sigmoid(z)
    gate = gl.where((column < 4)[None, :], gate + hc_eps, 2.0 * gate)
    c = gl.convert_layout(gl.reshape(z, [TS, 2, 4, 4]), comb_layout(TS, NW))
    c = gl.exp(c - gl.expand_dims(gl.max(c, axis=3), 3))
    c = c * gl.expand_dims(_inverse(gl.sum(c, axis=3)), 3) + hc_eps
    c = c * gl.expand_dims(_inverse(gl.sum(c, axis=2) + hc_eps), 2)
    for _ in range(rounds - 1):
        c = c * gl.expand_dims(_inverse(gl.sum(c, axis=3) + hc_eps), 3)
        c = c * gl.expand_dims(_inverse(gl.sum(c, axis=2) + hc_eps), 2)
    return gl.where((place < 16)[None, :], gl.convert_layout(gl.reshape(c, [TS, 32]), L), gate)


@gluon.jit
def store_mixes(found, token, tokens, pre_ptr, post_ptr, comb_ptr):
    """`coefficients` [TS, 32] of tokens int [TS] to where they belong."""
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, found.type.layout))[None, :]
    keep = (token < tokens)[:, None]
    row = token.to(gl.int64)[:, None]
    gl.store(comb_ptr + row * 16 + place, found, mask=keep & (place < 16))
    gl.store(pre_ptr + row * 4 + place - 24, found, mask=keep & (place >= 24) & (place < 28))
    gl.store(post_ptr + row * 4 + place - 28, found, mask=keep & (place >= 28))


@gluon.jit
def mixes(
    z,
    token,
    tokens,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    width,
    mix_eps,
    hc_eps,
    rounds,
    TS: gl.constexpr,
    NW: gl.constexpr,
):
    """pre, post and comb of sums z [TS, 32] as `coefficients` takes them."""
    found = coefficients(z, scale_ptr, base_ptr, width, mix_eps, hc_eps, rounds, TS, NW)
    store_mixes(found, token, tokens, pre_ptr, post_ptr, comb_ptr)


@gluon.jit
def part_sums(
    part_ptr,
    first,
    t,
    ok,
    T: gl.constexpr,
    SPLITS: gl.constexpr,
    SP2: gl.constexpr,
    PL: gl.constexpr,
    TURN: gl.constexpr,
):
    """[TS, 32] of parts [splits, T, 32], columns turned by TURN."""
    s = gl.arange(0, SP2, layout=gl.SliceLayout(1, gl.SliceLayout(2, PL)))
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, PL)))
    at = (
        ((first + s) * (32 * T))[:, None, None]
        + (t * 32)[None, :, None]
        + ((place + TURN) % 32)[None, None, :]
    )
    here = (s < SPLITS)[:, None, None] & ok[None, :, None] & (place >= 0)[None, None, :]
    return gl.sum(gl.load(part_ptr + at, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
