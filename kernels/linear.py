"""Matrix products of the network: FP8 with 32x32 block scales, and plain ones (spec §2, §14)."""

from __future__ import annotations

import torch
from cedar.kernels import fp8_ref, linear_ref
from cedar.kernels.contract import Contract
from cedar.kernels.fp8 import dequantize_fp8
from cedar.kernels.prepared import CODES, Prepared

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def order_for(tokens: int, weight: torch.Tensor) -> int | None:
    """The order in which a product of `tokens` rows with an FP8 `weight` [O, I] has use for what its producer
    quantised; None where it has none (a library's product, a CPU).
    """
    if not weight.is_cuda:
        return None
    from cedar.kernels import linear_triton

    return linear_triton.order_for(tokens, weight)


def settles(tokens: int, weight: torch.Tensor) -> bool:
    """Whether the launch after a product of `tokens` rows with an FP8 `weight` [O, I] may read what is older
    than the product without waiting for it (`settled` of `sparse_attention`).
    """
    if not weight.is_cuda:
        return True
    from cedar.kernels import linear_triton

    return linear_triton.settles(tokens, weight)


def linear_fp8(
    x: torch.Tensor | Prepared,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    expanded: torch.Tensor | None = None,
    prepared: tuple[Prepared, ...] = (),
) -> torch.Tensor:
    """x·Wᵀ with FP8 operands: x bf16 [..., I] (quantised here, groups of 32) to bf16 [..., O].

    weight float8_e4m3fn [O, I] with scale uint8 E8M0 [ceil(O/32), ceil(I/32)]. `expanded`, float64 [O, I]
    made by `expand_fp8_blocks`, spares the CPU reference the expansion at every call; devices with a kernel
    ignore it. `prepared`: the rows of x as their producer quantised them; one in the order that `order_for`
    names spares the launch that quantises, others and the CPU's are passed over. x itself may be such rows
    [N, I], in that order or CODES, where no plain ones exist.
    """
    c = Contract("linear_fp8")
    c.expect("weight", weight, "O I", torch.float8_e4m3fn)
    c.expect("scale", scale, "ceil(O/32) ceil(I/32)", torch.uint8)
    if isinstance(x, Prepared):
        ready = x.values.is_cuda and x.order == order_for(x.values.shape[0], weight)
        c.require("x", ready or x.order == CODES, f"is in order {x.order}, not {CODES}")
        if x.order == CODES:
            _check_codes(c, "x", x)
        else:
            c.expect("x.values", x.values, "N I", torch.bfloat16)
            c.require("x.values", x.values.is_contiguous(), "must be contiguous")
        if ready:
            from cedar.kernels import linear_triton

            return linear_triton.linear_fp8(x.values, weight, scale, (x,))
        assert x.scale is not None
        x = dequantize_fp8(x.values, x.scale)
    c.expect("x", x, "... I", torch.bfloat16)
    c.divisible("x", "I", fp8_ref.GROUP)
    for copy in prepared:
        if copy.order == CODES:
            _check_codes(c, "prepared", copy)
            c.require(
                "prepared.values", copy.values.numel() == x.numel(), f"must hold x's {x.numel()} values"
            )
    if x.is_cuda:
        from cedar.kernels import linear_triton

        return linear_triton.linear_fp8(x, weight, scale, prepared)
    if expanded is None:
        expanded = fp8_ref.expand_blocks(weight, scale, torch.float64)
    else:
        c.expect("expanded", expanded, "O I", torch.float64)
    return linear_ref.linear_fp8(x, expanded)


def _check_codes(c: Contract, name: str, codes: Prepared) -> None:
    """Kernels take strides and the number of scales for granted."""
    c.require(f"{name}.scale", codes.scale is not None, "is missing")
    assert codes.scale is not None
    c.expect(f"{name}.values", codes.values, "N I", torch.float8_e4m3fn)
    c.expect(f"{name}.scale", codes.scale, "N I/32", torch.uint8)
    for part, tensor in (("values", codes.values), ("scale", codes.scale)):
        c.require(f"{name}.{part}", tensor.is_contiguous(), "must be contiguous")


def linear_dense(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """x·Wᵀ with plain operands: x [..., I] and weight [O, I], bf16, fp32 or float64, to `out_dtype` [..., O].

    Out fp32 for compressor inputs when m > 1 and the head. A float64 weight spares the CPU a conversion.
    """
    c = Contract("linear_dense")
    c.expect("weight", weight, "O I", *FLOATS)
    c.expect("x", x, "... I", *FLOATS)
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and out_dtype != torch.float64:
        from cedar.kernels import linear_triton

        return linear_triton.linear_bf16(x, weight, out_dtype)
    return linear_ref.linear_dense(x, weight, out_dtype)
