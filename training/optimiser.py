"""Muon for matrices inside layers, AdamW for the rest.

Muon steps along an approximately orthogonal version of the momentum, scaled to the root mean square that
AdamW steps have, so that one learning rate serves both. Matrices of one shape are iterated together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_STEP_RMS = 0.2
_VISION = ("vision.", "aligner.", "image_")
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Parameters [..., O, I]; leading dimensions are separate matrices."""

    def __init__(self, groups: list[dict[str, Any]], weight_decay: float) -> None:
        super().__init__(groups, {"momentum": 0.95, "weight_decay": weight_decay})
        _tensor_rates(self)

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
        updates *= group["lr"] * (-_STEP_RMS * max(params[0].shape[-2:]) ** 0.5)
        weights: list[Tensor] = list(params)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(updates.unbind(0)))


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


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak learning rates.

    `mixers` are the small matrices behind a sigmoid or softmax over wide, normed inputs: a step of Adam moves
    all of a row's weights together, and so its output by the rate times the width (768 for mHC).
    """

    matrices: float = 1e-3  # in layers
    vision: float = 5e-4  # matrices of the tower and the aligner
    tables: float = 3e-3  # embeddings, head, Engram rows
    others: float = 1e-3  # vectors
    mixers: float = 2e-4  # mHC projections, routers, the compressors' gates
    weight_decay: float = 0.1  # of matrices in layers


def make_optimisers(network: nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    """Muon over matrices in layers; AdamW over embeddings, head and tables, and over vectors and gates."""
    matrices: list[nn.Parameter] = []
    vision: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    mixers: list[nn.Parameter] = []
    for name, param in network.named_parameters():
        if not param.requires_grad:
            continue
        if "embed.weight" in name or name == "head.weight":
            tables.append(param)
        elif name.endswith(("_fn", "gate.weight")):
            mixers.append(param)
        elif param.dim() >= 2 and not name.endswith("_weight"):
            (vision if name.startswith(_VISION) else matrices).append(param)
        else:
            others.append(param)
    fused = any(param.is_cuda for param in others)
    groups = [
        {"params": tables, "lr": rates.tables},
        {"params": others, "lr": rates.others},
        {"params": mixers, "lr": rates.mixers},
    ]
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=fused,
        capturable=fused,
    )
    _tensor_rates(adam)
    groups = [{"params": matrices, "lr": rates.matrices}, {"params": vision, "lr": rates.vision}]
    return [Muon([group for group in groups if group["params"]], rates.weight_decay), adam]


def _tensor_rates(optimiser: torch.optim.Optimizer) -> None:
    """Learning rates as tensors beside the parameters, so that a recorded step follows them."""
    for group in optimiser.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)


class Optimisers:
    """The optimisers of a network with its gradients, stepped together at a share of their rates.

    The vision tower's gradients are clipped apart: steps are scaled to one size, so a norm that one part
    drives up would let the other part's last gradients be repeated.
    """

    def __init__(self, network: nn.Module, rates: Rates, clip: float) -> None:
        self._each = make_optimisers(network, rates)
        self._rates = [[float(g["lr"]) for g in o.param_groups] for o in self._each]
        self._clip = clip
        self._parts: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, param in network.named_parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
                self._parts["vision" if name.startswith(_VISION) else "text"].append(param)

    def zero(self) -> None:
        """Clear the gradients in place."""
        for params in self._parts.values():
            torch._foreach_zero_([param.grad for param in params if param.grad is not None])

    def step(self, rate: Tensor) -> dict[str, Tensor]:
        """One update with every learning rate times `rate` fp32 []; each part's norm before clipping."""
        norms = {
            f"grad_{part}": nn.utils.clip_grad_norm_(params, self._clip)
            for part, params in self._parts.items()
        }
        for optimiser, rates in zip(self._each, self._rates, strict=True):
            for group, base in zip(optimiser.param_groups, rates, strict=True):
                group["lr"].copy_(rate * base)
            optimiser.step()
        return norms

    def state_dict(self) -> list[dict[str, Any]]:
        """What `load_state_dict` takes."""
        return [optimiser.state_dict() for optimiser in self._each]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from saved states."""
        for optimiser, state in zip(self._each, states, strict=True):
            optimiser.load_state_dict(state)
