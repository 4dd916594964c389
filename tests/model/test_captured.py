"""What may not happen while a CUDA graph is captured; the graphs themselves are tests/gpu's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from cedar.model.captured import capturing

GRAPH = cast(torch.cuda.CUDAGraph, None)


class Garbage:
    """Something that only the cyclic collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    yield
    gc.enable()


def much_is_made() -> None:
    """Enough objects for the collector to run, were it on."""
    assert len([[number] for number in range(200_000)]) == 200_000


def test_nothing_is_collected_meanwhile() -> None:
    gc.collect()
    alive = weakref.ref(Garbage())
    with capturing(GRAPH):
        much_is_made()
        assert alive() is not None
    much_is_made()
    assert alive() is None


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_left_as_it_was(collects: bool) -> None:
    if not collects:
        gc.disable()
    with pytest.raises(ZeroDivisionError), capturing(GRAPH):
        _ = 1 // gc.isenabled()
    assert gc.isenabled() is collects
