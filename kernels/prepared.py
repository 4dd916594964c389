"""Activations as a product with packed weights meets them: quantised already, in its kernel's channel order.

A producer (a norm, a projection's epilogue) that writes this spares the product a launch. The round trip is
idempotent, so a reference may take `values` of order 0 for the activations themselves.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

NATURAL: Final = 0
CODES: Final = 8  # E4M3 bytes as they are, and their scales


class Prepared(NamedTuple):
    """Activations [N, C], quantised in groups of 32 channels.

    order CODES: `values` float8_e4m3fn in natural order, `scale` uint8 [N, C/32], E8M0; both contiguous.
    Others: `values` bf16, read back, and no `scale`; order 0 is natural, the rest are
    `linear_triton.permuted`'s.
    """

    values: torch.Tensor
    order: int
    scale: torch.Tensor | None = None


def empty_codes(x: torch.Tensor) -> Prepared:
    """Room for x [N, C] in order CODES."""
    tokens, channels = x.shape
    return Prepared(
        torch.empty(tokens, channels, dtype=torch.float8_e4m3fn, device=x.device),
        CODES,
        torch.empty(tokens, channels // 32, dtype=torch.uint8, device=x.device),
    )
