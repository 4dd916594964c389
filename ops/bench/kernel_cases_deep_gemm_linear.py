"""Benchmark cases: dense FP8 linears by DeepGEMM's Hopper kernel beside ours.

Equal: the E4M3 weights, x given in E4M3 with its scales, bf16 out. Not equal: DeepGEMM's scales are fp32, one
for each 128 × 128 weights and each 128 channels of x, ours E8M0 of 32 × 32 and of 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from cedar.ops.bench.kernel_cases_layers import LINEARS, linear_case, stored_linears
from cedar.ops.bench.kernel_timing import Case, relative_error

GROUP = 128


def to_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [n, C] and fp32 scales [n, C/128] of x [n, C]."""
    groups = x.float().view(x.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1).clamp_min(1e-4) / 448.0
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), scale


def truth(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [n, O] of x E4M3 [n, C] by weight E4M3 [O, C], scales [n, C/128] and [O/128, C/128]."""
    wide = x.double() * x_scale.double().repeat_interleave(GROUP, 1)
    spread = scale.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return wide @ (weight.double() * spread).T


class Linear:
    """DeepGEMM's linear of one x by several weights: `runs` are timed, `error` checks the first."""

    def __init__(
        self,
        peer: ModuleType,
        x: tuple[torch.Tensor, torch.Tensor],
        weights: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.x, self.weights = x, weights
        self.out = torch.empty(
            x[0].shape[0], weights[0][0].shape[0], dtype=torch.bfloat16, device=x[0].device
        )
        given = x[0], peer.utils.layout.get_mn_major_tma_aligned_tensor(x[1])
        self.runs = [partial(peer.fp8_gemm_nt, given, weight, self.out) for weight in weights]

    def error(self) -> float:
        """Relative L2 error against float64."""
        self.runs[0]()
        return relative_error(self.out, truth(*self.x, *self.weights[0]))


def linear_cases(peer: ModuleType, names: Iterable[str] = tuple(LINEARS)) -> Iterator[Case]:
    """Ours, then DeepGEMM's, for each linear and batch."""
    for name in names:
        outputs, columns = LINEARS[name]
        stored = stored_linears(outputs, columns)
        scale = torch.rand(outputs // GROUP, columns // GROUP, device="cuda") * 1e-4 + 1e-5
        for tokens in (1, 16, 64, 128):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            own = linear_case(name, x, stored, codes=True)
            yield replace(own, reference=None)
            linear = Linear(peer, to_groups(x), [(weight, scale) for weight, _ in stored])
            yield Case(
                operation=f"DeepGEMM linear, {name}",
                shape=own.shape,
                runs=linear.runs,
                bytes=outputs * columns * (1 + 4 / GROUP**2) + tokens * (2 * outputs + columns),
                flops=own.flops,
                check=linear.error,
                tolerance=2e-3,
            )
