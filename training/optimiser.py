"""Muon for matrices inside layers, AdamW for the rest.

Muon steps along an approximately orthogonal version of the momentum, scaled to the root mean square that
AdamW steps have, so that one learning rate serves both. Matrices of one shape are iterated together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_STEP_RMS = 0.2
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Parameters [..., O, I]; leading dimensions are separate matrices."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from `.grad`."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[tuple(param.shape)].append(param)
            for params in by_shape.values():
                self._step_together(params, group)

    def _step_together(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        moments = []
        for param in params:
            state = self.state[param]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(param)
            moments.append(state["momentum"])
        grads = [param.grad for param in params if param.grad is not None]
        torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, moments, group["momentum"])
        updates = orthogonalised(torch.stack(list(nesterov)))
        scale = _STEP_RMS * max(params[0].shape[-2:]) ** 0.5
        weights: list[Tensor] = list(params)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(updates.unbind(0)), alpha=-group["lr"] * scale)


def orthogonalised(matrices: Tensor, rounds: int = 5) -> Tensor:
    """[..., O, I] with singular values moved near one (Newton-Schulz, quintic)."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def make_optimisers(
    network: nn.Module, *, lr: float, embedding_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon over matrices in layers; AdamW over embeddings, head and tables, and over vectors and gates."""
    matrices, tables, others = [], [], []
    for name, param in network.named_parameters():
        if not param.requires_grad:
            continue
        if "embed.weight" in name or name == "head.weight":
            tables.append(param)
        elif param.dim() >= 2 and not any(part in name for part in ("hc_", "gate", "_weight")):
            matrices.append(param)
        else:
            others.append(param)
    fused = any(param.is_cuda for param in others)
    groups = [{"params": tables, "lr": embedding_lr}, {"params": others, "lr": lr}]
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    return [Muon(matrices, lr, weight_decay), adam]
