# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed experts on Hopper: gate, up and SwiGLU in one kernel, down in another, on packed MXFP4 weights.

The products are those of `weights_hopper`; the hidden activations are written in the order in which w2 meets
them, quantised already.
"""

from __future__ import annotations

from cedar.kernels.weights_hopper import (
    _ACC,
    _COPY,
    _SHARED,
    _TOKENS8,
    _TOKENS16,
    _WIDE,
    _copy_tokens,
    _operand,
    expand_fp4,
    load_fp4,
    load_tokens,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
)


@gluon.jit
def _round(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def expert_hidden(
    x_ptr, slots_ptr, experts_ptr, weight_ptr, w1_ptr, s1_ptr, w3_ptr, s3_ptr, out_ptr, inner, k, limit,
    columns: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Grid (inner / 64, tiles): gate, up, clamp, SwiGLU, routing weight, FP8 round trip; permuted bf16
    [slots, inner].

    Tile i is T slots (token·k + choice; -1: none) of expert experts[i] (-1: no tile).
    """
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        slot = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, LAYOUT)))
        present = slot >= 0
        rows = (gl.maximum(slot, 0) // k).to(gl.int64) * columns
        row = gl.program_id(0) * 64
        base = expert.to(gl.int64) * inner + row
        w1 = w1_ptr + base * (columns // 2)
        w3 = w3_ptr + base * (columns // 2)
        s1 = s1_ptr + base * (columns // 32)
        s3 = s3_ptr + base * (columns // 32)
        gate = gl.full([64, T], 0.0, gl.float32, _ACC)
        up = gl.full([64, T], 0.0, gl.float32, _ACC)
        blocks = columns // 128
        g_words, g_scales = load_fp4(w1, s1, 0, columns)
        u_words, u_scales = load_fp4(w3, s3, 0, columns)
        x = load_tokens(x_ptr, rows, present, 0, T)
        for block in range(blocks):
            g = expand_fp4(g_words, g_scales)
            u = expand_fp4(u_words, u_scales)
            right = _operand(x, 1, T)
            ahead = gl.minimum(block + 1, blocks - 1)
            g_words, g_scales = load_fp4(w1, s1, ahead, columns)
            u_words, u_scales = load_fp4(w3, s3, ahead, columns)
            x = load_tokens(x_ptr, rows, present, ahead, T)
            gate = mma_v2(g, right, gate)
            up = mma_v2(u, right, up)
        _finish_hidden(gate, up, slots_ptr, weight_ptr, out_ptr, tile, row, inner, limit, T, _ACC, False)


@gluon.jit
def _finish_hidden(
    gate, up, slots_ptr, weight_ptr, out_ptr, tile, row, inner, limit,
    T: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Rounds, clamps, SwiGLU, routing weight, FP8 round trip; written in the order in which w2 meets it."""
    mine = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(0, LAYOUT)))
    weight = gl.load(weight_ptr + gl.maximum(mine, 0))
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
        gl.reshape(scaled * (code << 23).to(gl.float32, bitcast=True), [64, T]), LAYOUT
    )
    channel = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    c = channel % 8
    place = channel - c + gl.where(c < 4, 2 * (3 - c), 2 * (7 - c) + 1)
    if WIDE:
        m = place % 128
        place = place - m + (m % 32 // 4) * 16 + (m // 2 % 2) * 8 + (m // 32) * 2 + m % 2
    at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * inner + place[:, None]
    gl.store(at, hidden.to(gl.bfloat16), mask=(mine >= 0)[None, :])


@gluon.jit
def expert_hidden_wide(
    x_ptr, slots_ptr, experts_ptr, weight_ptr, w1_ptr, s1_ptr, w3_ptr, s3_ptr, out_ptr, inner, k, limit,
    columns: gl.constexpr,
):  # fmt: skip
    """`expert_hidden` for tiles of 64 slots, by wgmma."""
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        slot = gl.load(slots_ptr + tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY)))
        rows = (gl.maximum(slot, 0) // k).to(gl.int64) * columns
        row = gl.program_id(0) * 64
        base = expert.to(gl.int64) * inner + row
        w1 = w1_ptr + base * (columns // 2)
        w3 = w3_ptr + base * (columns // 2)
        s1 = s1_ptr + base * (columns // 32)
        s3 = s3_ptr + base * (columns // 32)
        shared = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], _SHARED)
        gate = gl.full([64, 64], 0.0, gl.float32, _WIDE)
        up = gl.full([64, 64], 0.0, gl.float32, _WIDE)
        blocks: gl.constexpr = columns // 128
        _copy_tokens(shared.index(0), x_ptr, rows, 0)
        _copy_tokens(shared.index(1), x_ptr, rows, gl.minimum(1, blocks - 1))
        g_words, g_scales = load_fp4(w1, s1, 0, columns)
        u_words, u_scales = load_fp4(w3, s3, 0, columns)
        for block in range(blocks):
            left = expand_fp4(g_words, g_scales, 2)
            right = shared.index(block % 3).permute((1, 0))
            ahead = gl.minimum(block + 1, blocks - 1)
            g_words, g_scales = load_fp4(w1, s1, ahead, columns)
            async_copy.wait_group(1)
            fence_async_shared()
            _copy_tokens(shared.index((block + 2) % 3), x_ptr, rows, gl.minimum(block + 2, blocks - 1))
            gate = warpgroup_mma(left, right, gate)
            left = expand_fp4(u_words, u_scales, 2)
            u_words, u_scales = load_fp4(w3, s3, ahead, columns)
            up = warpgroup_mma(left, right, up)
        async_copy.wait_group(0)
        _finish_hidden(gate, up, slots_ptr, weight_ptr, out_ptr, tile, row, inner, limit, 64, _WIDE, True)


@gluon.jit
def expert_output_wide(
    x_ptr, slots_ptr, experts_ptr, w2_ptr, s2_ptr, out_ptr, outputs, columns: gl.constexpr
):
    """`expert_output` for tiles of 64 slots, by wgmma."""
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        slot = gl.load(slots_ptr + tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY)))
        rows = gl.maximum(slot, 0).to(gl.int64) * columns
        row = gl.program_id(0) * 64
        base = expert.to(gl.int64) * outputs + row
        weight = w2_ptr + base * (columns // 2)
        scale = s2_ptr + base * (columns // 32)
        shared = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], _SHARED)
        acc = gl.full([64, 64], 0.0, gl.float32, _WIDE)
        blocks: gl.constexpr = columns // 128
        _copy_tokens(shared.index(0), x_ptr, rows, 0)
        _copy_tokens(shared.index(1), x_ptr, rows, gl.minimum(1, blocks - 1))
        words, scales = load_fp4(weight, scale, 0, columns)
        for block in range(blocks):
            left = expand_fp4(words, scales, 2)
            words, scales = load_fp4(weight, scale, gl.minimum(block + 1, blocks - 1), columns)
            async_copy.wait_group(1)
            fence_async_shared()
            _copy_tokens(shared.index((block + 2) % 3), x_ptr, rows, gl.minimum(block + 2, blocks - 1))
            acc = warpgroup_mma(left, shared.index(block % 3).permute((1, 0)), acc)
        async_copy.wait_group(0)
        mine = gl.load(slots_ptr + tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, _WIDE)))
        r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _WIDE))
        at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * outputs + r[:, None]
        gl.store(at, (acc * 4294967296.0).to(gl.bfloat16), mask=(mine >= 0)[None, :])


@gluon.jit
def expert_output(
    x_ptr, slots_ptr, experts_ptr, w2_ptr, s2_ptr, out_ptr, outputs,
    columns: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Grid (outputs / 64, tiles): w2 of `expert_hidden`'s rows, bf16 [slots, outputs]."""
    LAYOUT: gl.constexpr = _TOKENS8 if T == 8 else _TOKENS16
    tile = gl.program_id(1)
    expert = gl.load(experts_ptr + tile)
    if expert >= 0:
        slot = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(1, LAYOUT)))
        present = slot >= 0
        rows = gl.maximum(slot, 0).to(gl.int64) * columns
        row = gl.program_id(0) * 64
        base = expert.to(gl.int64) * outputs + row
        weight = w2_ptr + base * (columns // 2)
        scale = s2_ptr + base * (columns // 32)
        acc = gl.full([64, T], 0.0, gl.float32, _ACC)
        blocks = columns // 128
        words, scales = load_fp4(weight, scale, 0, columns)
        x = load_tokens(x_ptr, rows, present, 0, T)
        for block in range(blocks):
            left = expand_fp4(words, scales)
            right = _operand(x, 1, T)
            ahead = gl.minimum(block + 1, blocks - 1)
            words, scales = load_fp4(weight, scale, ahead, columns)
            x = load_tokens(x_ptr, rows, present, ahead, T)
            acc = mma_v2(left, right, acc)
        mine = gl.load(slots_ptr + tile * T + gl.arange(0, T, layout=gl.SliceLayout(0, _ACC)))
        r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC))
        at = out_ptr + gl.maximum(mine, 0)[None, :].to(gl.int64) * outputs + r[:, None]
        gl.store(at, (acc * 4294967296.0).to(gl.bfloat16), mask=(mine >= 0)[None, :])
