"""Rotary position embedding on the last channels, interleaved pairs (2i, 2i+1), and its inverse (spec §3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import rope_ref
from cedar.kernels.contract import Contract


class YarnParams(NamedTuple):
    """A config's `rope_scaling` of type yarn; original_positions is its original_max_position_embeddings."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


def rope_frequencies(dim: int, theta: float, yarn: YarnParams | None = None) -> torch.Tensor:
    """Radians a position, fp32 [dim/2] on the CPU, for `dim` rotated channels (even) and base `theta`."""
    c = Contract("rope_frequencies")
    c.require("dim", dim > 0 and dim % 2 == 0, f"must be even and positive, got {dim}")
    c.require("theta", theta > 1, f"must be above 1, got {theta}")
    return rope_ref.frequencies(dim, theta) if yarn is None else rope_ref.yarn_frequencies(dim, theta, *yarn)


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Rotates the last R channels of x bf16 [N, ..., C] at positions int64 [N] by freqs fp32 [R/2]; a copy.

    fp32 inside, rounded once; `inverse` turns the other way.
    """
    c = Contract("apply_rope")
    c.expect("freqs", freqs, "F", torch.float32)
    c.expect("positions", positions, "N", torch.int64)
    c.expect("x", x, "... C", torch.bfloat16)
    c.require(
        "x", x.dim() > 1 and x.shape[0] == positions.shape[0], f"must be [N={positions.shape[0]}, ..., C]"
    )
    c.require("x", x.shape[-1] >= 2 * freqs.shape[0], f"has {x.shape[-1]} channels, fewer than freqs turns")
    return rope_ref.rotate(x, positions, freqs, inverse)


def rope_table(positions: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) fp32 [N, R/2] of positions int64 [N]: made once a step, used by every layer of one base."""
    c = Contract("rope_table")
    c.expect("freqs", freqs, "F", torch.float32)
    c.expect("positions", positions, "N", torch.int64)
    if positions.is_cuda:
        from cedar.kernels import rope_triton

        return rope_triton.rope_table(positions, freqs)
    angles = positions.to(torch.float32).unsqueeze(-1) * freqs
    return torch.cos(angles), torch.sin(angles)
