"""The Store service: its RPCs on the event loop, every access to the disk on reader threads or the writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Executor, Future
from contextlib import aclosing
from typing import Any, Final

import grpc
from cedar.kvstore.admission import Admission
from cedar.kvstore.call_guard import guarded, guarded_stream
from cedar.kvstore.config import NodeConfig
from cedar.kvstore.errors import InvalidRequest, NotHeld, NotInMemory, Refused, StoreClosed
from cedar.kvstore.frames import FRAME_BYTES, RecordAssembler
from cedar.kvstore.page_store import PageStore
from cedar.kvstore.page_wire import PagesFrame
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.stats import Counters
from cedar.kvstore.validation import (
    WindowPiece,
    expect_key,
    expect_known_fields,
    expect_tenant,
    items_of_frame,
    requested_keys,
    window_name,
    window_piece,
)
from cedar.kvstore.window_tier import WindowTier
from cedar.kvstore.window_wire import window_frames
from cedar.v1 import store_pb2

MAX_PAGES_A_FRAME: Final = 128
"""Small pages: so many are read and checked in less than a millisecond, which the event loop can spare."""
BLOCK_PAGES: Final = 8
"""Pages announced to the disk at once; while one block is read, the next is on its way."""
MAX_WINDOWS_LISTED: Final = 1024
_QUEUE_POLL_S: Final = 0.005
_INLINE_KEYS: Final = 1024

Context = grpc.aio.ServicerContext[Any, Any]


class StoreService:
    """RPC methods over the two tiers of one node."""

    def __init__(
        self,
        config: NodeConfig,
        ssd: PageStore,
        windows: WindowTier,
        readers: Executor,
        counters: Counters,
    ) -> None:
        self.counters = counters
        self._config = config
        self._ssd = ssd
        self._windows = windows
        self._readers = readers
        delay_s = config.retry_after_s
        self._matches = Admission("MatchPrefix", config.max_matches, delay_s)
        self._reads = Admission("GetPages", config.max_reads, delay_s)
        self._writes = Admission("PutPages", config.max_writes, delay_s)
        self._window_calls = Admission("window", config.max_window_calls, delay_s)

    @guarded
    async def MatchPrefix(self, request: store_pb2.MatchRequest, context: Context) -> store_pb2.MatchResponse:
        """Leading pages held, and the window records at them (and at the root), longest first."""
        expect_known_fields(request)
        root = expect_key("root_key", request.root_key)
        keys = requested_keys(request.page_keys, self._config) if request.page_keys else []
        tenant = expect_tenant(request.tenant)
        with self._matches.admit():
            if len(keys) <= _INLINE_KEYS:
                pages = self._ssd.match(keys, tenant)
            else:
                pages = await self._on_reader(self._ssd.match, keys, tenant)
        names = self._windows.names([root, *keys[:pages]], MAX_WINDOWS_LISTED)
        self.counters.add("store_match_requests")
        self.counters.add("store_match_keys", len(keys))
        self.counters.add("store_match_pages", pages)
        records = [
            store_pb2.WindowRecord(page_key=n.page_key, tokens=n.tokens, digest=n.digest) for n in names
        ]
        return store_pb2.MatchResponse(pages=pages, windows=records)

    @guarded_stream
    async def GetPages(self, request: store_pb2.GetPagesRequest, context: Context) -> AsyncIterator[bytes]:
        """Stored values in chain order, up to the first that is missing or damaged.

        The first page goes out alone and at once.
        """
        expect_known_fields(request)
        keys = requested_keys(request.page_keys, self._config)
        with self._reads.admit():
            async with aclosing(self._held_frames(keys, 0)) as frames:
                async for frame, _ in frames:
                    yield frame

    @guarded
    async def PutPages(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> store_pb2.PutPagesResponse:
        """Store the values of all frames; answers when the last of them is durable."""
        with self._writes.admit():
            fingerprint: bytes | None = None
            total = 0
            keys: list[bytes] = []
            answers: list[Future[PutCounts]] = []
            counts = PutCounts()
            async for message in request_iterator:
                items, fingerprint = items_of_frame(message, self._config, fingerprint)
                total += len(items)
                keys += [item.key for item in items]
                if total > self._config.max_keys:
                    raise InvalidRequest(
                        "page_keys", f"{total} keys", f"at most {self._config.max_keys} keys"
                    )
                answer = await self._submit(items)
                if answer is None:
                    counts.add(PutCounts(refused=len(items), reason="queue"))
                    self.counters.add("store_puts_refused", len(items))
                    self.counters.add("store_puts_refused_queue", len(items))
                else:
                    answers.append(answer)
            for answer in answers[-1:]:  # they come in order: to wait for the last is to wait for all
                await asyncio.wrap_future(answer)
            for answer in answers:
                counts.add(answer.result())
            if not counts.refused:
                self._stored(keys)
        return store_pb2.PutPagesResponse(
            stored=counts.stored, present=counts.present, conflicts=counts.conflicts, refused=counts.refused
        )

    @guarded
    async def PutWindow(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> store_pb2.PutWindowResponse:
        """Keep one window record, which may arrive in several frames."""
        promised_bytes = 0
        first: WindowPiece | None = None
        assembler: RecordAssembler | None = None
        with self._window_calls.admit():
            try:
                async for message in request_iterator:
                    piece = window_piece(message)
                    if first is None or assembler is None:
                        first = piece
                        limit_bytes = self._windows.config.max_record_bytes
                        assembler = RecordAssembler(
                            piece.total_bytes, piece.checksum, limit_bytes=limit_bytes
                        )
                        if not self._windows.promise(piece.total_bytes):
                            return store_pb2.PutWindowResponse(stored=False)
                        promised_bytes = piece.total_bytes
                    if not piece.continues(first):
                        raise InvalidRequest(
                            "name", piece.name.tokens, "all frames of a call name one record"
                        )
                    assembler.add(piece.offset, piece.piece)
                if first is None or assembler is None:
                    raise InvalidRequest("frames", 0, "at least one")
                record = assembler.finish()
                promised_bytes = 0
                self._windows.put(first.name, record, first.checksum, tenant=first.tenant)
            finally:
                if promised_bytes:
                    self._windows.retract(promised_bytes)
        return store_pb2.PutWindowResponse(stored=True)

    @guarded_stream
    async def GetWindow(self, request: store_pb2.GetWindowRequest, context: Context) -> AsyncIterator[bytes]:
        """The record, in frames; NOT_FOUND when it is gone."""
        expect_known_fields(request)
        name = window_name(request.page_key, request.tokens, request.digest)
        with self._window_calls.admit():
            held = self._windows.get(name, expect_tenant(request.tenant))
            if held is None:
                raise NotHeld("no such window record")
            record, checksum = held
            for frame in window_frames(name, record, checksum):
                yield frame

    @guarded
    async def Stats(self, request: store_pb2.StatsRequest, context: Context) -> store_pb2.StatsResponse:
        """Every counter and gauge."""
        expect_known_fields(request)
        gauges = await self._on_reader(self._ssd.stats)
        in_flight = {
            "store_matches_in_flight": float(self._matches.in_flight),
            "store_reads_in_flight": float(self._reads.in_flight),
            "store_writes_in_flight": float(self._writes.in_flight),
            "store_window_calls_in_flight": float(self._window_calls.in_flight),
        }
        values = self.counters.snapshot() | gauges | self._windows.stats() | in_flight | self._peer_stats()
        return store_pb2.StatsResponse(values=values)

    async def _held_frames(self, keys: list[bytes], start: int) -> AsyncGenerator[tuple[bytes, int], None]:
        """(frame, pages in it) of the pages held here from ``start`` on, up to the first that is not.

        What lies in memory is read and checked between two frames, on the event loop: that takes a tenth of
        the time of sending it, and less than a change of threads. Reader threads wait for the disk, which is
        told a block ahead what comes next.
        """
        position = start
        announced: int | None = None  # up to where, once it was found that the disk is needed
        while position < len(keys):
            most_bytes = FRAME_BYTES if position else 1  # the first page goes out alone and at once
            try:
                found = self._frame(keys, position, most_bytes, False)
            except NotInMemory:
                if announced is None:
                    announced = position + BLOCK_PAGES
                    await self._on_reader(self._ssd.announce, keys[position:announced])
                found = await self._on_reader(self._frame, keys, position, most_bytes, True)
            if found is None:
                return
            position += found[1]
            block = max(BLOCK_PAGES, found[1])
            if announced is not None and announced < min(position + block, len(keys)):
                begin, announced = max(announced, position), max(announced, position) + block
                self._on_reader(self._ssd.announce, keys[begin:announced]).add_done_callback(_forget)
            yield found

    def _frame(self, keys: list[bytes], start: int, max_bytes: int, wait: bool) -> tuple[bytes, int] | None:
        """The next frame of a GetPages, and how many pages it holds. NotInMemory unless it may ``wait``."""
        ahead = keys[start : start + MAX_PAGES_A_FRAME]
        frame = PagesFrame(ahead)
        run = self._ssd.read_into(ahead, max_bytes, frame.place, wait=wait)
        return None if run is None else (frame.message(run.count), run.count)

    def _stored(self, keys: list[bytes]) -> None:
        """Pages of a put are durable."""

    def _peer_stats(self) -> dict[str, float]:
        """Gauges of this node's part in a cluster."""
        return {}

    async def _submit(self, items: list[PutItem]) -> Future[PutCounts] | None:
        """Queue items, waiting a while for room; None when there was none."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.put_wait_s
        while True:
            try:
                return self._ssd.put(items)
            except Refused:
                if loop.time() >= give_up_s:
                    return None
                await asyncio.sleep(_QUEUE_POLL_S)

    def _on_reader(self, function: Any, *arguments: Any) -> asyncio.Future[Any]:
        try:
            return asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)
        except RuntimeError:
            raise StoreClosed("the store node is stopping") from None


def _forget(reading: asyncio.Future[Any]) -> None:
    """A read whose caller has gone: its result is dropped, its error is nobody's."""
    if not reading.cancelled():
        reading.exception()
