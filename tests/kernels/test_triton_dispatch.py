"""The public functions hand GPU tensors to the kernels, with the arguments those expect.

Here the tensors only claim to be on a GPU and the interpreter runs the kernels, so what is tested is the
hand-over.
"""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import (
    compress,
    engram_gate,
    experts,
    fp4,
    fp8,
    grouped_output,
    index_scores,
    linear,
    mhc,
    norm,
    rope,
    router,
    select,
    sparse_attention,
)

from .packed_memory import packed_memory

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def half(*shape: int) -> torch.Tensor:
    return normal(*shape).bfloat16()


def attention_results() -> dict[str, torch.Tensor]:
    m = packed_memory([37, 5, 64], 64, 32, 16, seed=3)
    seq = torch.tensor([0, 2, 1], dtype=torch.int32)
    window = torch.randint(0, 0x70, (20, 66), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    window[:, 64:] = 124
    rows = torch.arange(27, dtype=torch.int32).view(3, 9) % 20
    entries = torch.tensor([[0, 5, 36, -1], [1, 2, 60, 63], [0, 4, -1, -1]], dtype=torch.int32)
    turned = rope.rope_table(torch.tensor([5, 9, 100]), rope.rope_frequencies(16, 10_000.0))
    where = (m.pages, *m.planes[:2], m.table, seq)
    q, sink = half(3, 4, 64), normal(4)
    nowhere = (None, None, None, None, None, None)
    payload, scales = fp4.pack_fp4_e8m0(half(3, 4, 32))
    asked = (payload, scales, normal(3, 4), m.pages, *m.planes[2:], m.table, seq)
    visible = torch.tensor([30, 64, 5], dtype=torch.int32)
    pool = torch.tensor([[0, 3, -1, 9], [5, 60, 2, -1], [0, 1, 2, 3]], dtype=torch.int32)
    pages = torch.zeros_like(m.pages)
    compress.compress_into_pages(
        normal(3, 2, 64), normal(3, 2, 64), half(64), half(32, 64), half(32), torch.tensor([0, 2, 4]),
        rope.rope_frequencies(16, 10_000.0), 1e-20, pages, m.planes, m.table, seq, torch.arange(1, 4),
    )  # fmt: skip
    return {
        "attention": sparse_attention.sparse_attention(q, *where, entries, window, rows, sink),
        "with rope": sparse_attention.sparse_attention(q, *where, entries, window, rows, sink, turned),
        "window only": sparse_attention.sparse_attention(q, *nowhere, window, rows, sink),
        "scores": index_scores.index_scores(*asked, visible),
        "gathered": index_scores.index_scores_gathered(*asked, pool),
        "pages": pages,
    }


def selection_results() -> dict[str, torch.Tensor]:
    scores, visible = normal(3, 64), torch.tensor([30, 64, 5], dtype=torch.int32)
    blocks = select.candidate_blocks(scores, visible, 8, 3)
    pool = select.block_positions(blocks, 8, visible)
    columns = torch.tensor([[0, 1, -1]] * 3, dtype=torch.int32)
    taken = select.take_candidates(pool, columns)
    return {"top k": select.top_k(scores, 7), "blocks": blocks, "pool": pool, "taken": taken}


def layer_results() -> dict[str, torch.Tensor]:
    x, streams = half(4, 64), half(4, 4, 64)
    packed = [
        part for shape in ((5, 32, 64), (5, 32, 64), (5, 64, 32)) for part in fp4.pack_fp4_e8m0(half(*shape))
    ]
    chosen = torch.tensor([[0, 2], [1, 4], [0, 3], [2, 4]], dtype=torch.int32)
    pre, post, comb = mhc.mhc_mix(streams, normal(24, 256) * 0.1, torch.ones(3), normal(24), 1e-20, 1e-6, 20)
    between = mhc.mhc_boundary(streams, x, post, comb, pre, half(64), 1e-20)
    mixer = (normal(24, 256) * 0.1, torch.ones(3), normal(24), 1e-20, 1e-6, 20)
    mixed = mhc.mhc_boundary(streams, x, post, comb, pre, half(64), 1e-20, mix=mixer)
    ids, weights = router.route(x, half(16, 64), normal(16) * 0.1, 3, 1.5)
    weight, scale = normal(40, 64).to(torch.float8_e4m3fn), torch.full((2, 2), 120, dtype=torch.uint8)
    image = torch.tensor([0, 1, 0, 0], dtype=torch.bool)
    return {
        "linear": linear.linear_fp8(x[:, None], weight, scale),
        "dense": linear.linear_dense(x, half(8, 64)),
        "norm": norm.rms_norm(x, half(64), 1e-20),
        "experts": experts.grouped_experts(x, chosen, normal(4, 2).abs(), *packed, 10.0),
        "experts and shared": experts.grouped_experts(
            x, chosen, normal(4, 2).abs(), *packed, 10.0, shared=half(4, 64)
        ),
        "swiglu": experts.swiglu(x, x * 2, 1.0),
        "swiglu of halves": experts.swiglu(*half(4, 64).chunk(2, dim=1), 1.0),
        "pre": pre,
        "post": post,
        "comb": comb,
        "collapse": mhc.mhc_collapse(streams, pre),
        "expand": mhc.mhc_expand(streams, x, post, comb),
        "streams": between[0],
        "row": between[1],
        "mixed streams": mixed[0],
        "mixed row": mixed[1],
        "mixed comb": mixed[2][2],
        "ids": ids,
        "weights": weights,
        "gate": engram_gate.engram_gate(
            streams, half(4, 4, 64) * 2, x, half(4, 64), half(4, 64), image, 1e-20
        ),
        "grouped": grouped_output.grouped_output(half(3, 2, 64), half(2, 8, 64)),
        "window rows": fp8.pack_window_rows(x),
        "packed": fp4.pack_fp4_e4m3(x)[0],
    }


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes every tensor claim to be on a GPU, of no kind that has kernels of its own."""
    from cedar.kernels import (
        compress_triton,
        experts_triton,
        index_scores_triton,
        linear_triton,
        mhc_triton,
        router_triton,
        sparse_attention_triton,
    )

    product = torch.mm

    def mixed(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return product(a, b) if out_dtype is None else product(a.to(out_dtype), b.to(out_dtype))

    for module, name in (
        (experts_triton, "hopper"),
        (linear_triton, "hopper"),
        (mhc_triton, "hopper"),
        (compress_triton, "hopper"),
        (router_triton, "hopper"),
        (index_scores_triton, "_hopper"),
        (sparse_attention_triton, "hopper"),
    ):
        monkeypatch.setattr(module, name, lambda index: False)
    monkeypatch.setattr(router_triton, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch, "mm", mixed)
    return monkeypatch


@pytest.mark.parametrize("results", [attention_results, selection_results, layer_results])
def test_kernels_get_what_they_expect(pretended: pytest.MonkeyPatch, results) -> None:  # type: ignore[no-untyped-def]
    wanted = results()
    with pretended.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        got = results()
    for name, want in wanted.items():
        assert got[name].shape == want.shape, name
        finite = torch.isfinite(want.double())
        assert torch.equal(finite, torch.isfinite(got[name].double())), name
        difference = (got[name].double() - want.double())[finite].norm()
        assert difference <= 1e-5 * want.double()[finite].norm(), name
