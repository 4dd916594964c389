# mypy: allow-untyped-calls
"""Timing and error measures of the kernel benchmark: graph replays over rotating inputs, medians, floors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from cedar.model.captured import capturing

BYTES_PER_S = 4.3e12  # one H200, device copy, read + write
FLOPS_PER_S = 790e12  # one H200, bf16 matrix product on random data


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table. `runs` are the same work on different inputs, so that no cache serves them."""

    operation: str
    shape: str
    runs: Sequence[Callable[[], object]]
    bytes: float
    flops: float = 0.0
    check: Callable[[], float] | None = None  # an error; above `tolerance` is a failure
    tolerance: float = 0.0
    reference: Callable[[], object] | None = None  # a torch baseline or a peer, timed beside
    reference_name: str = ""
    target: str = ""


@dataclass(kw_only=True)
class Row:
    """What was measured; times in microseconds."""

    operation: str
    shape: str
    time_us: float
    bytes: float
    flops: float
    floor_us: float
    share: float
    reference_us: float | None = None
    reference_name: str = ""
    target: str = ""
    error: float | None = None
    passed: bool | None = None
    note: str = field(default="")


def graph_time_us(
    runs: Sequence[Callable[[], object]], *, replays: int = 12, least_us: float = 2000.0
) -> float:
    """Median time of one call, the calls captured one after another in a CUDA graph of at least
    `least_us`.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for run in runs:
        run()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(50, int(least_us / max(1.0, begin.elapsed_time(end) * 1000.0))))
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    graph.replay()
    graph.replay()
    times = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000.0 / (rounds * len(runs)))
    return float(statistics.median(times))


def eager_time_us(run: Callable[[], object], *, repeats: int = 10) -> float:
    """Median time of one call launched directly."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000.0)
    return float(statistics.median(times))


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 error in float64; infinite when `out` holds a NaN."""
    difference = (out.to(torch.float64) - truth.to(torch.float64)).norm() / truth.to(
        torch.float64
    ).norm().clamp_min(1e-300)
    value = float(difference)
    return value if value == value else float("inf")


def measure(case: Case) -> Row:
    """Checks, then times one case."""
    error = case.check() if case.check is not None else None
    time_us = graph_time_us(case.runs)
    floor_us = max(case.bytes / BYTES_PER_S, case.flops / FLOPS_PER_S) * 1e6
    reference_us = None
    if case.reference is not None:
        try:
            reference_us = graph_time_us([case.reference])
        except RuntimeError:  # not capturable
            torch.cuda.synchronize()
            reference_us = eager_time_us(case.reference)
    return Row(
        operation=case.operation,
        shape=case.shape,
        time_us=time_us,
        bytes=case.bytes,
        flops=case.flops,
        floor_us=floor_us,
        share=floor_us / time_us,
        reference_us=reference_us,
        reference_name=case.reference_name,
        target=case.target,
        error=error,
        passed=None if error is None else error <= case.tolerance,
    )
