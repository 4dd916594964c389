"""A function of tensors, recorded on an accelerator as one CUDA graph and replayed.

A step of the small model is some five thousand kernels that take less time than launching them; a replay
launches them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from cedar.model.captured import capturing
from torch import Tensor

_EAGER_CALLS: Final = 2  # compile kernels, create workspaces, gradients and optimiser states: not recordable

Tensors = Mapping[str, Tensor]


class Replayed:
    """Calls `function`; on CUDA its third call records it, and later ones replay the record.

    Inputs keep their names, shapes and types from call to call. Outputs are the record's own memory: the
    next call overwrites them. Everything runs on the current stream, which must not be the default one.
    """

    def __init__(self, function: Callable[[Tensors], Tensors]) -> None:
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._outputs: Tensors = {}

    def __call__(self, inputs: Tensors) -> Tensors:
        """What the function gives for these inputs."""
        self._calls += 1
        if self._calls <= _EAGER_CALLS or not all(value.is_cuda for value in inputs.values()):
            return self._function(inputs)
        if self._graph is None:
            self._inputs = {name: value.clone() for name, value in inputs.items()}
            self._graph = torch.cuda.CUDAGraph()
            with capturing(self._graph, stream=torch.cuda.current_stream()):
                self._outputs = self._function(self._inputs)
        for name, value in inputs.items():
            self._inputs[name].copy_(value, non_blocking=True)
        self._graph.replay()
        return self._outputs
