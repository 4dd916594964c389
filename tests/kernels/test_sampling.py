"""The choice of the next token: the hash's published vectors, exact weights, and the kernel against the
truth.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cedar.kernels.contract import ContractError
from cedar.kernels.sampling import ONE, Draws, draw_tokens
from cedar.kernels.sampling_ref import LOG2_E, philox, weigh

Rules = tuple[torch.Tensor, ...]


def rules(count: int, seed: int = 0) -> Rules:
    """seeds, positions, temperatures, top_k, top_p, min_p of rows of every kind."""
    g = torch.Generator().manual_seed(seed)

    def one_of(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (count,), generator=g)]

    return (
        torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=g),
        torch.randint(0, 1 << 40, (count,), generator=g),
        one_of([0.0, 0.3, 1.0, 2.5, 1e-6], torch.float32).double(),
        one_of([0, 0, 1, 3, 40, 100_000], torch.int64),
        one_of([1.0, 1.0, 0.999, 0.9, 0.5, 0.01], torch.float32).double(),
        one_of([0.0, 0.0, 0.05, 1.0], torch.float32).double(),
    )


def test_the_hash_gives_its_published_vectors() -> None:
    full = 0xFFFFFFFF
    assert philox((0,) * 4, (0,) * 2) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((full,) * 4, (full,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(counter, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_weights_are_the_exponential() -> None:
    below = -torch.cat((torch.zeros(1), torch.rand(2000) * 30, torch.tensor([31.0, 90.0, 3e38])))
    got = weigh(below, torch.tensor(LOG2_E, dtype=torch.float32)).double() / ONE
    assert got[0] == 1.0
    want = below.double().exp()
    assert bool(((got - want).abs() <= 4e-6 * want + 2 / ONE).all())
    assert got[-1] == 0


def test_log_probabilities() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 4
    draws = draw_tokens(logits, *rules(3))
    got = draws.chosen - draws.greatest - (draws.mass / ONE).log()
    want = logits.double().log_softmax(1).gather(1, draws.ids[:, None])[:, 0]
    assert bool(((got - want).abs() < 3e-7).all())


CASES = {
    "random": lambda: torch.randn(5, 150, generator=torch.Generator().manual_seed(5)) * 3,
    "tied": lambda: torch.randint(-3, 3, (6, 100), generator=torch.Generator().manual_seed(6)).float(),
    "odd": lambda: torch.randn(6, 65, generator=torch.Generator().manual_seed(7)) * 9,
    "one": lambda: torch.randn(6, 1, generator=torch.Generator().manual_seed(8)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_draws_what_the_reference_draws(case: str) -> None:
    """Small blocks, so that rows hold many; few candidates, so that flat rows are searched like long ones."""
    pytest.importorskip("triton")
    from cedar.kernels import sampling_triton

    logits = CASES[case]()
    logits[3, -1], logits[4, 0] = math.nan, math.inf
    given = rules(len(logits), seed=len(case))
    want = draw_tokens(logits, *given)
    got = Draws(sampling_triton.draw_tokens(logits, *given, 0, block=64, cap=64, rank=16))
    assert want.ids[3] == want.ids[4] == -1
    assert torch.equal(got.packed, want.packed)


def test_misuse_is_refused() -> None:
    given = rules(2)
    with pytest.raises(ContractError, match="logits must be"):
        draw_tokens(torch.zeros(2, 8, dtype=torch.float64), *given)
    with pytest.raises(ContractError, match="columns"):
        draw_tokens(torch.zeros(2, (1 << 18) + 1), *given)
    with pytest.raises(ContractError, match="top_k must be"):
        draw_tokens(torch.zeros(2, 8), *given[:3], given[3].int(), *given[4:])
