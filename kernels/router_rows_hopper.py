# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The router's selection for many tokens on Hopper: a warp a token, whose reductions stay in it (spec §3)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LEAST = 4  # experts a lane has at least


@gluon.constexpr_function
def rows_layout(E, R):
    """[R, E]: a warp a row, four neighbours a lane."""
    regs: list[list[int]] = []
    lanes: list[list[int]] = []
    at = 1
    while at < E:
        (regs if at < 4 or len(lanes) == 5 else lanes).append([0, at])
        at *= 2
    while len(lanes) < 5:
        lanes.append([0, 0])
    return gl.DistributedLinearLayout(
        regs, lanes, [[1 << i, 0] for i in range(R.bit_length() - 1)], [], [R, E]
    )


@gluon.jit
def chosen_rows(
    logits_ptr, bias_ptr, token, tokens, experts, bias_stride, k, scale, E: gl.constexpr, R: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """The k best of each token int64 [R] of logits fp32 [tokens, experts], or of PARTS of them added up, as
    `router_triton._select` has them: (which are chosen [R, E], their numbers, their weights, where they go in
    rows of k).
    """
    L: gl.constexpr = rows_layout(E, R)
    expert = gl.arange(0, E, layout=gl.SliceLayout(0, L))
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    bias = gl.load(bias_ptr + token[:, None] * bias_stride + expert[None, :], mask=inside, other=0.0)
    at = token[:, None] * experts + expert[None, :]
    x = gl.load(logits_ptr + at, mask=inside, other=0.0)
    for _ in gl.static_range(1, PARTS):
        logits_ptr += tokens.to(gl.int64) * experts
        x += gl.load(logits_ptr + at, mask=inside, other=0.0)
    softplus = gl.where(x > 20.0, x, gl.log(1.0 + gl.exp(gl.minimum(x, 20.0))))
    softplus = gl.where(x < -10.0, gl.exp(x), softplus)  # log(1 + e^x) loses e^x there
    s = gl.sqrt(softplus)
    word = (s + bias + 0.0).to(gl.int32, bitcast=True)
    order = gl.where(inside, word ^ ((word >> 31) & 0x7FFFFFFF), -0x80000000)
    number = gl.full([R, E], 0, gl.int32, L) + expert[None, :]
    taken = gl.full([R, E], 0, gl.int32, L)
    place = taken
    for _ in range(k):
        best = gl.max(order, axis=1)[:, None]
        first = gl.min(gl.where((order == best) & inside, number, E), axis=1)[:, None]
        taken = gl.where(number == first, 1, taken)
        place += (number > first).to(gl.int32)  # how many of the chosen have lower numbers
        order = gl.where(number == first, -0x80000000, order)
    total = gl.sum(gl.where(taken > 0, s, 0.0), axis=1) + 1e-20
    return (taken > 0) & inside, number, s / total[:, None] * scale, (token * k).to(gl.int32)[:, None] + place


@gluon.jit(do_not_specialize=["tokens", "bias_stride", "k"])
def choose_rows(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, tokens, experts, bias_stride, k, scale, E: gl.constexpr,
    R: gl.constexpr,
):  # fmt: skip
    """As `router_triton._choose`. Grid (ceil(tokens / R)), R warps."""
    L: gl.constexpr = rows_layout(E, R)
    token = gl.program_id(0).to(gl.int64) * R + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    chosen, number, weight, at = chosen_rows(
        logits_ptr, bias_ptr, token, tokens, experts, bias_stride, k, scale, E, R, 1
    )
    gl.store(ids_ptr + at, number, mask=chosen)
    gl.store(weights_ptr + at, weight, mask=chosen)
