"""One node of a cluster as its clients see it: a StoreClient whose requests carry the member list's epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc
from cedar.kvstore.client import Match, StoreClient, status_lost
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.epochs import Metadata, enclosed_list
from cedar.kvstore.keys import KEY_BYTES
from cedar.kvstore.members import MemberList
from cedar.kvstore.put import PutCounts
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.transport import Transport

COPIED: Final = "cedar-copied"
"""Initial metadata of a GetPages answer: of runs among those asked for, the last page that has a copy."""


def short_name(key: bytes) -> str:
    """Enough of a key to know it again."""
    return key[:12].hex()


class NodeClient(StoreClient):
    """Client of the member ``node_id`` at ``address``.

    ``metadata``: what to send with each request. ``on_list``: told of a newer list. ``on_copied``: told of
    pages that a second node holds too, with all before them in their run (``short_name``).
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: bytes | None,
        config: ClientConfig,
        metadata: Callable[[], Metadata],
        on_list: Callable[[MemberList], object],
        on_copied: Callable[[str], None],
        transport: Transport | None = None,
    ) -> None:
        super().__init__(address, fingerprint=fingerprint, config=config, transport=transport)
        self._metadata = metadata
        self._on_list = on_list
        self._on_copied = on_copied
        self._listening: set[asyncio.Task[None]] = set()
        self._statuses_lost = 0
        self.failures = 0
        self.reads_in_flight = 0

    @property
    def resting(self) -> bool:
        """Whether it has failed lately, so that calls to it are skipped."""
        return not self._breaker.allows(asyncio.get_running_loop().time())

    async def try_match(self, root: bytes, keys: Sequence[bytes], tenant: bytes = b"") -> Match | None:
        """As ``match``; None when there was no answer."""
        failures = self.failures
        match = await self.match(root, keys, tenant=tenant)
        return None if self.failures != failures and not match.pages else match

    async def read(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[int, memoryview], None]:
        """As ``get_pages``, counted as a read in flight."""
        self.reads_in_flight += 1
        try:
            async with aclosing(self.get_pages(keys)) as values:
                async for found in values:
                    yield found
        finally:
            self.reads_in_flight -= 1

    async def put_pages(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int = 0, tenant: bytes = b""
    ) -> PutCounts:
        """As of a StoreClient; a refusal for an old list is heard in any case."""
        lost = self._statuses_lost
        counts = await super().put_pages(keys, values, first_page=first_page, tenant=tenant)
        await self._ask_why(lost)
        return counts

    async def put_window(
        self, page_key: bytes, tokens: int, digest: bytes, record: bytes, *, tenant: bytes = b""
    ) -> bool:
        """As of a StoreClient; a refusal for an old list is heard in any case."""
        lost = self._statuses_lost
        stored = await super().put_window(page_key, tokens, digest, record, tenant=tenant)
        await self._ask_why(lost)
        return stored

    async def close(self) -> None:
        """As of a StoreClient."""
        await super().close()
        for task in list(self._listening):
            task.cancel()
        if self._listening:
            await asyncio.wait(list(self._listening))

    def _may_call(self) -> bool:
        allowed = super()._may_call()
        if not allowed:
            self.failures += 1
        return allowed

    def _connected(self) -> Any:
        return _Labelled(super()._connected(), self)

    def _failed(self, what: str, error: Exception) -> None:
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        if code != grpc.StatusCode.NOT_FOUND:
            self.failures += 1
        if status_lost(error):
            self._statuses_lost += 1
        if isinstance(error, grpc.aio.AioRpcError) and code == grpc.StatusCode.FAILED_PRECONDITION:
            self.counters["store_epoch_refused"] += 1
            newer = enclosed_list(error.trailing_metadata())
            if newer is not None:
                self._on_list(newer)
            return
        super()._failed(what, error)

    async def _ask_why(self, lost_before: int) -> None:
        """Ask something small if an upload's status was lost: if the list is old, that is refused too."""
        if self._statuses_lost != lost_before:
            await self.match(bytes(KEY_BYTES), [])

    def _listen(self, call: Any) -> None:
        """Hear which pages of this answer a second node holds."""

        async def hear() -> None:
            try:
                for name, value in await call.initial_metadata() or ():
                    if name == COPIED:
                        for page in str(value).split():
                            self._on_copied(page)
            except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError):
                return

        task = asyncio.get_running_loop().create_task(hear())
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)


class _Labelled:
    """A stub whose calls carry the metadata of the moment."""

    def __init__(self, stub: ServiceStub, client: NodeClient) -> None:
        self._stub = stub
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        def call(request: Any, *, timeout: float) -> Any:
            started = method(request, timeout=timeout, metadata=self._client._metadata())
            if name == "GetPages":
                self._client._listen(started)
            return started

        return call
