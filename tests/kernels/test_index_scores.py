"""Index scores over packed pages against a loop over tokens, entries and heads."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import index_scores_ref
from cedar.kernels.contract import ContractError
from cedar.kernels.fp4 import pack_fp4_e8m0, unpack_fp4_e8m0
from cedar.kernels.index_scores import index_scores, index_scores_gathered
from cedar.kernels.paging import PageRangeError
from cedar.kernels.select import top_k

from .packed_memory import PackedMemory, packed_memory


def queries(
    tokens: int, heads: int, width: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, width, generator=g).bfloat16()
    weights = torch.randn(tokens, heads, generator=g)
    weights[:, 0] = 0.0
    return *pack_fp4_e8m0(q), weights


def where(m: PackedMemory) -> tuple[object, ...]:
    return m.pages, m.planes.index_payload, m.planes.index_scales, m.table


def slow_scores(q: tuple[torch.Tensor, ...], keys: torch.Tensor, token: int) -> torch.Tensor:
    total = torch.zeros(keys.shape[0], dtype=torch.float64)
    vectors = unpack_fp4_e8m0(q[0], q[1]).double()[token]
    for head, vector in enumerate(vectors):
        total += (keys * vector).sum(-1).clamp_min(0) * float(q[2][token, head])
    return total


LAYOUTS = {
    "one sequence, a chunk": ([37], [0] * 9),
    "a decode step": ([5, 40, 0, 17], [3, 1, 0, 2]),
    "two tokens of each": ([33, 12], [0, 0, 1, 1]),
    "ragged": ([33, 12, 7], [0, 0, 2, 1, 1, 1, 0]),
    "nothing visible": ([0], [0, 0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (5, 64), (32, 128)])
def test_scores_equal_a_plain_loop(layout: str, heads: int, width: int) -> None:
    lengths, seqs = LAYOUTS[layout]
    m = packed_memory(lengths, 64, width, 8, seed=heads)
    q, seq = queries(len(seqs), heads, width, 1), torch.tensor(seqs, dtype=torch.int32)
    g = torch.Generator().manual_seed(len(seqs))
    visible = torch.tensor(
        [int(torch.randint(0, lengths[s] + 1, (), generator=g)) for s in seqs], dtype=torch.int32
    )
    scores = index_scores(*q, *where(m), seq, visible)
    assert scores.shape == (len(seqs), int(visible.max()))
    for n, (s, v) in enumerate(zip(seqs, visible.tolist(), strict=True)):
        torch.testing.assert_close(scores[n, :v], slow_scores(q, m.index[s][:v], n), rtol=1e-13, atol=1e-13)
        assert (scores[n, v:] == -torch.inf).all()
    wide = index_scores(*q, *where(m), seq, visible, 50)
    assert torch.equal(wide[:, : scores.shape[1]], scores)
    assert (wide[:, scores.shape[1] :] == -torch.inf).all()


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_equal_keys_score_equally_wherever_they_stand(heads: int) -> None:
    m = packed_memory([61], 64, 32, 8, seed=3)
    q = queries(3, heads, 32, 2)
    scores = index_scores(*q, *where(m), torch.zeros(3, dtype=torch.int32), torch.full((3,), 61))
    assert (scores[:, 30::3] == scores[:, :1]).all()
    chosen = top_k(scores, 20)
    for row, picked in zip(scores.tolist(), chosen.tolist(), strict=True):
        assert picked == sorted(sorted(range(61), key=lambda p: (-row[p], p))[:20])


def test_gathered_scores_equal_full_ones_and_read_nothing_else() -> None:
    lengths, seqs = [33, 12], [0, 1, 1, 0, 0]
    m = packed_memory(lengths, 64, 32, 8, seed=5)
    q, seq = queries(5, 4, 32, 6), torch.tensor(seqs, dtype=torch.int32)
    full = index_scores(*q, *where(m), seq, torch.tensor([lengths[s] for s in seqs]))
    candidates = torch.tensor(
        [[0, 3, 9, -1], [11, -1, -1, -1], [2, 4, 6, 8], [30, 31, 32, -1], [-1] * 4], dtype=torch.int32
    )
    got = index_scores_gathered(*q, *where(m), seq, candidates)
    wanted = full.gather(1, candidates.clamp_min(0).long()).masked_fill(candidates < 0, -torch.inf)
    assert torch.equal(got, wanted)
    unread = m.table.clone()
    unread[0, 2] = 10_000  # entries 16..23 of sequence 0 are nobody's candidates
    assert torch.equal(index_scores_gathered(*q, m.pages, *where(m)[1:3], unread, seq, candidates), wanted)


def test_small_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    m = packed_memory([37, 20, 37], 64, 32, 8, seed=7)
    q, seq = queries(6, 4, 32, 8), torch.tensor([0, 0, 1, 1, 2, 2])
    visible = torch.tensor([30, 31, 19, 20, 5, 37])
    candidates = torch.arange(12, dtype=torch.int32).expand(6, 12).contiguous()
    once = index_scores(*q, *where(m), seq, visible), index_scores_gathered(*q, *where(m), seq, candidates)
    monkeypatch.setattr(index_scores_ref, "BLOCK_ELEMENTS", 700)
    again = index_scores(*q, *where(m), seq, visible), index_scores_gathered(*q, *where(m), seq, candidates)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


def test_misuse() -> None:
    m = packed_memory([16], 64, 32, 8, seed=9)
    q, seq = queries(1, 4, 32, 1), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(PageRangeError, match=r"page_table .* holds -1"):
        index_scores(*q, *where(m), seq, torch.tensor([17]))
    with pytest.raises(PageRangeError, match="visible reaches entry 24"):
        index_scores(*q, *where(m), seq, torch.tensor([25]))
    with pytest.raises(PageRangeError, match="candidates holds 24"):
        index_scores_gathered(*q, *where(m), seq, torch.tensor([[24]]))
    with pytest.raises(PageRangeError, match="seq holds 1"):
        index_scores(*q, *where(m), seq + 1, torch.tensor([3]))
    with pytest.raises(ContractError, match="width is 2, below the greatest visible, 3"):
        index_scores(*q, *where(m), seq, torch.tensor([3]), 2)
    with pytest.raises(ContractError, match="scale_plane has rows of 16 bytes, not 1"):
        index_scores(
            *q, m.pages, m.planes.index_payload, m.planes.index_payload, m.table, seq, torch.tensor([3])
        )
