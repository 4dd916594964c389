"""Sparse attention and index scores in Triton's interpreter, against the references, on awkward sizes."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import index_scores_ref, rope_ref, sparse_attention_ref
from cedar.kernels.fp4 import pack_fp4_e8m0, unpack_fp4_e8m0
from cedar.kernels.fp8 import pack_window_rows

from .packed_memory import PackedMemory, packed_memory

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")

D, DI, ROWS = 64, 32, 16


def memory() -> PackedMemory:
    return packed_memory([37, 5, 64], D, DI, ROWS, seed=3)


def queries(count: int, heads: int, seed: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(count, heads, D, generator=g) * 2).bfloat16()
    window = pack_window_rows(torch.randn(29, D, generator=g).bfloat16())
    rows = torch.randint(-1, 29, (count, 11), generator=g, dtype=torch.int32)
    angles = torch.randint(0, 100_000, (count, 1), generator=g) * torch.rand(8, generator=g)
    return q, window, rows, torch.randn(heads, generator=g), angles.cos(), angles.sin()


def entries_of(m: PackedMemory, seq: torch.Tensor, k: int) -> torch.Tensor:
    out = torch.full((len(seq), k), -1, dtype=torch.int32)
    for n, s in enumerate(seq.tolist()):
        chosen = torch.randperm(len(m.main[s]))[:k].sort().values
        out[n, : len(chosen)] = chosen.to(torch.int32)
    return out


@pytest.mark.parametrize(("heads", "k", "roped"), [(3, 21, True), (20, 40, False), (4, 0, True)])
def test_attention(heads: int, k: int, roped: bool) -> None:
    from cedar.kernels import sparse_attention_triton

    torch.manual_seed(heads)
    m = memory()
    seq = torch.tensor([0, 2, 1], dtype=torch.int32)
    q, window, rows, sink, cos, sin = queries(3, heads, seed=heads)
    entries = entries_of(m, seq, k) if k else None
    source = (m.pages, m.planes[:2], m.table, seq, entries) if k else (None, (), None, None, None)
    turned = rope_ref.turn(q, cos, sin) if roped else q
    want = sparse_attention_ref.sparse_attention(turned, *source, window, rows, sink)
    if roped:
        want = rope_ref.turn(want, cos, -sin)
    got = sparse_attention_triton.sparse_attention(
        q, *source, window, rows, sink, (cos, sin) if roped else None
    )
    assert (got.double() - want.double()).norm() <= 2e-3 * want.double().norm()


def test_attention_stays_inside_its_pages() -> None:
    from cedar.kernels import sparse_attention_triton

    m = memory()
    q, window, rows, sink, _, _ = queries(2, 4, seed=1)
    table = m.table.clone()
    table[:, 0], table[:, 1] = 10_000, -7
    entries = torch.tensor([[0, 17, 9_999], [3, 20, -1]], dtype=torch.int32)
    seq = torch.tensor([55, -3], dtype=torch.int32)
    rows[0, 0] = 1_000
    sparse_attention_triton.sparse_attention(
        q, m.pages, m.planes[:2], table, seq, entries, window, rows, sink
    )


def test_strided_angles_and_nothing_to_point_at() -> None:
    """Halves of one table are angles as good as any; without pages every entry is -1 and is not followed."""
    from cedar.kernels import sparse_attention_triton

    m = memory()
    q, window, rows, sink, cos, sin = queries(2, 4, seed=2)
    table = torch.cat((cos[:2], sin[:2]), dim=1)
    halves = table[:, : cos.shape[1]], table[:, cos.shape[1] :]
    args = (q, None, (), None, None, None, window, rows, sink)
    want = sparse_attention_triton.sparse_attention(*args, (cos[:2].contiguous(), sin[:2].contiguous()))
    assert torch.equal(sparse_attention_triton.sparse_attention(*args, halves), want)
    seq, entries = torch.zeros(2, dtype=torch.int32), torch.full((2, 5), -1, dtype=torch.int32)
    for pages, numbers in ((m.pages[:0], m.table), (m.pages, m.table[:, :0])):
        got = sparse_attention_triton.sparse_attention(
            q, pages, m.planes[:2], numbers, seq, entries, window, rows, sink, halves
        )
        assert torch.equal(got, want)


def test_kernels_whose_programs_wait_stay_off_parts_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from cedar.kernels import linear_triton

    for count, wanted in ((132, True), (78, True), (16, False)):
        monkeypatch.setattr(linear_triton, "multiprocessors", lambda _, count=count: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert linear_triton.hopper.__wrapped__(0) is wanted


def test_scores_and_block_maxima() -> None:
    from cedar.kernels import index_scores_triton

    m = memory()
    seq = torch.tensor([0, 2, 2, 1], dtype=torch.int32)
    visible = torch.tensor([37, 64, 9, 0], dtype=torch.int32)
    payload, scales = pack_fp4_e8m0(torch.randn(4, 5, DI).bfloat16())
    weights = torch.randn(4, 5)
    q = unpack_fp4_e8m0(payload, scales, torch.float64)
    want = index_scores_ref.scores(q, weights.double(), m.pages, m.planes[2:], m.table, seq, visible, 61 + 3)
    got, best = index_scores_triton.scores(
        payload, scales, weights, m.pages, m.planes[2:], m.table, seq, visible, 64, blocks=True
    )
    assert best is not None
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    assert (got - want).nan_to_num(0).abs().max() < 1e-5 * want[torch.isfinite(want)].abs().max()
    assert torch.equal(best, got.view(4, 8, 8).amax(2))


def test_gathered_scores() -> None:
    from cedar.kernels import index_scores_triton

    m = memory()
    seq = torch.tensor([2, 0], dtype=torch.int32)
    candidates = torch.randint(-1, 37, (2, 41), dtype=torch.int32)
    payload, scales = pack_fp4_e8m0(torch.randn(2, 4, DI).bfloat16())
    weights = torch.randn(2, 4)
    q = unpack_fp4_e8m0(payload, scales, torch.float64)
    want = index_scores_ref.scores_gathered(
        q, weights.double(), m.pages, m.planes[2:], m.table, seq, candidates
    )
    got, _ = index_scores_triton.scores(
        payload, scales, weights, m.pages, m.planes[2:], m.table, seq, seq, 41, entries=candidates
    )
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    assert (got - want).nan_to_num(0).abs().max() < 1e-5 * want[torch.isfinite(want)].abs().max()


def test_how_a_query_is_shared_out() -> None:
    """All programs of few queries run at once, as far as one can have it, and parts fit their memory."""
    from cedar.kernels.sparse_attention_triton import choose_splits, few_parts

    assert few_parts(1, 64, 512, 512, 128, 32) == (4, 4, 16)
    assert few_parts(2, 64, 512, 512, 128, 32) == (8, 2, 8)
    assert [few_parts(n, 64, 512, 512, 128, 32) for n in (3, 4, 6, 32)] == [(16, 1, 4)] * 4
    assert few_parts(33, 64, 512, 512, 128, 32) is None  # as 64: 1,280 parts
    for tokens in (1, 2, 3, 5, 7, 9, 30):  # a step is padded to the next rung: its sums have one order
        for shape in ((64, 512, 512, 128, 32), (16, 512, 512, 128, 32), (8, 128, 512, 128, 0)):
            rung = 1 << (tokens - 1).bit_length()
            assert few_parts(tokens, *shape) == few_parts(rung, *shape)
    assert few_parts(3, 8, 128, 0, 37, 0) == (4, 2, 0)
    assert few_parts(1, 64, 256, 512, 128, 32) is None  # heads of other widths
    assert few_parts(1, 64, 128, 512, 128, 80) is None  # more channels turned than there are
    assert few_parts(1, 64, 512, 64 * 32, 128, 32) == (16, 1, 16)
    assert few_parts(1, 64, 512, 20 * 128, 128, 32) is None  # 21 parts
    assert few_parts(1, 64, 512, 0, 0, 32) is None
    assert few_parts(4096, 8, 128, 512, 128, 32) is None  # 168 MB of parts
    for tokens in (1, 3, 8, 64, 66, 67, 4096):
        for entries in (0, 1, 512, 1 << 16):
            splits = choose_splits(tokens, entries)
            assert 1 <= splits <= 32
            assert splits == 1 or splits * tokens <= 132
