# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Parts of an output that are joined by reading them until they are there (`sparse_attention_teams_hopper`).

Parts lie in memory that holds all ones where nothing was written, which no fp16 result is (a NaN is 0x7FFF):
who joins reads a part over and over until it is there, and leaves all ones behind for the next launch, which
writes only after it has waited for this one's end. No counter, no fence. Programs that wait are neighbours in
launch order, so those that wait are never all that run.
"""

from __future__ import annotations

from functools import cache

import torch
from cedar.kernels.grid_hopper import SINGLES
from cedar.kernels.sparse_attention_operands_hopper import along, numbers, words_at
from cedar.kernels.sparse_attention_pieces_hopper import held
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCKS = 1024  # parts of 16 heads that there is memory for: 16 MiB
MOST = 20  # parts of a query
_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
# A thread has two channels ($4 and $6, $5 and $7) of two chunks, the one four lanes on their neighbours: one
# takes the even ones ($0, $1) and odd ones ($2, $3) of the first, the upper ($8) those of the second.
_TRADE = gl.constexpr("""{
.reg .f32 s, u, a, b;
.reg .pred p;
setp.ne.b32 p, $8, 0;
selp.f32 s, $4, $5, p;
selp.f32 u, $6, $7, p;
shfl.sync.bfly.b32 a, s, 4, 31, -1;
shfl.sync.bfly.b32 b, u, 4, 31, -1;
selp.f32 $0, a, $4, p;
selp.f32 $1, b, $6, p;
selp.f32 $2, $5, a, p;
selp.f32 $3, $7, b, p;
}""")


@cache
def parts(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of CUDA device `index` for parts, two fp16 a word [BLOCKS, 16, 256], and for their sums' logs,
    fp32 [BLOCKS, 16, 4], a copy for each of four warps. All ones between launches; calls share them, so one
    stream at a time.
    """
    device = f"cuda:{index}"
    words = torch.full((BLOCKS * 16 * 256,), -1, dtype=torch.int32, device=device)
    logs = torch.full((BLOCKS * 64,), -1, dtype=torch.int32, device=device)
    return words, logs.view(torch.float32)


@gluon.constexpr_function
def _until(splits):
    """Reads the parts of two words and their logs until none is all ones, and leaves all ones behind. Outputs
    two words a part, then twice the log a part; inputs the first words' address twice, the first log's, and
    whether this warp has anything to read.
    """
    words, logs, at = range(2 * splits), range(2 * splits, 4 * splits, 2), 4 * splits
    text = f"""{{
.reg .pred p;
.reg .b32 m, t;
setp.eq.b32 p, ${at + 4}, 0;
@p bra NONE;
AGAIN:
"""
    for i in range(splits):
        text += f"ld.relaxed.gpu.global.v2.b32 {{${2 * i}, ${2 * i + 1}}}, [${at} + {i * 16384}];\n"
    for i, log in enumerate(logs):
        text += f"ld.relaxed.gpu.global.b32 ${log}, [${at + 2} + {i * 256}];\n"
    text += "mov.b32 m, 0;\n"
    text += "".join(f"max.u32 m, m, ${word};\n" for word in words)
    text += "".join(f"mov.b32 t, ${log};\nmax.u32 m, m, t;\n" for log in logs)
    text += (
        "setp.eq.u32 p, m, 0xFFFFFFFF;\n@p bra AGAIN;\nbar.warp.sync 0xFFFFFFFF;\nmov.b32 m, 0xFFFFFFFF;\n"
    )
    for i, log in enumerate(logs):
        text += f"st.relaxed.gpu.global.v2.b32 [${at} + {i * 16384}], {{m, m}};\n"
        text += f"st.relaxed.gpu.global.b32 [${at + 2} + {i * 256}], m;\nmov.b32 ${log + 1}, ${log};\n"
    text += "bra DONE;\nNONE:\n" + "".join(f"mov.b32 ${i}, 0;\n" for i in range(4 * splits))
    return text + "DONE:\n}"


@gluon.constexpr_function
def _until_types(splits):
    return (gl.int32,) * splits + (gl.float32,) * splits


@gluon.constexpr_function
def _until_constraints(splits):
    return ",".join(["=&r"] * (2 * splits) + ["=&f"] * (2 * splits) + ["l"] * 4 + ["r"] * 2)


@gluon.jit
def join(
    part_ptr, lse_ptr, sink_ptr, cos_at, sin_at, out_ptr, block, token, first, one,
    heads: gl.constexpr, HALF_ROPE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Waits for the parts of a head a team, from `block` on, and writes them weighted by their sums, with the
    sink, turned back.
    """
    W: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = 256
    ones: gl.constexpr = held(W)
    twos: gl.constexpr = held(W, 2)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, ones))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, ones))[None, :]
    warp, lane = warp + lane * 0, lane + warp * 0
    local = one + (warp >> 2)
    mine = (local < 16) & (first + local < heads)
    local = gl.where(mine, local, one)
    head = first + local
    place = along(2 * (32 * (warp & 3) + lane), 2, twos) + numbers(2, twos)
    upper = (lane >> 2) & 1
    word = 2 * (32 * (warp & 3) + (lane & -8)) + 4 * (2 * (lane & 1) + upper) + (lane & 2)
    word = along(word, 2, twos) + numbers(2, twos)
    sink = gl.load(sink_ptr + head) * 1.4426950408889634
    if HALF_ROPE > 0:
        turn = word - (WORDS - HALF_ROPE)
        cos = gl.load(cos_at + turn, mask=turn >= 0, other=1.0)
        sin = gl.load(sin_at + turn, mask=turn >= 0, other=0.0)
    at = part_ptr + block * (16 * WORDS) + (along(local, 2, twos) * WORDS + place)
    log_at = along(lse_ptr + block * 64 + (4 * local + (warp & 3)), 2, twos) + 0 * place
    found = gl.inline_asm_elementwise(
        _until(SPLITS), _until_constraints(SPLITS),
        [at.to(gl.int64, bitcast=True), log_at.to(gl.int64, bitcast=True),
         along(mine.to(gl.int32), 2, twos) + 0 * place],
        dtype=_until_types(SPLITS), is_pure=False, pack=2,
    )  # fmt: skip
    sink = along(sink, 2, twos) + 0.0 * place
    peak = sink
    for i in gl.static_range(SPLITS):
        peak = gl.maximum(peak, found[SPLITS + i])
    total = gl.exp2(sink - peak)
    even = gl.full([W, 32, 2], 0.0, gl.float32, twos)
    odd = even
    for i in gl.static_range(SPLITS):
        weight = gl.exp2(found[SPLITS + i] - peak)
        total += weight
        a, b = gl.inline_asm_elementwise(
            SINGLES, "=f,=f,r", [found[i]], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        even += weight * a
        odd += weight * b
    total = 1.0 / total
    even, odd = gl.inline_asm_elementwise(
        _TRADE, "=&f,=&f,=&f,=&f,f,f,f,f,r,r", [even * total, odd * total, along(upper, 2, twos) + 0 * place],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip
    if HALF_ROPE > 0:
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    out = gl.inline_asm_elementwise(_PAIR, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    at = words_at(out_ptr) + (token * heads + along(head, 2, twos)) * WORDS + word
    gl.store(at, out, mask=along(mine, 2, twos))
