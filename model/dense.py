"""Matrices as layers hold them, and the budget for keeping them expanded on the CPU.

The CPU reference multiplies in float64. Expanding a packed weight on every call would cost more than the
product, so small networks keep float64 copies; a large one, or one on an accelerator, keeps only the packed
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from cedar.kernels.experts import expand_experts
from cedar.kernels.feed_forward import RoutedWeights
from cedar.kernels.fp8 import expand_fp8_blocks
from cedar.kernels.linear import linear_dense, linear_fp8, order_for, settles
from cedar.kernels.prepared import Prepared

DEFAULT_EXPANDED_BYTES: Final = 1 << 30
_WIDE_BYTES: Final = 8


class ExpansionBudget:
    """How many bytes of float64 copies may still be made; none anywhere but on the CPU."""

    def __init__(self, device: torch.device, total_bytes: int = DEFAULT_EXPANDED_BYTES) -> None:
        self._left = total_bytes if device.type == "cpu" else 0

    def take(self, elements: int) -> bool:
        """Whether a copy of `elements` values fits; counts it when it does."""
        fits = elements * _WIDE_BYTES <= self._left
        if fits:
            self._left -= elements * _WIDE_BYTES
        return fits


class Rows(NamedTuple):
    """Rows bf16 [N, C] as a producer hands them on: plain, and quantised in some orders of channels."""

    plain: torch.Tensor
    prepared: tuple[Prepared, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Dense:
    """An FP8 matrix [O, I] with 32x32 block scales; its input is quantised on the way in."""

    weight: torch.Tensor
    scale: torch.Tensor
    expanded: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor, budget: ExpansionBudget) -> Dense:
        """Wrap stored tensors, expanded when the budget allows."""
        expanded = expand_fp8_blocks(weight, scale, torch.float64) if budget.take(weight.numel()) else None
        return cls(weight, scale, expanded)

    def __call__(self, x: torch.Tensor | Rows | Prepared) -> torch.Tensor:
        """bf16 [..., I], or quantised [N, I], to bf16 [..., O]."""
        plain, prepared = x if isinstance(x, Rows) else (x, ())
        return linear_fp8(plain, self.weight, self.scale, expanded=self.expanded, prepared=prepared)

    def orders(self, rows: int) -> tuple[int, ...]:
        """In which orders a producer of so many `Rows` may spare this product the quantising: one or none."""
        order = order_for(rows, self.weight)
        return () if order is None else (order,)

    def settles(self, x: Rows) -> bool:
        """Whether the launch after this product of x may read at once what is older than the product.

        One that quantises x itself may let that launch go before it has waited.
        """
        rows = x.plain.shape[0]
        return settles(rows, self.weight) and (not self.orders(rows) or bool(x.prepared))


@dataclass(frozen=True, eq=False, repr=False)
class Plain:
    """A bf16 matrix [O, I] (kept in float64 when the budget allows)."""

    weight: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, budget: ExpansionBudget) -> Plain:
        """Wrap a stored matrix, widened when the budget allows."""
        return cls(weight.to(torch.float64) if budget.take(weight.numel()) else weight)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """bf16 [..., I] to `out_dtype` [..., O]."""
        return linear_dense(x, self.weight, out_dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Experts:
    """Routed experts, stacked MXFP4."""

    weights: RoutedWeights
    expanded: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(
        cls,
        w1: tuple[torch.Tensor, torch.Tensor],
        w3: tuple[torch.Tensor, torch.Tensor],
        w2: tuple[torch.Tensor, torch.Tensor],
        budget: ExpansionBudget,
    ) -> Experts:
        """Wrap stacked (payload, scale) pairs, expanded when the budget allows."""
        expanded = None
        if budget.take(2 * (w1[0].numel() + w3[0].numel() + w2[0].numel())):
            expanded = (expand_experts(*w1), expand_experts(*w3), expand_experts(*w2))
        return cls(RoutedWeights(*w1, *w3, *w2), expanded)
