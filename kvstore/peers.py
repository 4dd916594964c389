"""The other nodes as a node sees them. A peer that is dead or slow gives less, never an error.

Equal fetches that run at the same time share one call: a hundred clients that ask the new owner of a run for
pages which are still at the old one cost the old one a single read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from cedar.kvstore.breaker import Breaker
from cedar.kvstore.call_answer import ChannelClosed, answer_of
from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.epochs import enclosed_list, request_metadata
from cedar.kvstore.errors import CorruptValue, FrameError, InvalidRequest
from cedar.kvstore.frames import FrameKind, decode_frame
from cedar.kvstore.header import HEADER_BYTES, verify_value
from cedar.kvstore.keys import split_keys
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import Member
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.tenant_purge import PEER_SERVICE
from cedar.kvstore.transport import Channels, Transport
from cedar.kvstore.window_tier import WindowName
from cedar.kvstore.window_wire import assemble_window
from cedar.v1 import store_pb2, store_peer_pb2
from google.protobuf.message import DecodeError

log = logging.getLogger(__name__)
_FAILURES = (grpc.RpcError, grpc.aio.UsageError, TimeoutError, DecodeError, InvalidRequest, CorruptValue)
_ALIVE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
"""Answers of a node that is well, though it has not what it was asked for."""


@dataclass(frozen=True)
class CopiedPage:
    """A verified page from another node, with what that node knows of it.

    ``purges``: those of its tenant that the node had carried out when it read the page.
    """

    key: bytes
    value: memoryview
    page_index: int
    tenant: bytes
    idle_s: float
    purges: tuple[int, ...]


@dataclass(frozen=True)
class CopiedWindow:
    """A verified window record from another node; ``purges`` as of a page."""

    record: bytes
    tenant: bytes
    purges: tuple[int, ...]


@dataclass(frozen=True)
class Fetched:
    """Leading pages of those asked for. ``answered``: the rest is not there, rather than not received."""

    pages: list[CopiedPage]
    answered: bool


@dataclass(frozen=True)
class Held:
    """Which pages a peer holds, and its window records there."""

    held: tuple[bool, ...]
    windows: tuple[WindowName, ...]


class Peer:
    """One other node."""

    def __init__(
        self,
        member: Member,
        feed: MemberFeed,
        config: PeerConfig,
        maker: Channels,
        count: Callable[[str], None],
    ) -> None:
        self.member = member
        self._feed = feed
        self._config = config
        self._count = count
        self._breaker = Breaker(failures=3, open_s=0.5, max_open_s=8.0)
        self._channel = maker.open(member.address)
        self._stub = ServiceStub(self._channel, PEER_SERVICE)
        self._fetches: dict[bytes, asyncio.Task[Fetched]] = {}

    async def held(self, root: bytes, keys: Sequence[bytes]) -> Held | None:
        """Which of these it holds; None when it does not answer."""
        request = store_peer_pb2.HeldRequest(root_key=root, page_keys=b"".join(keys))
        response = await self._unary("HeldPages", request, self._config.call_timeout_s)
        if response is None or len(response.held) != len(keys):
            return None
        names = (WindowName(w.page_key, w.tokens, w.digest) for w in response.windows)
        return Held(tuple(byte == 1 for byte in response.held), tuple(names))

    async def fetch(self, keys: Sequence[bytes]) -> Fetched:
        """Leading pages of ``keys`` that it holds: a run at most, as all of it is kept in memory."""
        name = b"".join(keys)
        running = self._fetches.get(name)
        if running is None:
            running = asyncio.get_running_loop().create_task(self._fetch(list(keys)))
            self._fetches[name] = running
            running.add_done_callback(lambda _: self._fetches.pop(name, None))
        else:
            self._count("store_peer_fetches_joined")
        try:
            return await answer_of(asyncio.shield(running))
        except ChannelClosed:  # this peer is not listed any more
            return Fetched([], False)

    async def copy(self, frames: Sequence[bytes], pages: int) -> int:
        """Have it keep these pages too; how many it holds now."""

        async def messages() -> AsyncIterator[bytes]:
            for frame in frames:
                yield frame

        timeout_s = self._config.stall_timeout_s + sum(map(len, frames)) / 10e6
        response = await self._unary("CopyPages", messages(), timeout_s)
        return 0 if response is None else min(response.stored + response.present + response.conflicts, pages)

    async def list_pages(self, node_id: str, epoch: int) -> AsyncIterator[list[bytes]]:
        """Its pages that belong to ``node_id``, in portions. ConnectionError when it does not answer."""
        request = store_peer_pb2.ListPagesRequest(node_id=node_id, epoch=epoch)
        call = self._stub.ListPages(request, timeout=3600.0, metadata=self._metadata())
        try:
            messages = call.__aiter__()
            while True:
                async with asyncio.timeout(10 * self._config.stall_timeout_s):
                    try:
                        message = await answer_of(anext(messages))
                    except StopAsyncIteration:
                        return
                yield split_keys(message.page_keys)
        except _FAILURES as error:
            self._failed("ListPages", error)
            raise ConnectionError(f"{self.member.node_id} does not list its pages") from None
        finally:
            call.cancel()

    async def fetch_window(self, name: WindowName, limit_bytes: int) -> CopiedWindow | None:
        """A window record that it holds, or None."""
        request = store_pb2.GetWindowRequest(page_key=name.page_key, tokens=name.tokens, digest=name.digest)
        if not self._breaker.allows(_now_s()):
            return None
        call = self._stub.FetchWindow(
            request, timeout=self._config.stall_timeout_s, metadata=self._metadata()
        )
        tenant = b""
        purges: tuple[int, ...] = ()

        async def messages() -> AsyncIterator[bytes]:
            nonlocal tenant, purges
            received = call.__aiter__()
            while True:
                try:
                    message = await answer_of(anext(received))
                except StopAsyncIteration:
                    return
                meta = store_pb2.WindowMeta.FromString(decode_frame(message, expect=FrameKind.WINDOW).meta)
                tenant, purges = meta.tenant, tuple(meta.purges)
                yield message

        try:
            record = await assemble_window(messages(), name, limit_bytes)
        except _FAILURES as error:
            self._failed("FetchWindow", error)
            return None
        self._breaker.succeeded()
        return CopiedWindow(record, tenant, purges)

    async def exchange_purges(self, purges: store_peer_pb2.Purges) -> store_peer_pb2.Purges | None:
        """What it knows, after it has learned what is known here; None when it does not answer."""
        answer: store_peer_pb2.Purges | None = await self._unary(
            "ExchangePurges", purges, self._config.stall_timeout_s
        )
        return answer

    async def close(self) -> None:
        """Close the connection."""
        for task in list(self._fetches.values()):
            task.cancel()
        await self._channel.close(None)

    async def _fetch(self, keys: list[bytes]) -> Fetched:
        pages: list[CopiedPage] = []
        if not self._breaker.allows(_now_s()):
            return Fetched(pages, False)
        request = store_pb2.GetPagesRequest(page_keys=b"".join(keys))
        timeout_s = self._config.stall_timeout_s * 3
        call = self._stub.FetchPages(request, timeout=timeout_s, metadata=self._metadata())
        self._count("store_peer_fetches")
        try:
            messages = call.__aiter__()
            while len(pages) < len(keys):
                async with asyncio.timeout(self._config.stall_timeout_s):
                    try:
                        message = await answer_of(anext(messages))
                    except StopAsyncIteration:
                        break
                pages += copied_pages(message, keys[len(pages) :])
        except _FAILURES as error:
            self._failed("FetchPages", error)
            return Fetched(pages, False)
        finally:
            call.cancel()
        self._breaker.succeeded()
        return Fetched(pages, True)

    async def _unary(self, method: str, request: Any, timeout_s: float) -> Any:
        if not self._breaker.allows(_now_s()):
            return None
        try:
            call = getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata())
            answer = await answer_of(call)
        except _FAILURES as error:
            self._failed(method, error)
            return None
        self._breaker.succeeded()
        return answer

    def _metadata(self) -> Any:
        return request_metadata(self._feed.current, self.member.node_id)

    def _failed(self, what: str, error: Exception) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                newer = enclosed_list(error.trailing_metadata())
                if newer is not None:
                    self._feed.publish(newer)
                return
            if error.code() in _ALIVE:
                return
            log.info("peer %s: %s: %s", self.member.node_id, what, error.code().name)
        else:
            log.info("peer %s: %s: %s", self.member.node_id, what, error)
        self._count("store_peer_failures")
        self._breaker.failed(_now_s())


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def copied_pages(message: bytes, keys: Sequence[bytes] | None = None) -> list[CopiedPage]:
    """The verified pages of a frame, which must be the first of ``keys``. FrameError, CorruptValue."""
    frame = decode_frame(message, expect=FrameKind.PAGES)
    meta = store_pb2.StoredMeta.FromString(frame.meta)
    named = split_keys(meta.page_keys)
    size = meta.value_bytes
    if not named or (keys is not None and named != list(keys[: len(named)])):
        raise CorruptValue("key", "the peer sent other pages than were asked for")
    if size <= HEADER_BYTES or size * len(named) != len(frame.payload):
        raise FrameError("value_bytes", size, f"{len(named)} values in {len(frame.payload)} bytes")
    pages = []
    for number, key in enumerate(named):
        value = frame.payload[size * number : size * (number + 1)]
        verify_value(value, page_key=key)
        pages.append(
            CopiedPage(key, value, meta.first_page + number, meta.tenant, meta.idle_s, tuple(meta.purges))
        )
    return pages


class Peers:
    """The other members, connected when first needed."""

    def __init__(
        self,
        node_id: str,
        feed: MemberFeed,
        config: PeerConfig,
        transport: Transport,
        options: list[tuple[str, int | str]],
        count: Callable[[str], None],
    ) -> None:
        self._node_id = node_id
        self._feed = feed
        self._config = config
        self._maker = transport.channels(options)
        self._count = count
        self._peers: dict[tuple[str, str], Peer] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def of(self, member: Member) -> Peer:
        """The peer for a member that is not this node."""
        name = (member.node_id, member.address)
        if self._maker.outdated():
            self._retire(list(self._peers))
        peer = self._peers.get(name)
        if peer is None:
            listed = {(m.node_id, m.address) for m in self._feed.current.members}
            self._retire([other for other in self._peers if other not in listed])
            peer = self._peers[name] = Peer(member, self._feed, self._config, self._maker, self._count)
        return peer

    def others(self) -> list[Peer]:
        """Every member but this node."""
        return [self.of(m) for m in self._feed.current.members if m.node_id != self._node_id]

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._peers.clear()
        while self._retiring:
            await asyncio.wait(list(self._retiring))

    def _retire(self, names: list[tuple[str, str]]) -> None:
        for name in names:
            task = asyncio.get_running_loop().create_task(self._peers.pop(name).close())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
