"""The Decode stage's gRPC service: handoffs in, tokens out.

A request's memory is a lease: bound to its handoff's stream until the handoff is done, then to somebody
reading its tokens. Every way out ends in ``free``, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from cedar.actors.config import DecodeConfig
from cedar.actors.decode_engine import DecodeEngine, Event
from cedar.actors.decode_events import EngineEvents
from cedar.actors.decode_handoff import receive_handoff
from cedar.actors.decode_requests import DecodeRequest, RequestTable
from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import Cancelled, NotFound, StageError, Unavailable
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.pool import PagePool, SlotPool
from cedar.actors.status import Context
from cedar.actors.store_link import StoreLink
from cedar.actors.worker import StageWorker
from cedar.v1.common_pb2 import TokenEvent
from cedar.v1.stages_pb2 import (
    DecodeCancelRequest,
    DecodeCancelResponse,
    StreamEnd,
    StreamRequest,
    StreamResponse,
    WorkerStatus,
)

if TYPE_CHECKING:
    from cedar.model.network import Network


_log = logging.getLogger(__name__)


class DecodeWorker(StageWorker):
    """Serves ``Decode`` and ``Worker``."""

    stage = "decode"

    def __init__(
        self,
        config: DecodeConfig,
        *,
        network: Network | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config)
        self.config = config
        self.table = RequestTable(config.finished_max, config.finished_ttl_s, clock)
        self._given_network = network
        self._clock = clock
        self._opened = False

    async def Handoff(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> AsyncGenerator[bytes]:
        """Take one prompt over from Prefill."""
        async with self._answering(context):
            with self.working():
                async with aclosing(receive_handoff(self, request_iterator)) as frames:
                    async for frame in frames:
                        yield frame

    async def Stream(self, request: StreamRequest, context: Context) -> AsyncGenerator[StreamResponse]:
        """Tokens of a request from any index on, then its end."""
        async with self._answering(context):
            with self.working(new=False):
                found = self.table.get(request.request_id)
                if found is None:
                    self.counters["unknown_requests"] += 1
                    raise NotFound(f"request {request.request_id!r} is not known here")
                async with aclosing(found.log.read(request.from_index)) as events:
                    async for event in events:
                        if isinstance(event, TokenEvent):
                            yield StreamResponse(token=event)
                        else:
                            yield StreamResponse(end=event)

    async def Cancel(self, request: DecodeCancelRequest, context: Context) -> DecodeCancelResponse:
        """End a request; its pages and slot are free when this returns. Unknown ids are a counted no-op.

        One that has ended is known for a while: the gateway frees every request, also those.
        """
        async with self._answering(context):
            found = self.table.get(request.request_id)
            if found is None or found.log.ended:
                self.counters["unknown_requests"] += found is None
                return DecodeCancelResponse(found=False)
            await self.cancel(found, "cancelled by the caller")
            return DecodeCancelResponse(found=True)

    async def cancel(self, request: DecodeRequest, detail: str) -> None:
        """End a live request, in whichever phase it is."""
        self.counters["requests_cancelled"] += 1
        request.stop_handoff(Cancelled(detail))
        if request.in_engine:
            await self.engine.cancel(request.request_id, detail)
        await request.freed.wait()

    async def let_go(self, request: DecodeRequest, end: StreamEnd | StageError) -> None:
        """Free a request that did not end by itself, whatever happens to the caller meanwhile."""
        if request.freed.is_set():
            return

        async def leave() -> None:
            await self.engine.discard(request.request_id)
            self._end(request, end)

        if request.in_engine:
            await asyncio.shield(self.background(leave()))
        else:
            self._end(request, end)

    def _end(self, request: DecodeRequest, end: StreamEnd | StageError) -> None:
        self.free(request)
        if request.log.finish(end):
            self.table.finished(request)

    def free(self, request: DecodeRequest) -> None:
        """Give back a request's pages and slot, once."""
        if request.freed.is_set():
            return
        request.freed.set()
        self.pages.release(request.pages)
        self.slots.release(request.slot)

    def _sink(self, events: Sequence[Event]) -> None:
        self._loop.call_soon_threadsafe(self.events.take, events)

    def _make_thread(self) -> EngineThread:
        return EngineThread("cedar-decode", self.config.threads, step=self._step, on_failure=self._on_failure)

    def _step(self) -> bool:
        return self.engine.step()

    def _on_failure(self, error: BaseException) -> None:
        """The engine's step failed (engine thread): all it ran is lost, and this worker is to be replaced."""
        self.engine.close()
        self._loop.call_soon_threadsafe(self._engine_failed, error)

    def _engine_failed(self, error: BaseException) -> None:
        self.on_bug(error)
        self._abandon(Unavailable(f"decode engine failed: {type(error).__name__}: {error}"))

    def _abandon(self, error: StageError) -> None:
        """Let go of every live request, none of which is in the engine; readers are told to try elsewhere."""
        for request in self.table.live():
            request.stop_handoff(error)
            if not request.freed.is_set() and (request.in_engine or not request.handing_over):
                self._end(request, error)

    def set_store(self, target: str | None) -> None:
        """The store moved, appeared, or (None) is gone."""
        self.store.connect(target)

    async def _break_off(self) -> None:
        if not self._opened:
            return
        await self.engine.shut()
        self._abandon(Unavailable("decode worker is stopping"))
        deadline = time.monotonic() + self.config.store_wait_s + 1.0
        while (
            len(self.table) and time.monotonic() < deadline
        ):  # some ended by themselves, and are being filed
            await asyncio.sleep(0.005)

    async def _close(self) -> None:
        if self._opened:
            await self.store.close()

    def active(self) -> int:
        """Live requests, and calls that are being answered."""
        return len(self.table) + self._calls

    def _describe(self, status: WorkerStatus) -> None:
        status.active = len(self.table)
        status.pages_total, status.slots_total = self.config.pages, self.config.slots
        if not self._opened:
            return
        status.pages_leased, status.pages_cached = self.pages.leased, self.pages.cached
        status.slots_leased = self.slots.leased
        status.fingerprint = self.memory.network.fingerprint
        status.page_tokens = self.memory.model.page_tokens
        status.page_bytes = self.memory.pages.page_bytes
        self.store.describe(status)
        status.counters["steps"] = self.engine.steps
        status.counters["largest_batch"] = self.engine.largest_batch
        if self.config.drafting:
            status.counters["draft_proposed"] = self.engine.draft_proposed
            status.counters["draft_accepted"] = self.engine.draft_accepted
        status.counters["page_evictions"] = self.pages.evictions

    def _check_books(self) -> None:
        if self._opened:
            self.pages.check_integrity()
            self.slots.check_integrity()

    def _service(self) -> str:
        return "Decode"

    async def _open(self, thread: EngineThread) -> None:
        config = self.config
        self.memory = await thread.call(
            lambda: NetworkMemory.load(
                config.checkpoint,
                stage="decode",
                device=config.device,
                page_tokens=config.page_tokens,
                pages=config.pages,
                slots=config.slots,
                drafting=config.drafting,
                network=self._given_network,
            )
        )
        await self._make_ready(thread)
        self.pages = PagePool(config.pages)
        self.slots = SlotPool(config.slots)
        self.events = EngineEvents(self)
        self.engine = DecodeEngine(
            self.memory,
            thread,
            self._sink,
            drafting=config.drafting,
            draft_confidence=config.draft_confidence,
        )
        self.store = StoreLink(config, self.memory, self.counters)
        self.store.connect(config.store)
        self.background(self._reap())
        self._opened = True

    async def _make_ready(self, thread: EngineThread) -> None:
        """Compile and capture, before anybody waits, what the first steps would have to. A call for each
        rung: how long one takes is what the thread is judged by.
        """
        network, kv = self.memory.network, self.memory.kv
        rungs = await thread.call(
            lambda: network.decode_ladder(kv, self.config.slots, self.config.prepare_tokens)
        )
        for number, (batch, tokens) in enumerate(rungs, 1):
            began = time.monotonic()
            await thread.call(partial(network.prepare_decode, kv, batch, tokens))
            _log.info(
                "decode worker %x: steps of %d sequences of up to %d tokens ready after %.1f s (%d of %d)",
                self.incarnation, batch, tokens, time.monotonic() - began, number, len(rungs),
            )  # fmt: skip

    async def _reap(self) -> None:
        """End requests that nobody reads, and forget logs that have been read."""
        while True:
            await asyncio.sleep(min(self.config.request_lease_s / 4, 1.0))
            for request in self.table.live():
                unread_s = 0.0 if request.handing_over or request.freed.is_set() else request.log.unread_s()
                if unread_s > self.config.request_lease_s:
                    self.counters["leases_expired"] += 1
                    await self.cancel(request, "nobody read the stream")
            self.table.expire()
