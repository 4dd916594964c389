"""Where nodes and clients learn the member list from.

A *feed* holds the newest list it was given and wakes who waits for a newer one. It may be fed by hand
(``MemberFeed.publish``: this is how a cluster's own directory does it), by a file (``FileFeed``), or by the
membership service (``ServiceFeed``). When the source is gone the feed keeps its last list: frozen, not lost.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

import grpc
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import MemberList, fixed_list, from_json, from_proto
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.transport import GrpcTransport, Transport
from cedar.v1 import membership_pb2

log = logging.getLogger(__name__)
SERVICE: Final = membership_pb2.DESCRIPTOR.services_by_name["Membership"]


class MemberFeed:
    """The newest member list known here. Used on one event loop."""

    def __init__(self, members: MemberList | None = None) -> None:
        self._list = members or MemberList(0)
        self._changed = asyncio.Event()

    @classmethod
    def fixed(cls, addresses: list[str] | tuple[str, ...]) -> MemberFeed:
        """A feed of nodes that never change."""
        return cls(fixed_list(addresses))

    @property
    def current(self) -> MemberList:
        """The newest list."""
        return self._list

    def publish(self, members: MemberList) -> bool:
        """Take a list over if it is newer than the one held; whether it was."""
        if members.epoch <= self._list.epoch:
            return False
        self._list = members
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    async def newer(self, epoch: int) -> MemberList:
        """The list, once it is newer than ``epoch``."""
        while self._list.epoch <= epoch:
            await self._changed.wait()
        return self._list

    async def start(self) -> None:
        """Begin to follow the source, and wait a moment for a first list."""

    async def stop(self) -> None:
        """Stop following; the last list stays."""


class _Following(MemberFeed):
    """A feed with a task that follows a source, and tries again when that fails."""

    def __init__(self, *, first_list_s: float, retry_s: float) -> None:
        super().__init__()
        self._first_list_s = first_list_s
        self._retry_s = retry_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            try:
                async with asyncio.timeout(self._first_list_s):
                    await self.newer(0)
            except TimeoutError:
                log.warning("no member list yet")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except (OSError, InvalidRequest, grpc.RpcError, grpc.aio.UsageError) as error:
                code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
                log.info("member list frozen at epoch %d: %s", self.current.epoch, code)
            await asyncio.sleep(self._retry_s)

    async def _follow(self) -> None:
        raise NotImplementedError


class FileFeed(_Following):
    """Follows a file (``members.to_json``), which whoever owns it replaces with one of a higher epoch."""

    def __init__(self, path: Path, *, poll_s: float = 1.0, first_list_s: float = 5.0) -> None:
        super().__init__(first_list_s=first_list_s, retry_s=poll_s)
        self._path = path

    async def _follow(self) -> None:
        self.publish(from_json(self._path.read_text("utf-8")))


class ServiceFeed(_Following):
    """Follows a membership service."""

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        transport: Transport | None = None,
        first_list_s: float = 5.0,
        retry_s: float = 0.5,
    ) -> None:
        super().__init__(first_list_s=first_list_s, retry_s=retry_s)
        self._maker = (transport or GrpcTransport(tls)).channels()
        self._address = address

    async def _follow(self) -> None:
        async with self._maker.open(self._address) as channel:
            stub = ServiceStub(channel, SERVICE)
            async for message in stub.Watch(membership_pb2.WatchRequest(epoch=self.current.epoch)):
                self.publish(from_proto(message))
