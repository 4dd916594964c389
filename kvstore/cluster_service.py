"""The Store service of a node that has peers: the epoch is checked, and what belongs here is looked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from cedar.kvstore.call_guard import guarded, guarded_stream
from cedar.kvstore.cluster_part import ClusterPart
from cedar.kvstore.epochs import expect_epoch
from cedar.kvstore.errors import NotHeld
from cedar.kvstore.frames import FrameKind, encode_frame
from cedar.kvstore.keys import KEY_BYTES, split_keys
from cedar.kvstore.node_client import COPIED, short_name
from cedar.kvstore.placement import run_of
from cedar.kvstore.service import MAX_WINDOWS_LISTED, Context, StoreService
from cedar.kvstore.validation import (
    expect_key,
    expect_known_fields,
    expect_tenant,
    requested_keys,
    window_name,
)
from cedar.kvstore.window_wire import window_frames
from cedar.v1 import store_pb2

RUNS_TOLD: Final = 64


class ClusterStoreService(StoreService):
    """RPC methods over one node's tiers and, for pages that have not moved here yet, its peers."""

    def __init__(self, part: ClusterPart, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._part = part

    def _peer_stats(self) -> dict[str, float]:
        """Gauges of the copies that wait."""
        return self._part.replication.stats()

    @guarded
    async def MatchPrefix(self, request: store_pb2.MatchRequest, context: Context) -> store_pb2.MatchResponse:
        """As on one node; pages that peers still hold for this one count too."""
        await expect_epoch(context, self._part.node_id, self._part.feed)
        response: store_pb2.MatchResponse = await super().MatchPrefix(request, context)
        wanted = request.page_keys[response.pages * KEY_BYTES :]
        if not wanted or not self._part.read_through.sources(wanted[:KEY_BYTES]):
            return response
        rest = split_keys(wanted)
        own = await self._on_reader(self._ssd.held, rest)
        more, windows = await self._part.read_through.held(request.root_key, rest, own)
        at = set(rest[:more])
        known = {(w.page_key, w.tokens, w.digest) for w in response.windows}
        known |= {name for name in windows if name.page_key in at}
        known |= set(self._windows.names(rest[:more], MAX_WINDOWS_LISTED))
        records = [
            store_pb2.WindowRecord(page_key=key, tokens=tokens, digest=digest)
            for key, tokens, digest in sorted(known, key=lambda name: (-name[1], name))[:MAX_WINDOWS_LISTED]
        ]
        return store_pb2.MatchResponse(pages=response.pages + more, windows=records)

    @guarded_stream
    async def GetPages(self, request: store_pb2.GetPagesRequest, context: Context) -> AsyncIterator[bytes]:
        """As on one node; a page that is still at a peer is fetched, sent on, and kept."""
        await expect_epoch(context, self._part.node_id, self._part.feed)
        expect_known_fields(request)
        keys = requested_keys(request.page_keys, self._config)
        replication = self._part.replication
        copied = " ".join(short_name(key) for key in replication.last_copied(keys)[:RUNS_TOLD])
        await context.send_initial_metadata(((COPIED, copied),) if copied else ())
        with self._reads.admit():
            position = 0
            try:
                while position < len(keys):
                    before = position
                    for source in (self._held_frames, self._from_peers):
                        async with aclosing(source(keys, position)) as frames:
                            async for frame, count in frames:
                                position += count
                                yield frame
                        if position == len(keys):
                            return
                    if position == before:
                        return
            finally:
                replication.hit(keys[:position])

    @guarded
    async def PutPages(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> store_pb2.PutPagesResponse:
        """As on one node."""
        await expect_epoch(context, self._part.node_id, self._part.feed)
        response: store_pb2.PutPagesResponse = await super().PutPages(request_iterator, context)
        return response

    @guarded
    async def PutWindow(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> store_pb2.PutWindowResponse:
        """As on one node."""
        await expect_epoch(context, self._part.node_id, self._part.feed)
        response: store_pb2.PutWindowResponse = await super().PutWindow(request_iterator, context)
        return response

    @guarded_stream
    async def GetWindow(self, request: store_pb2.GetWindowRequest, context: Context) -> AsyncIterator[bytes]:
        """As on one node; a record that an earlier owner of its page holds is sent on."""
        await expect_epoch(context, self._part.node_id, self._part.feed)
        expect_known_fields(request)
        name = window_name(request.page_key, request.tokens, request.digest)
        with self._window_calls.admit():
            held = self._windows.get(name, expect_tenant(request.tenant))
            if held is None:
                held = await self._part.window_from_peers(name)
            if held is None:
                raise NotHeld("no such window record")
            record, checksum = held
            for frame in window_frames(name, record, checksum):
                yield frame

    def _stored(self, keys: list[bytes]) -> None:
        self._part.replication.stored(keys)

    async def _from_peers(self, keys: list[bytes], position: int) -> AsyncGenerator[tuple[bytes, int], None]:
        """Frames of the pages from ``position`` on that peers hold, to the end of their run at most.

        A page may have been stored since it was looked for here, by another call that fetched it.
        """
        if self._ssd.held([keys[position]])[0]:
            arrived = position
            async with aclosing(self._held_frames(keys, position)) as frames:
                async for frame, count in frames:
                    arrived += count
                    yield frame, count
            if arrived > position:
                return
        tag = run_of(expect_key("page_key", keys[position]))
        end = position
        while end < len(keys) and run_of(keys[end]) == tag:
            end += 1
        for page in await self._part.read_through.fetch(keys[position:end]):
            meta = store_pb2.StoredMeta(page_keys=page.key, value_bytes=len(page.value))
            yield encode_frame(FrameKind.PAGES, meta, page.value), 1
