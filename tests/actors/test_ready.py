"""A Decode worker on a GPU listens when its steps are captured, and not before."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from cedar.actors.config import DecodeConfig
from cedar.actors.decode_worker import DecodeWorker
from cedar.model import decode_graph
from cedar.model.decode_graph import DecodeGraphs
from cedar.model.network import Network

from .conftest import GOLDEN


async def started(network: Network, **given: Any) -> DecodeWorker:
    worker = DecodeWorker(DecodeConfig(checkpoint=str(GOLDEN), pages=80, **given), network=network)
    await worker.start()
    await worker.stop(0)
    return worker


class OnCuda:
    """What a GPU would do is put down instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prepared: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None

        def prepare(graphs: DecodeGraphs, batch: int, tokens: int) -> None:
            if self.error is not None:
                raise self.error
            self.threads.add(threading.current_thread().name)
            self.prepared.append((batch, tokens))

        monkeypatch.setattr(DecodeGraphs, "prepare", prepare)
        monkeypatch.setattr(Network, "_uses_graphs", property(lambda network: True))


async def test_every_step_is_ready_before_the_worker_is(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cuda, page = OnCuda(monkeypatch), network.layout.page_tokens
    monkeypatch.setattr(decode_graph, "FEWEST_PAGES", 2)
    await started(network, slots=5, prepare_tokens=3 * page)
    assert cuda.prepared == [(rows, width * page) for width in (2, 8) for rows in (1, 2, 4, 8)]
    assert cuda.threads == {"cedar-decode"}
    told = [record.getMessage() for record in caplog.records if record.name.startswith("cedar.actors")]
    assert [f"({n} of {len(cuda.prepared)})" in text for n, text in enumerate(told[:-1], 1)] == [True] * len(
        cuda.prepared
    )
    assert "listens on" in told[-1]


async def test_nothing_is_prepared_where_nothing_needs_it(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = OnCuda(monkeypatch)
    await started(network, slots=5, prepare_tokens=0)
    monkeypatch.undo()
    await started(network, slots=5)  # on the CPU
    assert cuda.prepared == []


async def test_a_worker_that_cannot_get_ready_does_not_start(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    OnCuda(monkeypatch).error = RuntimeError("no kernel image")
    with pytest.raises(RuntimeError, match="no kernel image"):
        await started(network, slots=1)
