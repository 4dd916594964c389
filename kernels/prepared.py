"""Activations as a product with packed weights meets them: quantised already, in its kernel's channel order.

A producer (a norm, a projection's epilogue) that writes this spares the product a launch. The round trip is
idempotent, so a reference may take `values` of order 0 for the activations themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Prepared(NamedTuple):
    """`values` bf16 [N, C]: E4M3 with a power-of-two scale per 32 channels, read back. `order`: 0 is natural;
    others are `linear_triton.permuted`'s.
    """

    values: torch.Tensor
    order: int
