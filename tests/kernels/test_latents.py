"""The norms of attention's latents: the reference is the composition, the kernel equals it bit for bit."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.contract import ContractError
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.latents import Staging, norm_latents
from cedar.kernels.norm import rms_norm
from cedar.kernels.paging import PageRangeError
from cedar.kernels.prepared import CODES
from cedar.kernels.rope import apply_rope, rope_frequencies, rope_table

EPS = 1e-20
FREQS = rope_frequencies(16, 10_000.0)
POSITIONS = torch.arange(5) * 977


def inputs(queries: int = 96, keys: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    latents = torch.randn(5, queries + keys, generator=generator).bfloat16()
    return latents, torch.rand(queries, generator=generator).bfloat16(), torch.rand(keys).bfloat16()


def test_the_reference_is_the_composition() -> None:
    latents, query_weight, key_weight = inputs()
    window, places = torch.full((7, 66), 9, dtype=torch.uint8), torch.tensor([6, -1, 0, 2, 1])
    query, _ = norm_latents(
        latents, query_weight, key_weight, rope_table(POSITIONS, FREQS), EPS, window, places
    )
    assert torch.equal(query, rms_norm(latents[:, :96], query_weight, EPS))
    keys = apply_rope(rms_norm(latents[:, 96:], key_weight, EPS), POSITIONS, FREQS)
    rows = pack_window_rows(keys)
    assert torch.equal(window[[6, 0, 2, 1]], rows[[0, 2, 3, 4]])
    assert bool((window[3:6] == 9).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("orders", [(), (0,), (1, 6), (CODES, 0), (16, CODES)])
def test_the_kernel_is_the_reference_bit_for_bit(orders: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from cedar.kernels import latents_ref, latents_triton, linear_triton, prepared_ref

    latents, query_weight, key_weight = inputs(128 if orders else 96)
    rope = rope_table(POSITIONS, FREQS)
    places = torch.tensor([6, -1, 0, 2, 7], dtype=torch.int32)  # one that is none, one past the end
    got, want = (torch.zeros(7, 66, dtype=torch.uint8) for _ in range(2))
    query, copies = latents_triton.norm_latents(
        latents, query_weight, key_weight, rope, EPS, got, places, orders
    )
    inner = torch.where(places < 7, places, -1)
    truth = latents_ref.norm_latents(latents, query_weight, key_weight, rope, EPS, want, inner)
    assert torch.equal(query, truth)
    assert torch.equal(got, want)
    for order, copy in zip(orders, copies, strict=True):
        assert copy.order == order
        if order == CODES:
            wanted = prepared_ref.prepared(truth, order)
            assert wanted.scale is not None
            assert copy.scale is not None
            assert torch.equal(copy.scale, wanted.scale)
            assert torch.equal(copy.values.view(torch.uint8), wanted.values.view(torch.uint8))
        else:
            assert torch.equal(copy.values, linear_triton.permuted(truth, order))


@pytest.mark.parametrize("kernel", [False, True])
def test_a_chunk_is_staged_beside_what_the_rings_held(kernel: bool) -> None:
    """Two sequences with rings of four rows, one chunk row of the first and four of the second."""
    if kernel and torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    if kernel:
        pytest.importorskip("triton")
    from cedar.kernels import latents_ref, latents_triton

    latents, query_weight, key_weight = inputs()
    rope = rope_table(POSITIONS, FREQS)
    rows = torch.zeros(5, 66, dtype=torch.uint8)
    latents_ref.norm_latents(latents, query_weight, key_weight, rope, EPS, rows, torch.arange(5))
    rings = torch.randint(0, 255, (12, 66), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = rings.clone()
    sources = torch.tensor(
        [4, -1, 6, 7, -1, -1, 2, -1]
    )  # rings 1 and 0; row 5, and rows 0, 1 and 3, are replaced
    targets = torch.tensor([5, -1, 3, 0, 1])
    staging = Staging(rings, sources, targets, torch.tensor([1, 0, 7, 4, 5]))
    window = torch.full((13, 66), 9, dtype=torch.uint8)
    run = latents_triton.norm_latents if kernel else norm_latents
    run(latents, query_weight, key_weight, rope, EPS, window, torch.arange(8, 13), (), staging)
    assert torch.equal(window[:8], before[[4, 5, 6, 7, 0, 1, 2, 3]])
    assert torch.equal(window[8:], rows)
    after = before.clone()
    after[[5, 3, 0, 1]] = rows[[0, 2, 3, 4]]
    assert torch.equal(rings, after)


def test_misuse_is_refused() -> None:
    latents, query_weight, key_weight = inputs()
    rope, window = rope_table(POSITIONS, FREQS), torch.zeros(7, 66, dtype=torch.uint8)
    places = torch.arange(5)
    with pytest.raises(ContractError, match="latents must be"):
        norm_latents(latents.float(), query_weight, key_weight, rope, EPS, window, places)
    every_other = torch.zeros(7, 132, dtype=torch.uint8)[:, ::2]
    with pytest.raises(ContractError, match="window must be contiguous"):
        norm_latents(latents, query_weight, key_weight, rope, EPS, every_other, places)
    with pytest.raises(PageRangeError, match="places holds 7"):
        norm_latents(latents, query_weight, key_weight, rope, EPS, window, places + 3)
