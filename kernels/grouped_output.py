"""The grouped output projection wo_a: heads in groups, each with its own low-rank product (spec §3)."""

from __future__ import annotations

from typing import overload

import torch
from cedar.kernels import grouped_output_ref
from cedar.kernels.contract import Contract
from cedar.kernels.prepared import CODES, Prepared


@overload
def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


@overload
def grouped_output(
    o: torch.Tensor, weight: torch.Tensor, orders: tuple[int, ...]
) -> torch.Tensor | Prepared: ...


def grouped_output(
    o: torch.Tensor, weight: torch.Tensor, orders: tuple[int, ...] = ()
) -> torch.Tensor | Prepared:
    """bf16 [N, G*r]: o bf16 [N, G, C] times weight [G, r, C] per group, concatenated.

    C = heads·head_dim / G. weight is wo_a expanded to bf16 (`expand_fp8_blocks`); those values in float64
    spare the CPU a conversion. The result is quantised in one of `orders`, in the same launch, where that is
    faster than a launch of its own (on Hopper, as codes for 1 to 8 and 17 to 64 tokens, GROUPED for many).
    """
    c = Contract("grouped_output")
    c.expect("o", o, "N G C", torch.bfloat16)
    c.expect("weight", weight, "G r C", torch.bfloat16, torch.float64)
    if o.is_cuda and weight.dtype == torch.bfloat16:
        if CODES in orders:
            from cedar.kernels import grouped_output_hopper

            if grouped_output_hopper.fits(o, weight):
                return grouped_output_hopper.grouped_output(o, weight)
        from cedar.kernels import linear_triton

        if linear_triton.GROUPED in orders:
            from cedar.kernels import grouped_bulk_hopper

            if grouped_bulk_hopper.fits(o, weight):
                return grouped_bulk_hopper.grouped_output(o, weight)
        return linear_triton.grouped_output(o, weight)
    return grouped_output_ref.grouped_output(o, weight)
