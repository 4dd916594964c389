"""A call that becomes a CUDA graph: eager at first, which compiles what is to be compiled, then captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_one_at_a_time = threading.Lock()  # the collector is the process's


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """`torch.cuda.graph`, with Python's cyclic collector off: a graph that it frees (of a network that is no
    longer there, say) is an operation that CUDA forbids while a stream is captured, and ends the capture.
    Threads capture one after another.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            if collects:
                gc.enable()


class GraphPool:
    """Memory that all graphs of one network share, because only one of them runs at a time.

    `turn` counts what has run: what a graph left holds until it changes.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self.turn = 0

    @property
    def handle(self) -> Any:
        """CUDA's name for it."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class Captured(Generic[T]):
    """`function` takes nothing: it reads tensors that stay where they are, by shapes alone."""

    def __init__(self, function: Callable[[], T], pool: GraphPool) -> None:
        self._function = function
        self._pool = pool
        self._result: T | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def __call__(self, *, capture: bool = True) -> T:
        """The result; once captured it is the same tensors every time, overwritten by the next call of any
        graph of the pool. `capture` False: not this time.
        """
        self.runs += 1
        self._pool.turn += 1
        if self.graph is None and (self.runs == 1 or not capture):
            return self._function()
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, pool=self._pool.handle):
                self._result = self._function()
            self.graph = graph
        self.graph.replay()
        assert self._result is not None
        return self._result
