"""The StorePeer service: what a node does for other nodes, from its own tiers alone, and purges."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final

from cedar.kvstore.admission import Admission
from cedar.kvstore.call_guard import guarded, guarded_stream
from cedar.kvstore.cluster_part import ClusterPart
from cedar.kvstore.epochs import expect_epoch
from cedar.kvstore.errors import InvalidRequest, NotHeld
from cedar.kvstore.header import read_header
from cedar.kvstore.peers import copied_pages
from cedar.kvstore.rows import MAX_TENANT_BYTES
from cedar.kvstore.service import MAX_WINDOWS_LISTED, Context, StoreService
from cedar.kvstore.validation import (
    expect_fingerprint,
    expect_key,
    expect_known_fields,
    requested_keys,
    window_name,
)
from cedar.kvstore.window_tier import WindowTier
from cedar.kvstore.window_wire import window_frames
from cedar.v1 import store_pb2
from cedar.v1 import store_peer_pb2 as pb

LISTED_AT_ONCE: Final = 2048


class StorePeerService:
    """RPC methods for peers. ``store``: the node's Store service, whose tiers and limits it shares."""

    def __init__(self, part: ClusterPart, store: StoreService, windows: WindowTier) -> None:
        self.counters = store.counters
        self._part = part
        self._store = store
        self._windows = windows
        self._config = part.node_config
        self._calls = Admission("peer", self._config.max_reads, self._config.retry_after_s)

    @guarded
    async def HeldPages(self, request: pb.HeldRequest, context: Context) -> pb.HeldResponse:
        """Which pages are here."""
        await self._expect_epoch(context)
        expect_known_fields(request)
        keys = requested_keys(request.page_keys, self._config)
        root = [expect_key("root_key", request.root_key)] if request.root_key else []
        held = await self._part.on_reader(self._part.ssd.held, keys)
        here = [key for key, is_here in zip(keys, held, strict=True) if is_here]
        names = self._windows.names([*root, *here], MAX_WINDOWS_LISTED)
        return pb.HeldResponse(
            held=bytes(held),
            windows=[
                store_pb2.WindowRecord(page_key=n.page_key, tokens=n.tokens, digest=n.digest) for n in names
            ],
        )

    @guarded_stream
    async def FetchPages(self, request: store_pb2.GetPagesRequest, context: Context) -> AsyncIterator[bytes]:
        """Leading pages that are here, with what is known of them."""
        await self._expect_epoch(context)
        expect_known_fields(request)
        keys = requested_keys(request.page_keys, self._config)
        with self._calls.admit():
            position = 0
            while position < len(keys):
                found = await self._part.on_reader(self._part.frame_for_peer, keys[position:])
                if found is None:
                    return
                frame, count = found
                position += count
                self.counters.add("store_pages_sent_to_peers", count)
                yield frame

    @guarded
    async def CopyPages(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> store_pb2.PutPagesResponse:
        """Keep pages that a peer has."""
        await self._expect_epoch(context)
        response = store_pb2.PutPagesResponse()
        with self._calls.admit():
            async for message in request_iterator:
                pages = copied_pages(message)
                if len(pages[0].value) > self._config.max_value_bytes:
                    raise InvalidRequest(
                        "value_bytes", len(pages[0].value), f"at most {self._config.max_value_bytes}"
                    )
                for page in pages:
                    expect_fingerprint(read_header(page.value).fingerprint, self._config.fingerprints)
                counts = await self._part.keep(pages)
                kept = counts.stored + counts.present + counts.conflicts
                response.stored += kept
                response.refused += len(pages) - kept
        return response

    @guarded_stream
    async def ListPages(
        self, request: pb.ListPagesRequest, context: Context
    ) -> AsyncIterator[pb.ListedPages]:
        """Pages here that belong to the asking node."""
        await self._expect_epoch(context)
        expect_known_fields(request)
        members = self._part.feed.current
        if request.epoch != members.epoch:
            raise InvalidRequest("epoch", request.epoch, f"this node knows {members.epoch}")
        portions: Iterator[list[bytes]] = self._part.pages_of(request.node_id, members, LISTED_AT_ONCE)
        while (portion := await self._part.on_reader(next, portions, None)) is not None:
            if portion:
                yield pb.ListedPages(page_keys=b"".join(portion))

    @guarded_stream
    async def FetchWindow(
        self, request: store_pb2.GetWindowRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """A window record that is here; its tenant is told with it."""
        await self._expect_epoch(context)
        expect_known_fields(request)
        name = window_name(request.page_key, request.tokens, request.digest)
        held = self._windows.get(name)
        if held is None:
            raise NotHeld("no such window record")
        record, checksum = held
        tenant = self._windows.tenant_of(name)
        purges = self._part.purges.carried_out(tenant)
        for frame in window_frames(name, record, checksum, tenant=tenant, purges=purges):
            yield frame

    @guarded
    async def Purge(self, request: pb.PurgeRequest, context: Context) -> pb.PurgeResponse:
        """Forget a tenant; answers when nothing of it is left here."""
        expect_known_fields(request)
        if not 0 < len(request.tenant) <= MAX_TENANT_BYTES:
            raise InvalidRequest("tenant", f"{len(request.tenant)} bytes", f"1 to {MAX_TENANT_BYTES} bytes")
        if not request.purge_id:
            raise InvalidRequest("purge_id", request.purge_id, "the name of the order")
        pages, size, windows = await self._part.purging.purge(request.tenant, request.purge_id)
        return pb.PurgeResponse(pages=pages, bytes=size, windows=windows)

    @guarded
    async def ExchangePurges(self, request: pb.Purges, context: Context) -> pb.Purges:
        """Learn the peer's purges, carry out those that are new, and tell one's own."""
        expect_known_fields(request)
        await self._part.purging.learn(request)
        return self._part.purges.to_proto()

    async def _expect_epoch(self, context: Context) -> None:
        await expect_epoch(context, self._part.node_id, self._part.feed)
