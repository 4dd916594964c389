"""A token's result does not depend on the other tokens of the call: alone, in any split, in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cedar.kernels.engram_gate import engram_gate
from cedar.kernels.experts import grouped_experts
from cedar.kernels.fp4 import pack_fp4_e8m0
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.index_scores import index_scores, index_scores_gathered
from cedar.kernels.linear import linear_dense, linear_fp8
from cedar.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix
from cedar.kernels.norm import rms_norm
from cedar.kernels.rope import apply_rope, rope_frequencies
from cedar.kernels.router import route
from cedar.kernels.select import block_positions, candidate_blocks, top_k
from cedar.kernels.sparse_attention import sparse_attention

from .packed_memory import packed_memory

N = 53
Pick = Callable[[torch.Tensor], torch.Tensor]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operations() -> dict[str, Callable[[Pick], tuple[torch.Tensor, ...]]]:
    """Each as a function of which tokens to take, to its results [tokens, ...]."""
    m = packed_memory([60, 33, 8], 64, 32, 8, seed=1)
    seq = torch.tensor([n % 3 for n in range(N)], dtype=torch.int32)
    lengths = torch.tensor([60, 33, 8])[seq.long()]
    visible = (lengths * torch.rand(N, generator=torch.Generator().manual_seed(2))).int()
    x, streams = random(N, 128, seed=3).bfloat16(), random(N, 4, 128, seed=4).bfloat16()
    heads, y = random(N, 4, 64, seed=5).bfloat16(), random(N, 128, seed=6).bfloat16()
    positions = torch.randint(0, 100_000, (N,), generator=torch.Generator().manual_seed(7))
    freqs = rope_frequencies(16, 160_000)
    w8, w8_scale = random(48, 128, seed=8).to(torch.float8_e4m3fn), torch.full((2, 4), 120, dtype=torch.uint8)
    w16 = random(40, 128, seed=9).bfloat16()
    fn, scale, base = random(24, 512, seed=10) / 20, torch.tensor([0.5, 1.0, 2.0]), random(24, seed=11)
    pre, post, comb = (
        torch.rand(N, *s, generator=torch.Generator().manual_seed(12)) for s in ((4,), (4,), (4, 4))
    )
    q = pack_fp4_e8m0(random(N, 32, 32, seed=13).bfloat16())
    weights = random(N, 32, seed=14)
    index = (m.pages, m.planes.index_payload, m.planes.index_scales, m.table)
    scores = index_scores(*q, weights, *index, seq, visible, 60)
    candidates = block_positions(candidate_blocks(scores, visible, 4, 5), 4, visible)
    entries = top_k(scores, 12)
    window = pack_window_rows(random(70, 64, seed=15).bfloat16())
    rows = torch.randint(-1, 70, (N, 16), generator=torch.Generator().manual_seed(16), dtype=torch.int32)
    main = (m.pages, m.planes.main_payload, m.planes.main_scales, m.table)
    sink = random(4, seed=17)
    bias = random(N, 8, seed=18)
    gate_weight = random(8, 128, seed=19).bfloat16() / 8
    ids, route_weights = route(x, gate_weight, bias, 3, 1.5)
    experts = [
        t.view(8, rows_, -1)
        for s, (rows_, columns) in enumerate(((64, 128), (64, 128), (128, 64)))
        for t in pack_fp4_e8m0(random(8 * rows_, columns, seed=20 + s).bfloat16())
    ]
    qw, kw = random(2, 4, 128, seed=24).bfloat16()
    image = torch.arange(N) % 5 == 0
    return {
        "rms_norm": lambda p: (rms_norm(p(x), w16[0], 1e-20),),
        "linear_fp8": lambda p: (linear_fp8(p(x), w8, w8_scale),),
        "linear_dense": lambda p: (linear_dense(p(x), w16),),
        "apply_rope": lambda p: (apply_rope(p(heads), p(positions), freqs),),
        "mhc_mix": lambda p: mhc_mix(p(streams), fn, scale, base, 1e-20, 1e-6, 20),
        "mhc_collapse": lambda p: (mhc_collapse(p(streams), p(pre)),),
        "mhc_expand": lambda p: (mhc_expand(p(streams), p(y), p(post), p(comb)),),
        "index_scores": lambda p: (
            index_scores(p(q[0]), p(q[1]), p(weights), *index, p(seq), p(visible), 60),
        ),
        "index_scores_gathered": lambda p: (
            index_scores_gathered(p(q[0]), p(q[1]), p(weights), *index, p(seq), p(candidates)),
        ),
        "top_k": lambda p: (top_k(p(scores), 12),),
        "candidate_blocks": lambda p: (candidate_blocks(p(scores), p(visible), 4, 5),),
        "sparse_attention": lambda p: (
            sparse_attention(p(heads), *main, p(seq), p(entries), window, p(rows), sink),
        ),
        "grouped_output": lambda p: (grouped_output(p(x).view(-1, 2, 64), w16.view(2, 40, 64)),),
        "route": lambda p: route(p(x), gate_weight, p(bias), 3, 1.5),
        "grouped_experts": lambda p: (grouped_experts(p(x), p(ids), p(route_weights), *experts, 10.0),),
        "engram_gate": lambda p: (
            engram_gate(p(streams), p(streams.flip(0)), p(x), qw, kw, p(image), 1e-20),
        ),
    }


OPERATIONS = operations()


@pytest.mark.parametrize("name", OPERATIONS)
def test_alone_split_and_shuffled(name: str) -> None:
    run = OPERATIONS[name]
    whole = run(lambda t: t)
    for length in (1, 2, 3, 7, 16, 31):
        for start in range(0, N, length if length > 2 else 5):
            part = run(lambda t, s=start, n=length: t[s : s + n].contiguous())
            for got, wanted in zip(part, whole, strict=True):
                assert torch.equal(got, wanted[start : start + length]), (length, start)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(run(lambda t: t[order]), whole, strict=True):
        assert torch.equal(got, wanted[order])
