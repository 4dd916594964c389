"""Asks all store nodes at once what ``admin`` answers, and makes one answer of it.

Unlike the store's ordinary client this one raises: an operator wants to know which node does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import grpc
from cedar.kvstore.admin import ADMIN_SERVICE
from cedar.kvstore.errors import CorruptValue, FrameError, NodeUnreachable
from cedar.kvstore.frames import FrameKind, decode_frame
from cedar.kvstore.header import verify_value
from cedar.kvstore.packs import Page
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.transport import GrpcTransport
from cedar.v1 import admin_pb2 as pb
from cedar.v1 import store_pb2

CALL_S: Final = 30.0
STALL_S: Final = 60.0
_STORE = store_pb2.DESCRIPTOR.services_by_name["Store"]


def unreachable(address: str, error: BaseException) -> NodeUnreachable:
    """The error of a call, in words."""
    detail = str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        detail = f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"
    return NodeUnreachable(f"store node {address}: {detail or type(error).__name__}")


@dataclass(frozen=True)
class PageHolder:
    """One page on one node."""

    address: str
    state: pb.PageState


class AdminClient:
    """Client of the nodes at ``addresses``; an async context manager, for one event loop."""

    def __init__(self, addresses: Sequence[str], *, tls: TlsConfig | None = None) -> None:
        self.addresses = tuple(addresses)
        self._maker = GrpcTransport(tls).channels()
        self._channels: dict[str, Any] = {}

    async def __aenter__(self) -> AdminClient:
        for address in self.addresses:
            self._channels[address] = self._maker.open(address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def explain(
        self, root: bytes, keys: Sequence[bytes]
    ) -> tuple[list[list[PageHolder]], list[tuple[str, pb.WindowState]]]:
        """For each page what every node says of it, and the window records (node, record), longest first."""
        request = pb.ExplainRequest(root_key=root, page_keys=b"".join(keys))
        answers = await self._all("Explain", request)
        pages = [
            [PageHolder(address, answer.pages[i]) for address, answer in answers.items()]
            for i in range(len(keys))
        ]
        windows = [(address, window) for address, answer in answers.items() for window in answer.windows]
        return pages, sorted(windows, key=lambda found: -found[1].tokens)

    async def top(self) -> dict[str, pb.TopResponse]:
        """Who holds how much, by node."""
        return await self._all("Top", pb.TopRequest())

    async def stats(self) -> dict[str, dict[str, float]]:
        """Counters and gauges by node."""

        async def ask(address: str) -> dict[str, float]:
            stub = ServiceStub(self._channels[address], _STORE)
            try:
                return dict((await stub.Stats(store_pb2.StatsRequest(), timeout=CALL_S)).values)
            except grpc.RpcError as error:
                raise unreachable(address, error) from None

        found = await asyncio.gather(*map(ask, self.addresses))
        return dict(zip(self.addresses, found, strict=True))

    async def check(self, request: pb.CheckRequest) -> AsyncIterator[tuple[str, pb.CheckProgress]]:
        """Progress of all nodes, as it comes; each ends with one that is done."""
        arrived: asyncio.Queue[tuple[str, pb.CheckProgress | NodeUnreachable]] = asyncio.Queue(64)

        async def follow(address: str) -> None:
            stub = ServiceStub(self._channels[address], ADMIN_SERVICE)
            try:
                async for progress in stub.Check(request):
                    await arrived.put((address, progress))
            except grpc.RpcError as error:
                await arrived.put((address, unreachable(address, error)))

        tasks = [asyncio.ensure_future(follow(address)) for address in self.addresses]
        try:
            running = len(tasks)
            while running:
                address, progress = await arrived.get()
                if isinstance(progress, NodeUnreachable):
                    raise progress
                running -= progress.done
                yield address, progress
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout_s: float) -> AsyncIterator[pb.DrainProgress]:
        """How far the node, the only one of this client, has handed over; the last is done."""
        (address,) = self.addresses
        stub = ServiceStub(self._channels[address], ADMIN_SERVICE)
        try:
            async for progress in stub.Drain(pb.DrainRequest(timeout_s=timeout_s)):
                yield progress
        except grpc.RpcError as error:
            raise unreachable(address, error) from None

    async def export(self, request: pb.ExportRequest) -> AsyncIterator[tuple[int, Page]]:
        """(pages in all, page) from node after node, each verified, each key once."""
        seen: set[bytes] = set()
        total = 0
        for address in self.addresses:
            stub = ServiceStub(self._channels[address], ADMIN_SERVICE)
            call = stub.Export(request)
            first = True
            try:
                messages = call.__aiter__()
                while True:
                    try:
                        async with asyncio.timeout(STALL_S):
                            message = await messages.__anext__()
                    except StopAsyncIteration:
                        break
                    count, pages = exported_pages(message)
                    total += count if first else 0
                    first = False
                    for page in pages:
                        if page.key not in seen:
                            seen.add(page.key)
                            yield total, page
            except (grpc.RpcError, TimeoutError, FrameError, CorruptValue) as error:
                raise unreachable(address, error) from None
            finally:
                call.cancel()

    async def _all(self, method: str, request: Any) -> dict[str, Any]:
        async def ask(address: str) -> Any:
            stub = ServiceStub(self._channels[address], ADMIN_SERVICE)
            try:
                return await getattr(stub, method)(request, timeout=CALL_S)
            except grpc.RpcError as error:
                raise unreachable(address, error) from None

        answers = await asyncio.gather(*map(ask, self.addresses))
        return dict(zip(self.addresses, answers, strict=True))


def exported_pages(message: bytes) -> tuple[int, list[Page]]:
    """(pages in the whole export, pages of this frame, verified). FrameError, CorruptValue."""
    frame = decode_frame(message, expect=FrameKind.EXPORT)
    meta = pb.ExportMeta.FromString(frame.meta)
    if sum(page.size for page in meta.pages) != len(frame.payload):
        raise FrameError("payload", f"{len(frame.payload)} bytes", "not the sum of its pages")
    pages = []
    offset = 0
    for told in meta.pages:
        value = frame.payload[offset : offset + told.size]
        offset += told.size
        verify_value(value, page_key=told.page_key)
        pages.append(Page(told.page_key, value, told.page_index, told.tenant, told.age_s))
    return int(meta.total), pages
