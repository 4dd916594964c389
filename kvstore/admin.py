"""The StoreAdmin service: what a node holds, whether it is sound, a copy of it; and that it hands over.

Nothing here is a use of a page.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from cedar.kvstore.admission import Admission
from cedar.kvstore.call_guard import guarded, guarded_stream
from cedar.kvstore.cluster_part import ClusterPart
from cedar.kvstore.config import NodeConfig
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.frames import FRAME_BYTES, FrameKind, encode_frame
from cedar.kvstore.page_store import PageStore
from cedar.kvstore.rows import MAX_TENANT_BYTES
from cedar.kvstore.service import MAX_WINDOWS_LISTED
from cedar.kvstore.stats import Counters
from cedar.kvstore.validation import expect_key, expect_known_fields, requested_keys
from cedar.kvstore.window_tier import WindowTier
from cedar.v1 import admin_pb2 as pb

ADMIN_SERVICE: Final = pb.DESCRIPTOR.services_by_name["StoreAdmin"]
MAX_CALLS: Final = 4
MAX_DRAIN_S: Final = 24 * 3600.0
CHECKED_AT_ONCE: Final = 16
_LATELY_S: Final = 3600.0
_PROGRESS_S: Final = 0.25

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class AdminService:
    """RPC methods over the two tiers of one node, which is one of several as ``part`` says."""

    def __init__(
        self,
        config: NodeConfig,
        ssd: PageStore,
        windows: WindowTier,
        readers: Executor,
        counters: Counters,
        part: ClusterPart,
    ) -> None:
        self.counters = counters
        self._config = config
        self._ssd = ssd
        self._windows = windows
        self._readers = readers
        self._node_id = part.node_id
        self._part = part
        self._calls = Admission("StoreAdmin", MAX_CALLS, config.retry_after_s)

    @guarded
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Page by page: held, expired, damaged or never seen."""
        expect_known_fields(request)
        root = expect_key("root_key", request.root_key)
        keys = requested_keys(request.page_keys, self._config) if request.page_keys else []
        with self._calls.admit():
            pages = await self._on_reader(lambda: [self._page(key) for key in keys])
        response = pb.ExplainResponse(node_id=self._node_id, pages=pages)
        for name in self._windows.names([root, *keys], MAX_WINDOWS_LISTED):
            found = self._windows.describe(name)
            if found is not None:
                state = pb.WindowState(page_key=name.page_key, tokens=name.tokens, digest=name.digest)
                state.size, state.ttl_left_s = found
                response.windows.append(state)
        return response

    @guarded
    async def Top(self, request: pb.TopRequest, context: Context) -> pb.TopResponse:
        """Who holds how much."""
        expect_known_fields(request)
        with self._calls.admit():
            tenants = await self._on_reader(self._tenants)
        directory = str(self._config.ssd.directory.absolute())
        return pb.TopResponse(node_id=self._node_id, tenants=tenants, directory=directory)

    @guarded_stream
    async def Check(self, request: pb.CheckRequest, context: Context) -> AsyncIterator[pb.CheckProgress]:
        """Verify or scrub, a few pages at a time, within the rate asked for."""
        expect_known_fields(request)
        tenant = _expect_tenant(request.tenant)
        if not 0 <= request.sample <= 1:
            raise InvalidRequest("sample", request.sample, "0 to 1")
        if not request.bytes_per_s >= 0:
            raise InvalidRequest("bytes_per_s", request.bytes_per_s, "0 or more")
        loop = asyncio.get_running_loop()
        with self._calls.admit():
            keys = await self._on_reader(lambda: self._ssd.keys_held(tenant=tenant))
            if request.sample:
                count = min(max(round(request.sample * len(keys)), 1), len(keys))
                keys = random.sample(keys, count)
            told = pb.CheckProgress(node_id=self._node_id, total=len(keys))
            began_s = told_s = loop.time()
            for start in range(0, len(keys), CHECKED_AT_ONCE):
                portion = keys[start : start + CHECKED_AT_ONCE]
                size, bad = await self._on_reader(partial(self._check, portion, request.scrub))
                told.pages += len(portion)
                told.bytes += size
                told.bad.extend(bad)
                if loop.time() - told_s >= _PROGRESS_S:
                    told_s = loop.time()
                    yield told
                    del told.bad[:]
                if request.bytes_per_s:
                    ahead_s = told.bytes / request.bytes_per_s - (loop.time() - began_s)
                    if ahead_s > 0:
                        await asyncio.sleep(ahead_s)
            told.done = True
            yield told

    @guarded_stream
    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[pb.DrainProgress]:
        """Hand over, and say how far it is. The node stays draining, though who asked may leave."""
        expect_known_fields(request)
        if not 0 < request.timeout_s <= MAX_DRAIN_S:
            raise InvalidRequest("timeout_s", request.timeout_s, f"above 0, at most {MAX_DRAIN_S:g}")
        part = self._part
        others = [m for m in part.feed.current.members if m.state == "active" and m.node_id != part.node_id]
        if not part.listed or not others:
            raise InvalidRequest("node", self._node_id, "no other node of a membership service takes over")
        with self._calls.admit():
            draining = asyncio.ensure_future(part.drain(request.timeout_s))
            try:
                while not draining.done():
                    yield pb.DrainProgress(
                        node_id=self._node_id,
                        nodes_unsettled=part.unsettled,
                        copies_waiting=part.replication.waiting,
                    )
                    await asyncio.wait([draining], timeout=_PROGRESS_S)
                handed_over = draining.result()
                if handed_over:
                    await part.leave()
                yield pb.DrainProgress(node_id=self._node_id, done=True, handed_over=handed_over)
            finally:
                draining.cancel()

    @guarded_stream
    async def Export(self, request: pb.ExportRequest, context: Context) -> AsyncIterator[bytes]:
        """Verified values, chain heads first; a page that has gone meanwhile, or is damaged, is left out."""
        expect_known_fields(request)
        tenant = _expect_tenant(request.tenant)
        with self._calls.admit():
            if request.page_keys:
                keys = requested_keys(request.page_keys, self._config)
            else:
                keys = await self._on_reader(
                    lambda: self._ssd.keys_held(tenant=tenant, segment=request.segment)
                )
            position = 0
            while position < len(keys) or position == 0:
                frame, position = await self._on_reader(
                    partial(self._export_frame, keys, position, tenant, request.segment)
                )
                yield frame
                if position >= len(keys):
                    return

    def _page(self, key: bytes) -> pb.PageState:
        page = self._ssd.describe(key)
        if page is None:
            return pb.PageState(damaged=self._ssd.lost(key))
        return pb.PageState(
            held=page.ttl_left_s > 0,
            expired=page.ttl_left_s <= 0,
            size=page.size,
            page_index=page.page_index,
            tenant=page.tenant,
            age_s=page.age_s,
            idle_s=page.idle_s,
            ttl_left_s=page.ttl_left_s,
            segment=page.segment,
        )

    def _tenants(self) -> list[pb.TenantUse]:
        uses: dict[bytes, pb.TenantUse] = {}
        for key in self._ssd.keys_held():
            page = self._ssd.describe(key)
            if page is None:
                continue
            use = uses.get(page.tenant)
            if use is None:
                quota = self._ssd.tenants.quota_bytes(page.tenant)
                use = uses[page.tenant] = pb.TenantUse(
                    tenant=page.tenant,
                    idle_s=page.idle_s,
                    ttl_s=self._ssd.tenants.ttl_s(page.tenant),
                    quota_bytes=0.0 if quota == float("inf") else quota,
                )
            use.pages += 1
            use.bytes += page.size
            use.used_lately += page.idle_s <= _LATELY_S
            use.oldest_s = max(use.oldest_s, page.age_s)
            use.idle_s = min(use.idle_s, page.idle_s)
        return sorted(uses.values(), key=lambda use: -use.bytes)

    def _check(self, keys: Sequence[bytes], scrub: bool) -> tuple[int, list[pb.BadPage]]:
        size = 0
        bad = []
        for key in keys:
            page = self._ssd.describe(key)
            reason = self._ssd.why_unsound(key)
            size += page.size if page is not None else 0
            if reason and reason != "gone":
                bad.append(pb.BadPage(page_key=key, reason=reason))
                if scrub:
                    self._ssd.get(key)  # finds the same, and quarantines it
        return size, bad

    def _export_frame(
        self, keys: Sequence[bytes], start: int, tenant: bytes, segment: int
    ) -> tuple[bytes, int]:
        """The next frame, and the place of the first key after it."""
        meta = pb.ExportMeta(total=len(keys))
        values: list[bytes] = []
        size = 0
        position = start
        while position < len(keys) and size < FRAME_BYTES:
            key = keys[position]
            position += 1
            page = self._ssd.describe(key)
            if page is None or tenant not in (b"", page.tenant) or segment not in (0, page.segment):
                continue
            value = self._ssd.get(key)
            if value is None:
                continue
            meta.pages.add(
                page_key=key,
                size=len(value),
                page_index=page.page_index,
                tenant=page.tenant,
                age_s=page.idle_s,
            )
            values.append(value)
            size += len(value)
        return encode_frame(FrameKind.EXPORT, meta, *values), position

    async def _on_reader(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)


def _expect_tenant(tenant: bytes) -> bytes:
    if len(tenant) > MAX_TENANT_BYTES:
        raise InvalidRequest("tenant", f"{len(tenant)} bytes", f"at most {MAX_TENANT_BYTES} bytes")
    return tenant
