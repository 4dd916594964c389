"""The Decode stage's gRPC service: handoffs in, tokens out.

A request's memory is a lease: bound to its handoff's stream until the handoff is done, then to somebody
reading its tokens. Every way out ends in ``_free``, once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from cedar.actors.config import DecodeConfig
from cedar.actors.decode_engine import DecodeEngine, Ended, Event, PageSealed, TokenOut
from cedar.actors.decode_handoff import receive_handoff
from cedar.actors.decode_requests import DecodeRequest, RequestTable
from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import Cancelled, NotFound, StageError, Unavailable
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.pool import PagePool, SlotPool
from cedar.actors.status import Context
from cedar.actors.store_link import StoreLink
from cedar.actors.worker import StageWorker
from cedar.kvstore.header import FLAG_AFTER_REPLAY, seal_value
from cedar.kvstore.keys import image_parts, page_key
from cedar.kvstore.window_match import window_digest
from cedar.v1.common_pb2 import FinishReason, TokenEvent
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

    # ---- RPCs

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
        """End a request; its pages and slot are free when this returns. Unknown ids are a counted no-op."""
        async with self._answering(context):
            found = self.table.get(request.request_id)
            if found is None or found.log.ended:
                self.counters["unknown_requests"] += 1
                return DecodeCancelResponse(found=False)
            await self.cancel(found, "cancelled by the caller")
            return DecodeCancelResponse(found=True)

    # ---- what handoffs and RPCs use

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
            self._ended(request, end)

        if request.in_engine:
            await asyncio.shield(self._background(leave()))
        else:
            self._ended(request, end)

    def _ended(self, request: DecodeRequest, end: StreamEnd | StageError) -> None:
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

    def page_flags(self, request: DecodeRequest) -> int:
        """Header flags of pages that this request seals."""
        return FLAG_AFTER_REPLAY if request.after_replay else 0

    # ---- events of the engine, on the loop's thread

    def _sink(self, events: Sequence[Event]) -> None:
        self._loop.call_soon_threadsafe(self._on_events, events)

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            request = self.table.get(event.request_id)
            if request is None or request.freed.is_set():
                self.counters["late_events"] += 1
                continue
            try:
                if isinstance(event, TokenOut):
                    self.counters["tokens"] += 1
                    request.log.append(event.token)
                elif isinstance(event, PageSealed):
                    self._on_sealed(request, event)
                else:
                    self._on_ended(request, event)
            except Exception as error:
                self.on_bug(error)

    def _on_sealed(self, request: DecodeRequest, event: PageSealed) -> None:
        page_tokens = self.memory.model.page_tokens
        if event.page != len(request.keys):
            raise StageError(f"page {event.page} sealed after {len(request.keys)} pages")
        start = event.page * page_tokens
        parent = request.keys[-1] if request.keys else request.root
        key = page_key(parent, event.ids, image_parts(request.images, start, start + page_tokens))
        request.keys.append(key)
        request.pages_sealed += 1
        self.pages.seal(request.pages[event.page], key)
        if self.store.connected:
            value = seal_value(
                event.payload,
                fingerprint=self.memory.network.fingerprint,
                page_key=key,
                tokens=page_tokens,
                flags=self.page_flags(request),
            )
            self.store.writer.put_page(event.page, key, value, request.receipt)

    def _on_ended(self, request: DecodeRequest, event: Ended) -> None:
        self.free(request)
        self.finish(request, event.reason, event.detail, event.ids, event.length, event.record)

    def finish(
        self,
        request: DecodeRequest,
        reason: FinishReason,
        detail: str,
        ids: Sequence[int],
        length: int,
        record: bytes | None,
    ) -> None:
        """File the window state of a request whose memory is free, and end its log once that is answered."""
        if record is not None and self.store.connected:
            parent, digest = window_digest(
                request.root, request.keys, ids, request.images, self.memory.model.page_tokens, length
            )
            self.store.writer.put_window(parent, length, digest, record, request.receipt)
        self.counters[f"ended_{FinishReason.Name(reason).removeprefix('FINISH_REASON_').lower()}"] += 1
        seconds = self._clock() - request.begun
        self._background(self._end(request, reason, detail, seconds))

    async def _end(self, request: DecodeRequest, reason: FinishReason, detail: str, seconds: float) -> None:
        waits = reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)
        await request.receipt.wait(self.config.store_wait_s if waits else 0.0)
        end = StreamEnd(
            reason=reason,
            tokens=request.log.next_index,
            pages_sealed=request.pages_sealed,
            pages_stored=request.receipt.stored,
            decode_s=seconds,
            state_stored=request.receipt.window_stored,
            detail=detail,
        )
        if request.log.finish(end):
            self.table.finished(request)

    # ---- life

    def _make_thread(self) -> EngineThread:
        return EngineThread("cedar-decode", self.config.threads, step=self._step, on_failure=self._on_failure)

    def _step(self) -> bool:
        return self.engine.step()

    def _on_failure(self, error: BaseException) -> None:
        """The engine's step failed (engine thread): all it ran is lost, and this worker is to be replaced."""
        self.engine.clear()
        self._loop.call_soon_threadsafe(self._engine_failed, error)

    def _engine_failed(self, error: BaseException) -> None:
        self.on_bug(error)
        self._abandon(Unavailable(f"decode engine failed: {type(error).__name__}: {error}"))

    def _abandon(self, error: StageError) -> None:
        """Let go of every live request, none of which is in the engine; readers are told to try elsewhere."""
        for request in self.table.live():
            request.stop_handoff(error)
            if not request.handing_over:
                self._ended(request, error)

    def set_store(self, address: str | None) -> None:
        """The store moved, appeared, or (None) is gone."""
        self.store.connect(address)

    async def _break_off(self) -> None:
        if not self._opened:
            return
        await self.engine.drop_all()
        self._abandon(Unavailable("decode worker is stopping"))

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
        self.pages.check_integrity()
        self.slots.check_integrity()
        status.pages_leased, status.pages_cached = self.pages.leased, self.pages.cached
        status.slots_leased = self.slots.leased
        status.fingerprint = self.memory.network.fingerprint
        status.page_tokens = self.memory.model.page_tokens
        status.page_bytes = self.memory.pages.page_bytes
        self.store.describe(status)
        status.counters["steps"] = self.engine.steps
        status.counters["largest_batch"] = self.engine.largest_batch
        status.counters["page_evictions"] = self.pages.evictions

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
                network=self._given_network,
            )
        )
        self.pages = PagePool(config.pages)
        self.slots = SlotPool(config.slots)
        self.engine = DecodeEngine(self.memory, thread, self._sink)
        self.store = StoreLink(config, self.memory, self.counters)
        self.store.connect(config.store)
        self._background(self._reap())
        self._opened = True

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
