"""Packed index queries: the reference is the composition, the kernel the reference bit for bit."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.contract import ContractError
from cedar.kernels.fp4 import pack_fp4_e8m0
from cedar.kernels.index_queries import pack_index_queries
from cedar.kernels.rope import apply_rope, rope_frequencies, rope_table

FREQS, POSITIONS = rope_frequencies(16, 10_000.0), torch.arange(5) * 977
Q = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
WEIGHTS = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_the_reference_is_the_composition() -> None:
    got = pack_index_queries(Q, WEIGHTS, rope_table(POSITIONS, FREQS), 0.3)
    payload, scales = pack_fp4_e8m0(apply_rope(Q, POSITIONS, FREQS))
    assert torch.equal(got.payload, payload)
    assert torch.equal(got.scales, scales)
    assert torch.equal(got.weights, WEIGHTS.double() * 0.3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
def test_the_kernel_is_the_reference() -> None:
    pytest.importorskip("triton")
    from cedar.kernels import index_queries_triton

    rope = rope_table(POSITIONS, FREQS)
    want = pack_index_queries(Q, WEIGHTS, rope, 0.3)
    payload, scales, weights = index_queries_triton.pack(Q, WEIGHTS, rope, 0.3)
    assert torch.equal(payload, want.payload)
    assert torch.equal(scales, want.scales)
    torch.testing.assert_close(weights.double(), want.weights, rtol=1e-6, atol=0)


def test_misuse_is_refused() -> None:
    rope = rope_table(POSITIONS, FREQS)
    with pytest.raises(ContractError, match="q must be"):
        pack_index_queries(Q.float(), WEIGHTS, rope, 1.0)
    with pytest.raises(ContractError, match="weights must be"):
        pack_index_queries(Q, WEIGHTS[:4], rope, 1.0)
