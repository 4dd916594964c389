"""What the decode engine reports, taken into the books on the loop's thread: tokens, sealed pages, ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cedar.actors.decode_engine import Ended, Event, PageSealed, TokenOut
from cedar.actors.decode_requests import DecodeRequest
from cedar.actors.errors import BooksError
from cedar.kvstore.header import FLAG_AFTER_REPLAY, seal_value
from cedar.kvstore.keys import image_parts, page_key
from cedar.kvstore.window_match import window_digest
from cedar.v1.common_pb2 import FinishReason
from cedar.v1.stages_pb2 import StreamEnd

if TYPE_CHECKING:
    from cedar.actors.decode_worker import DecodeWorker


class EngineEvents:
    """Applies the engine's events to one worker's requests, in order."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    def take(self, events: Sequence[Event]) -> None:
        """The events of one step. Those of a request that is free already are counted, and nothing else."""
        for event in events:
            request = self._worker.table.get(event.request_id)
            if request is None or request.freed.is_set():
                self._worker.counters["late_events"] += 1
                continue
            try:
                if isinstance(event, TokenOut):
                    self._worker.counters["tokens"] += 1
                    request.log.append(event.token)
                elif isinstance(event, PageSealed):
                    self._sealed(request, event)
                else:
                    self._worker.free(request)
                    self.ended(request, event)
            except Exception as error:
                self._worker.on_bug(error)

    def ended(self, request: DecodeRequest, event: Ended) -> None:
        """File the window state of a request whose memory is free; end its log once that is answered."""
        worker = self._worker
        if event.record is not None and worker.store.connected:
            page_tokens = worker.memory.model.page_tokens
            parent, digest = window_digest(
                request.root, request.keys, event.ids, request.images, page_tokens, event.length
            )
            worker.store.writer.put_window(parent, event.length, digest, event.record, request.receipt)
        name = FinishReason.Name(event.reason).removeprefix("FINISH_REASON_").lower()
        worker.counters[f"ended_{name}"] += 1
        worker.background(self._end(request, event, worker.table.clock() - request.begun))

    def _sealed(self, request: DecodeRequest, event: PageSealed) -> None:
        worker = self._worker
        page_tokens = worker.memory.model.page_tokens
        if event.page != len(request.keys):
            raise BooksError(f"page {event.page} sealed after {len(request.keys)} pages")
        start = event.page * page_tokens
        parent = request.keys[-1] if request.keys else request.root
        key = page_key(parent, event.ids, image_parts(request.images, start, start + page_tokens))
        request.keys.append(key)
        request.pages_sealed += 1
        if request.after_replay and not worker.config.share_replayed_pages:
            return
        worker.pages.seal(request.pages[event.page], key)
        if worker.store.connected:
            value = seal_value(
                event.payload,
                fingerprint=worker.memory.network.fingerprint,
                page_key=key,
                tokens=page_tokens,
                flags=FLAG_AFTER_REPLAY if request.after_replay else 0,
            )
            worker.store.writer.put_page(event.page, key, value, request.receipt)

    async def _end(self, request: DecodeRequest, event: Ended, seconds: float) -> None:
        waits = event.reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)
        await request.receipt.wait(self._worker.config.store_wait_s if waits else 0.0)
        end = StreamEnd(
            reason=event.reason,
            tokens=request.log.next_index,
            pages_sealed=request.pages_sealed,
            pages_stored=request.receipt.stored,
            decode_s=seconds,
            state_stored=request.receipt.window_stored,
            detail=event.detail,
        )
        if request.log.finish(end):
            self._worker.table.finished(request)
