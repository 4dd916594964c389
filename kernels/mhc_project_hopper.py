# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The trades of `mhc_many_hopper` that split the projection, and multiply the new streams by it (spec §6)."""

from __future__ import annotations

from cedar.kernels.grid_hopper import arrive, barrier, wait_for
from cedar.kernels.mhc_hopper import acc_layout, fn_layout, put_parts
from cedar.kernels.mhc_mix_hopper import mixes, part_sums, parts_layout
from cedar.kernels.mhc_rounds_hopper import STAGES, T, here, share
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TOGETHER = gl.constexpr(4)  # tiles whose sums are turned into mixes at once


@gluon.jit
def _fill(x_desc, x_s, full, row, channel, stage, width, some):
    """Starts the copy of a block of the four streams."""
    mbarrier.expect(full.index(stage), 4 * 128 * T, pred=some)
    for s in gl.static_range(4):
        tma.async_copy_global_to_shared(
            x_desc, [row, s * width + channel], full.index(stage), x_s[s].index(stage), pred=some
        )


@gluon.jit
def split_projection(fn_ptr, tokens, width, wide_s, rest_s, split_s, spent_s, SPLITS: gl.constexpr):
    """The projection's three parts, a stream of a block at a time, two of them ahead of the product."""
    FL: gl.constexpr = fn_layout(gl.num_warps())
    first, count, _, rounds = here(width, tokens, SPLITS)
    mix = gl.arange(0, 32, layout=gl.SliceLayout(1, FL))
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, FL))
    known = (mix < 24)[:, None] & (channel >= 0)[None, :]
    fn = fn_ptr + mix[:, None] * (4 * width) + first * 64 + channel[None, :]
    v0 = gl.load(fn, mask=known, other=0.0)
    v1 = gl.load(fn + width, mask=known, other=0.0)
    v2 = gl.load(fn + 2 * width, mask=known, other=0.0)
    v3 = gl.load(fn + 3 * width, mask=known, other=0.0)
    turn = 0
    for _ in range(rounds * count):
        turn += 1
        if turn == count:
            turn = 0
        for s in gl.static_range(4):
            mbarrier.wait(spent_s.index(s & 1), (s >> 1) ^ 1)  # twice a block
            put_parts(v0 if s == 0 else v1 if s == 1 else v2 if s == 2 else v3, wide_s[s & 1], rest_s[s & 1])
            fence_async_shared()
            mbarrier.arrive(split_s.index(s & 1), count=1)
        at = fn + turn * 64  # after the block's last fence, which would wait for them
        v0 = gl.load(at, mask=known, other=0.0)
        v1 = gl.load(at + width, mask=known, other=0.0)
        v2 = gl.load(at + 2 * width, mask=known, other=0.0)
        v3 = gl.load(at + 3 * width, mask=known, other=0.0)


@gluon.jit
def multiply(
    x_desc, out_desc, scale_ptr, base_ptr, part_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr,
    cell, base, z_cell, z_base, tokens, width, mix_eps, hc_eps, sinkhorn,
    x_s, wide_s, rest_s, full, ready, split_s, spent_s,
    SPLITS: gl.constexpr, SP2: gl.constexpr, TS: gl.constexpr,
):  # fmt: skip
    """New streams out, and times the projection; the ring's next blocks; at last the mixes of some tokens."""
    NW: gl.constexpr = gl.num_warps()
    A64: gl.constexpr = acc_layout(64, T, NW)
    A32: gl.constexpr = acc_layout(32, T, NW)
    split = gl.program_id(0)
    first, count, group, rounds = here(width, tokens, SPLITS)
    groups = gl.num_programs(1)
    left = rounds * count  # blocks still to be asked for
    ahead = group * T
    block = 0
    for i in range(STAGES):
        _fill(x_desc, x_s, full, ahead, (first + block) * 64, i, width, left > 0)
        left -= 1
        block += 1
        if block == count:
            block = 0
            ahead += groups * T
    stage = 0
    phase = 0
    for r in range(rounds):
        tile = group + r * groups
        za = gl.full([T, 64], 0.0, gl.float32, A64)
        zb = gl.full([T, 32], 0.0, gl.float32, A32)
        for turn in range(count):
            mbarrier.wait(ready.index(stage), phase)
            for s in gl.static_range(4):
                tma.async_copy_shared_to_global(
                    out_desc, [tile * T, s * width + (first + turn) * 64], x_s[s].index(stage)
                )
            for s in gl.static_range(4):
                mbarrier.wait(split_s.index(s & 1), s >> 1)
                x = x_s[s].index(stage)
                za = warpgroup_mma(x, wide_s[s & 1].permute((1, 0)), za, is_async=True)
                zb = warpgroup_mma(x, rest_s[s & 1].permute((1, 0)), zb, is_async=True)
                if s > 0:
                    za, zb = warpgroup_mma_wait(2, deps=(za, zb))
                    mbarrier.arrive(spent_s.index((s - 1) & 1), count=1)
            za, zb = warpgroup_mma_wait(0, deps=(za, zb))
            mbarrier.arrive(spent_s.index(1), count=1)
            tma.store_wait(0)
            barrier()
            _fill(x_desc, x_s, full, ahead, (first + block) * 64, stage, width, left > 0)
            left -= 1
            block += 1
            if block == count:
                block = 0
                ahead += groups * T
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        low, high = gl.split(gl.permute(gl.reshape(za, [T, 2, 32]), (0, 2, 1)))
        both = (gl.convert_layout(zb, high.type.layout) + high) + low
        zt = gl.arange(0, T, layout=gl.SliceLayout(1, both.type.layout))
        zc = gl.arange(0, 32, layout=gl.SliceLayout(0, both.type.layout))
        part = part_ptr + (tile * SPLITS + split) * (32 * T)
        gl.store(part + zc[None, :] + zt[:, None] * 32, both, mask=(zc < 24)[None, :] & (zt >= 0)[:, None])
    arrive(z_cell, share(SPLITS))
    wait_for(z_cell, z_base + 64)
    wait_for(cell, base + rounds * 64)
    PL: gl.constexpr = parts_layout(SP2, TS * TOGETHER, NW)
    for q in range(0, rounds, TOGETHER):
        t2 = gl.arange(0, TS * TOGETHER, layout=gl.SliceLayout(0, gl.SliceLayout(2, PL)))
        token = split * TS + t2 % TS
        ok = (token < T) & (q + t2 // TS < rounds)
        tile2 = group + (q + t2 // TS) * groups
        z = part_sums(part_ptr, 0, tile2 * (SPLITS * T) + token, ok, T, SPLITS, SP2, PL, 8)
        whose = gl.convert_layout(gl.where(ok, tile2 * T + token, tokens), gl.SliceLayout(1, z.type.layout))
        mixes(
            z, whose, tokens, scale_ptr, base_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr, width, mix_eps,
            hc_eps, sinkhorn, TS * TOGETHER, NW,
        )  # fmt: skip
