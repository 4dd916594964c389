"""Truth for quantised activations as a producer hands them to a product."""

from __future__ import annotations

import torch
from cedar.kernels import fp8_ref
from cedar.kernels.prepared import CODES, NATURAL, Prepared


def prepared(x: torch.Tensor, order: int) -> Prepared:
    """x bf16 [N, C] as a product meets it; only the orders NATURAL and CODES are known here."""
    values, scale = fp8_ref.quantize(x)
    if order == CODES:
        return Prepared(values, order, scale)
    if order != NATURAL:
        raise ValueError(
            f"order is {order}: the reference knows {NATURAL} (natural) and {CODES} (codes) alone"
        )
    return Prepared(fp8_ref.dequantize(values, scale), order)
