"""The Prefill stage's gRPC service."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from cedar.actors.channels import Channels
from cedar.actors.config import PrefillConfig
from cedar.actors.engine_thread import EngineThread
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.prefill_engine import PrefillEngine
from cedar.actors.prefill_run import PrefillParts, PrefillRun
from cedar.actors.status import Context
from cedar.actors.store_link import StoreLink
from cedar.actors.worker import StageWorker
from cedar.v1.stages_pb2 import PrefillEvent, PrefillRequest, WorkerStatus

if TYPE_CHECKING:
    from cedar.model.network import Network


class PrefillWorker(StageWorker):
    """Serves ``Prefill`` and ``Worker``. ``parts`` exists once started."""

    stage = "prefill"

    def __init__(self, config: PrefillConfig, *, network: Network | None = None) -> None:
        super().__init__(config)
        self.config = config
        self.parts: PrefillParts | None = None
        self._given_network = network

    async def Prefill(self, request: PrefillRequest, context: Context) -> AsyncGenerator[PrefillEvent]:
        """Prefill one prompt and hand it to its Decode worker."""
        async with self._answering(context):
            with self.working():
                left = context.time_remaining()
                assert self.parts is not None
                run = PrefillRun(self.parts, request, None if left is None else time.monotonic() + left)
                self.counters["prompts"] += 1
                async with aclosing(run.events()) as events:
                    async for event in events:
                        if event.HasField("admitted"):
                            self._count(event)
                        yield event
                self.counters["prompts_done"] += 1

    def set_store(self, target: str | None) -> None:
        """The store moved, appeared, or (None) is gone."""
        assert self.parts is not None
        self.parts.store.connect(target)

    def _count(self, event: PrefillEvent) -> None:
        sources = event.admitted.sources
        for name in ("prompt", "hit_local", "hit_store", "state", "computed", "replayed"):
            self.counters[f"{name}_tokens"] += getattr(sources, f"{name}_tokens")
        self.counters["states_restored"] += sources.state_restored

    async def _open(self, thread: EngineThread) -> None:
        config = self.config
        memory = await thread.call(
            lambda: NetworkMemory.load(
                config.checkpoint,
                stage="prefill",
                device=config.device,
                page_tokens=config.page_tokens,
                pages=config.pages,
                slots=config.slots,
                drafting=config.drafting,
                network=self._given_network,
            )
        )
        engine = PrefillEngine(
            memory, thread, max_queue=config.max_queue, retry_after_ms=config.retry_after_ms
        )
        store = StoreLink(config, memory, self.counters)
        store.connect(config.store)
        self.parts = PrefillParts(engine, store, self.counters, Channels(), config)

    async def _close(self) -> None:
        if self.parts is not None:
            await self.parts.channels.close()
            await self.parts.store.close()

    def _describe(self, status: WorkerStatus) -> None:
        status.pages_total, status.slots_total = self.config.pages, self.config.slots
        if self.parts is None:
            return
        engine = self.parts.engine
        status.queued = len(engine.waiting)
        status.pages_leased, status.pages_cached = engine.pages.leased, engine.pages.cached
        status.slots_leased = engine.slots.leased
        status.fingerprint = engine.memory.network.fingerprint
        status.page_tokens = engine.memory.model.page_tokens
        status.page_bytes = engine.memory.pages.page_bytes
        self.parts.store.describe(status)
        status.counters["page_evictions"] = engine.pages.evictions

    def _check_books(self) -> None:
        if self.parts is not None:
            self.parts.engine.pages.check_integrity()
            self.parts.engine.slots.check_integrity()

    def _service(self) -> str:
        return "Prefill"
