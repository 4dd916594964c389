"""Sparse attention over packed bytes against a dense float64 computation of each query on its own."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import sparse_attention_ref
from cedar.kernels.fp8 import pack_window_rows, unpack_window_rows
from cedar.kernels.paging import PageRangeError
from cedar.kernels.sparse_attention import sparse_attention

from .packed_memory import PackedMemory, packed_memory


def dense(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """bf16 [H, D] of one query q [H, D] over keys float64 [K, D]."""
    logits = q.double() @ keys.T / keys.shape[1] ** 0.5
    top = torch.cat((logits, sink.double().unsqueeze(1)), 1).amax(1, keepdim=True)
    p = torch.exp(logits - top)
    return ((p @ keys) / (p.sum(1, keepdim=True) + torch.exp(sink.double().unsqueeze(1) - top))).bfloat16()


def case(
    tokens: int, heads: int, width: int, globals_each: int, window: int, lengths: list[int], seed: int
) -> tuple[PackedMemory, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    m = packed_memory(lengths, width, 32, 8, seed)
    seq = torch.randint(0, len(lengths), (tokens,), generator=g, dtype=torch.int32)
    entries = torch.full((tokens, globals_each), -1, dtype=torch.int32)
    rows = torch.full((tokens, window), -1, dtype=torch.int32)
    for n in range(tokens):
        have = lengths[int(seq[n])]
        some = int(torch.randint(0, min(have, globals_each) + 1, (), generator=g))
        entries[n, :some] = torch.randperm(have, generator=g)[:some].sort().values.int()
        filled = int(torch.randint(0, window + 1, (), generator=g))
        rows[n, window - filled :] = torch.randperm(window + 9, generator=g)[:filled].int()
    entries[0], rows[min(1, tokens - 1)] = -1, -1
    return m, {
        "q": torch.randn(tokens, heads, width, generator=g).bfloat16() * 2,
        "seq": seq,
        "entries": entries,
        "window": pack_window_rows(torch.randn(window + 9, width, generator=g).bfloat16()),
        "window_rows": rows,
        "sink": torch.randn(heads, generator=g),
    }


def call(m: PackedMemory, a: dict[str, torch.Tensor]) -> torch.Tensor:
    where = (m.pages, m.planes.main_payload, m.planes.main_scales, m.table, a["seq"], a["entries"])
    return sparse_attention(a["q"], *where, a["window"], a["window_rows"], a["sink"])


def wanted(m: PackedMemory, a: dict[str, torch.Tensor]) -> torch.Tensor:
    width = a["q"].shape[2]
    window = unpack_window_rows(a["window"], width).double()
    out = []
    for n in range(a["q"].shape[0]):
        entries, rows = a["entries"][n], a["window_rows"][n]
        keys = torch.cat(
            (m.main[int(a["seq"][n])][entries[entries >= 0].long()], window[rows[rows >= 0].long()])
        )
        out.append(dense(a["q"][n], keys, a["sink"]))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "globals_each", "window", "lengths"),
    [
        (1, 1, 32, 1, 1, [3]),
        (7, 4, 64, 12, 16, [40, 9, 1]),
        (33, 3, 96, 5, 7, [0, 25]),
        (2, 64, 512, 50, 20, [80]),
        (5, 2, 64, 3, 0, [10]),
        (40, 4, 64, 12, 16, [100, 100]),
    ],
)
def test_equals_a_dense_computation(
    tokens: int, heads: int, width: int, globals_each: int, window: int, lengths: list[int]
) -> None:
    m, a = case(tokens, heads, width, globals_each, window, lengths, seed=tokens)
    assert torch.equal(call(m, a), wanted(m, a))


def test_no_global_entries_in_any_spelling() -> None:
    m, a = case(6, 4, 64, 5, 9, [20], seed=2)
    a["entries"] = torch.full_like(a["entries"], -1)
    reference = call(m, a)
    assert torch.equal(reference, wanted(m, a))
    a["entries"] = a["entries"][:, :0]
    assert torch.equal(call(m, a), reference)
    assert torch.equal(
        sparse_attention(a["q"], *(None,) * 6, a["window"], a["window_rows"], a["sink"]), reference
    )


def test_no_key_at_all_gives_zeros() -> None:
    m, a = case(3, 4, 64, 5, 9, [20], seed=3)
    a["entries"], a["window_rows"] = torch.full_like(a["entries"], -1), torch.full_like(a["window_rows"], -1)
    assert call(m, a).abs().sum() == 0
    a["window"] = a["window"][:0]
    assert call(m, a).abs().sum() == 0
    assert (
        sparse_attention(a["q"], *(None,) * 6, a["window"], a["window_rows"][:, :0], a["sink"]).abs().sum()
        == 0
    )


def test_extreme_logits_and_sinks() -> None:
    m, a = case(9, 4, 64, 5, 9, [20], seed=4)
    a["q"] = a["q"] * 500
    a["sink"] = torch.tensor([-1e4, 1e4, 0.0, 50.0])
    got = call(m, a)
    assert got.isfinite().all()
    assert torch.equal(got, wanted(m, a))


def test_pads_may_stand_anywhere_and_bytes_behind_them_do_not_matter() -> None:
    m, a = case(5, 4, 64, 6, 9, [30], seed=5)
    reference = call(m, a)
    spread = torch.full((5, 13), -1, dtype=torch.int32)
    spread[:, 1::2] = a["entries"]
    a["entries"] = spread
    a["window"][0] = 0xFF  # the row that pads fall on decodes to NaN
    a["window_rows"] = a["window_rows"].masked_fill(a["window_rows"] == 0, -1)
    again = call(m, a)
    assert torch.equal(again, wanted(m, a))
    unchanged = (a["window_rows"] == -1).eq(case(5, 4, 64, 6, 9, [30], seed=5)[1]["window_rows"] == -1).all(1)
    assert torch.equal(again[unchanged], reference[unchanged])


def test_small_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    m, a = case(21, 4, 64, 12, 16, [40, 9], seed=6)
    once = call(m, a)
    monkeypatch.setattr(sparse_attention_ref, "BLOCK_ELEMENTS", 4000)
    assert torch.equal(call(m, a), once)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("entries", 500, "entries holds 500"),
        ("entries", 30, "page_table .* holds -1"),
        ("seq", 1, "seq holds 1"),
        ("window_rows", 18, "window_rows holds 18"),
    ],
)
def test_what_lies_outside_is_refused(name: str, value: int, message: str) -> None:
    m, a = case(3, 4, 64, 5, 9, [24], seed=7)
    a["entries"][:] = 1
    a[name][-1] = value
    with pytest.raises(PageRangeError, match=message):
        call(m, a)
