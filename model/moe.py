"""The mixture of experts: router, routed experts, the shared expert (spec §3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cedar.kernels.feed_forward import Expanded, SharedWeights, feed_forward, orders_for
from cedar.model.dense import Dense, Experts, Plain, Rows


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixtureOfExperts:
    """Weights of one layer's feed-forward part."""

    gate: Plain  # [E, d]
    bias: torch.Tensor  # fp32 [E]
    bias_image: torch.Tensor  # fp32 [E], for rows inside an image span
    experts: Experts
    shared_in: Dense  # w1 over w3 [2 * I, d]
    shared_out: Dense  # w2 [d, I]
    per_token: int
    routed_scale: float
    limit: float

    def __call__(self, rows: Rows, image_mask: torch.Tensor | None) -> torch.Tensor:
        """bf16 [N, d] of normed rows [N, d]; `image_mask` bool [N], None when no row is an image's."""
        bias = self.bias
        if image_mask is not None:
            bias = torch.where(image_mask.unsqueeze(1), self.bias_image, self.bias)
        experts, first, second = self.experts, self.shared_in, self.shared_out
        return feed_forward(
            rows.plain,
            self.gate.weight,
            bias,
            self.per_token,
            self.routed_scale,
            experts.weights,
            self._shared,
            self.limit,
            Expanded(experts.expanded, first.expanded, second.expanded),
            rows.prepared,
        )

    def orders(self, rows: int) -> tuple[int, ...]:
        """In which orders so many rows are wanted quantised."""
        return orders_for(rows, self.per_token, self.experts.weights, self._shared)

    @property
    def _shared(self) -> SharedWeights:
        first, second = self.shared_in, self.shared_out
        return SharedWeights(first.weight, first.scale, second.weight, second.scale)
