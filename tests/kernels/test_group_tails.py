"""Tails of open groups: a stream of tokens comes out as whole groups, on both implementations."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import group_tails
from cedar.kernels.contract import ContractError
from cedar.kernels.paging import PageRangeError

WIDTH, SLOTS = 40, 3


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("ratio", [2, 3])
def test_groups_come_out_whole(ratio: int, kernel: bool) -> None:
    if kernel and torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    if kernel:
        pytest.importorskip("triton")
        from cedar.kernels.group_tails_triton import join_tails
    else:
        from cedar.kernels.group_tails import join_tails
    tails = torch.full((SLOTS, 2, 2, ratio + 1, WIDTH), 7.0)[:, 1, :, : ratio - 1]
    tokens = torch.randn(2, 9, 2, WIDTH, generator=torch.Generator().manual_seed(ratio))
    slots = torch.tensor([2, 0, 2])  # the third row repeats the first and keeps nothing
    for step in range(9):
        places = torch.tensor([step % ratio if (step + 1) % ratio else -1] * 2 + [-1])
        own = torch.stack((tokens[0, step], tokens[1, step], tokens[0, step]))
        kv, gate = join_tails(own[:, 0].contiguous(), own[:, 1].contiguous(), tails, slots, places)
        if (step + 1) % ratio == 0:
            for row in range(2):
                members = tokens[row, step + 1 - ratio : step + 1]
                assert torch.equal(kv[row], members[:, 0])
                assert torch.equal(gate[row], members[:, 1])
    assert bool((tails[1] == 7.0).all())


def test_misuse_is_refused() -> None:
    kv, tails = torch.zeros(2, WIDTH), torch.zeros(SLOTS, 2, 1, WIDTH)
    slots, places = torch.tensor([0, 1]), torch.tensor([0, -1])
    with pytest.raises(ContractError, match="gate must be"):
        group_tails.join_tails(kv, kv.double(), tails, slots, places)
    with pytest.raises(PageRangeError, match="slots holds 3"):
        group_tails.join_tails(kv, kv, tails, slots + 2, places)
    with pytest.raises(PageRangeError, match="places holds 1"):
        group_tails.join_tails(kv, kv, tails, slots, places + 1)
