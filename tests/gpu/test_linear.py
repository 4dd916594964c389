"""FP8 products on a GPU: every cut computes the product, the same bits each time, whoever quantised."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# the last three: many channels in clusters of three programs and of two, and few of them shared out by two
SHAPES = ((192, 640), (2048, 1152), (9088, 1280), (17024, 384), (16896, 256), (4608, 5120), (7680, 2304),
          (5120, 2304))  # fmt: skip


def weights(outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    payload = (torch.randn(outputs, columns, device="cuda") * 50).to(torch.float8_e4m3fn)
    scale = torch.randint(110, 120, (outputs // 32, columns // 32), dtype=torch.uint8, device="cuda")
    return payload, scale


def rows(tokens: int, columns: int) -> torch.Tensor:
    """Activations whose groups of channels differ by orders of magnitude, between other rows."""
    size = 10.0 ** torch.randn(tokens, columns // 32, 1, device="cuda")
    x = (torch.randn(tokens, columns // 32, 32, device="cuda") * size).bfloat16().view(tokens, columns)
    wide = torch.full((tokens, columns + 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :columns] = x
    return wide[:, :columns]


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_every_cut_is_the_product(outputs: int, columns: int) -> None:
    from cedar.kernels import fp8_ref, linear
    from cedar.kernels.linear_triton import GROUPED, permuted
    from cedar.kernels.prepared import CODES, Prepared
    from cedar.kernels.prepared_ref import prepared
    from cedar.ops.bench.kernel_timing import relative_error

    payload, scale = weights(outputs, columns)
    full = fp8_ref.expand_blocks(payload, scale, torch.float64)
    for tokens in (1, 9, 40, 70, 100, 200):
        x = rows(tokens, columns)
        got = linear.linear_fp8(x, payload, scale)
        truth = fp8_ref.round_trip(x.contiguous()) @ full.T
        # the matrix units drop bits of a group's sum that lie 2^13 below its greatest product
        assert relative_error(got, truth.bfloat16()) < 3e-3, tokens
        assert relative_error(got, truth) < 1.03 * relative_error(truth.bfloat16(), truth), tokens
        assert torch.equal(linear.linear_fp8(x, payload, scale), got), tokens
        order = linear.order_for(tokens, payload)
        assert order in (CODES, GROUPED), tokens
        copy = prepared(x.contiguous(), order) if order == CODES else Prepared(permuted(x, order), order)
        same = linear.linear_fp8(torch.zeros_like(x), payload, scale, prepared=(copy,))
        assert torch.equal(same, got), tokens
