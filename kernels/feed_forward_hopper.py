# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts and the shared one in the same two launches on Hopper, for few tokens (spec §3).

A tile of slots belongs to one expert, MXFP4, or to the shared expert, FP8: tile number `experts`. The
products are those of `weights_hopper`; hidden activations are written quantised, in the order in which w2
meets them.
"""

from __future__ import annotations

from cedar.kernels.weights_hopper import (
    _ACC,
    _TOKENS8,
    _TOKENS16,
    _operand,
    expand_fp4,
    expand_fp8,
    load_fp4,
    load_fp8,
    load_tokens,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed after Triton 3.6
_SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [16 tokens, 64 channels]


@gluon.jit
def _round(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _products4(
    x_ptr, rows, present, first, first_scale, second, second_scale, columns: gl.constexpr, T: gl.constexpr
):
    """Two products [64, T] with MXFP4 rows."""
    a = gl.full([64, T], 0.0, gl.float32, _ACC)
    b = gl.full([64, T], 0.0, gl.float32, _ACC)
    blocks: gl.constexpr = columns // 128
    a_words, a_scales = load_fp4(first, first_scale, 0, columns)
    b_words, b_scales = load_fp4(second, second_scale, 0, columns)
    x = load_tokens(x_ptr, rows, present, 0, T)
    for block in range(blocks):
        left = expand_fp4(a_words, a_scales)
        other = expand_fp4(b_words, b_scales)
        right = _operand(x, 1, T)
        ahead = gl.minimum(block + 1, blocks - 1)
        a_words, a_scales = load_fp4(first, first_scale, ahead, columns)
        b_words, b_scales = load_fp4(second, second_scale, ahead, columns)
        x = load_tokens(x_ptr, rows, present, ahead, T)
        a = mma_v2(left, right, a)
        b = mma_v2(other, right, b)
    return a, b


@gluon.jit
def _products8(
    x_ptr, rows, present, first, first_scale, second, second_scale, columns: gl.constexpr, T: gl.constexpr
):
    """Two products [64, T] with FP8 rows."""
    a = gl.full([64, T], 0.0, gl.float32, _ACC)
    b = gl.full([64, T], 0.0, gl.float32, _ACC)
    blocks: gl.constexpr = columns // 128
    a_words, a_scales = load_fp8(first, first_scale, 0, columns)
    b_words, b_scales = load_fp8(second, second_scale, 0, columns)
    x = load_tokens(x_ptr, rows, present, 0, T)
    for block in range(blocks):
        left = expand_fp8(a_words, a_scales)
        other = expand_fp8(b_words, b_scales)
        right = _operand(x, 1, T)
        ahead = gl.minimum(block + 1, blocks - 1)
        a_words, a_scales = load_fp8(first, first_scale, ahead, columns)
        b_words, b_scales = load_fp8(second, second_scale, ahead, columns)
        x = load_tokens(x_ptr, rows, present, ahead, T)
        a = mma_v2(left, right, a)
        b = mma_v2(other, right, b)
    return a, b


@gluon.jit(do_not_specialize=["routed"])
def hidden_rows(
    x4_ptr, x8_ptr, slots_ptr, owners_ptr, weight_ptr, w1_ptr, s1_ptr, w3_ptr, s3_ptr, w13_ptr, s13_ptr,
    out_ptr,
    inner, k, routed, experts, limit, columns: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Grid (inner / 64, tiles): gate, up, clamp, SwiGLU, routing weight, FP8 round trip; bf16 [slots, inner].

    Slot s below `routed` is choice s % k of token s // k, slot routed + n the shared expert's token n; -1:
    none. x4, x8: activations in the orders for FP4 and FP8 weights. w13 is the shared expert's w1 over its
    w3.
    """
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    tile = gl.program_id(1)
    owner = gl.load(owners_ptr + tile)
    if owner >= 0:
        slot = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, LAYOUT)))
        present = slot >= 0
        row = gl.program_id(0) * 64
        if owner == experts:
            rows = gl.maximum(slot - routed, 0).to(gl.int64) * columns
            base = row.to(gl.int64)
            gate, up = _products8(
                x8_ptr, rows, present, w13_ptr + base * columns, s13_ptr + (base // 32) * (columns // 32),
                w13_ptr + (inner + base) * columns, s13_ptr + ((inner + base) // 32) * (columns // 32),
                columns, T,
            )  # fmt: skip
        else:
            rows = (gl.maximum(slot, 0) // k).to(gl.int64) * columns
            base = owner.to(gl.int64) * inner + row
            gate, up = _products4(
                x4_ptr, rows, present, w1_ptr + base * (columns // 2), s1_ptr + base * (columns // 32),
                w3_ptr + base * (columns // 2), s3_ptr + base * (columns // 32), columns, T,
            )  # fmt: skip
        mine = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(0, _ACC)))
        weighted = (mine >= 0) & (mine < routed)
        weight = gl.load(weight_ptr + gl.maximum(mine, 0), mask=weighted, other=1.0)
        gate = gl.minimum(_round(gate * 4294967296.0), limit)
        up = gl.minimum(gl.maximum(_round(up * 4294967296.0), -limit), limit)
        hidden = _round(gate / (1.0 + gl.exp(-gate)) * up * weight[None, :])
        parts = gl.reshape(hidden, [2, 32, T])
        amax = gl.max(gl.abs(parts), axis=1)
        code = ((gl.maximum(amax, 1e-4) * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
        code = gl.convert_layout(code, gl.SliceLayout(1, parts.type.layout))[:, None, :]
        down = ((254 - code) << 23).to(gl.float32, bitcast=True)
        scaled = gl.minimum(gl.maximum(parts * down, -448.0), 448.0).to(gl.float8e4nv).to(gl.float32)
        hidden = gl.convert_layout(
            gl.reshape(scaled * (code << 23).to(gl.float32, bitcast=True), [64, T]), _ACC
        )
        channel = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
        c = channel % 8
        fp4 = channel - c + gl.where(c < 4, 2 * (3 - c), 2 * (7 - c) + 1)
        c = channel % 4
        fp8 = channel - c + gl.where(c % 2 == 1, c // 2, 2 + c // 2)
        place = gl.where(owner == experts, fp8, fp4)
        at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * inner + place[:, None]
        gl.store(at, hidden.to(gl.bfloat16), mask=(mine >= 0)[None, :])


@gluon.jit(do_not_specialize=["tokens"])
def output_rows(
    x_ptr, slots_ptr, owners_ptr, w2_ptr, s2_ptr, shared_ptr, shared_scale_ptr, row_ptr, count_ptr, out_ptr,
    outputs,
    experts, tokens, k, columns: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / 64, tiles): w2 of `hidden_rows`' rows, bf16 [slots, outputs]; the last program of a
    block of outputs adds: out bf16 [tokens, outputs] is a token's k routed rows in fp32, first to last, and
    its shared one. count_ptr (zeros) is left as it was found.
    """
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    tile = gl.program_id(1)
    owner = gl.load(owners_ptr + tile)
    if owner >= 0:
        slot = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, LAYOUT)))
        present = slot >= 0
        rows = gl.maximum(slot, 0).to(gl.int64) * columns
        row = gl.program_id(0) * 64
        blocks: gl.constexpr = columns // 128
        acc = gl.full([64, T], 0.0, gl.float32, _ACC)
        x = load_tokens(x_ptr, rows, present, 0, T)
        if owner == experts:
            base = row.to(gl.int64)
            weight = shared_ptr + base * columns
            scale = shared_scale_ptr + (base // 32) * (columns // 32)
            words, scales = load_fp8(weight, scale, 0, columns)
            for block in range(blocks):
                left = expand_fp8(words, scales)
                right = _operand(x, 1, T)
                ahead = gl.minimum(block + 1, blocks - 1)
                words, scales = load_fp8(weight, scale, ahead, columns)
                x = load_tokens(x_ptr, rows, present, ahead, T)
                acc = mma_v2(left, right, acc)
        else:
            base = owner.to(gl.int64) * outputs + row
            weight4 = w2_ptr + base * (columns // 2)
            scale4 = s2_ptr + base * (columns // 32)
            words4, scales4 = load_fp4(weight4, scale4, 0, columns)
            for block in range(blocks):
                left = expand_fp4(words4, scales4)
                right = _operand(x, 1, T)
                ahead = gl.minimum(block + 1, blocks - 1)
                words4, scales4 = load_fp4(weight4, scale4, ahead, columns)
                x = load_tokens(x_ptr, rows, present, ahead, T)
                acc = mma_v2(left, right, acc)
        mine = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(0, _ACC)))
        r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
        at = row_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * outputs + r[:, None]
        gl.store(at, (acc * 4294967296.0).to(gl.bfloat16), mask=(mine >= 0)[None, :])
    _barrier()
    if gl.atomic_add(count_ptr + gl.program_id(0), 1, sem="acq_rel") == gl.num_programs(1) - 1:
        channel = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, _SUMS))
        for start in range(0, tokens, 16):
            token = start + gl.arange(0, 16, layout=gl.SliceLayout(1, _SUMS))
            inside = (token < tokens)[:, None]
            total = gl.full([16, 64], 0.0, gl.float32, _SUMS)
            for i in range(k):
                at = row_ptr + (token * k + i)[:, None].to(gl.int64) * outputs + channel[None, :]
                total += gl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
            at = row_ptr + (tokens * k + token)[:, None].to(gl.int64) * outputs + channel[None, :]
            total += gl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
            out = out_ptr + token[:, None].to(gl.int64) * outputs + channel[None, :]
            gl.store(out, total.to(gl.bfloat16), mask=inside)
        gl.atomic_xchg(count_ptr + gl.program_id(0), 0)
