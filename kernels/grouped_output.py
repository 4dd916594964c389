"""The grouped output projection wo_a: heads in groups, each with its own low-rank product (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import grouped_output_ref
from cedar.kernels.contract import Contract


def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 [N, G*r]: o bf16 [N, G, C] times weight [G, r, C] per group, concatenated.

    C = heads·head_dim / G. weight is wo_a expanded to bf16 (`expand_fp8_blocks`); those values in float64
    spare the CPU a conversion.
    """
    c = Contract("grouped_output")
    c.expect("o", o, "N G C", torch.bfloat16)
    c.expect("weight", weight, "G r C", torch.bfloat16, torch.float64)
    if o.is_cuda and weight.dtype == torch.bfloat16:
        from cedar.kernels import linear_triton

        return linear_triton.grouped_output(o, weight)
    return grouped_output_ref.grouped_output(o, weight)
