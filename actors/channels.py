"""gRPC channels to peers, shared by the requests that talk to the same peer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from cedar.kvstore.rpc import channel_options


@dataclass
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """Keeps at most ``idle`` unused channels open; peers come and go with every roll-out."""

    def __init__(self, idle: int = 16) -> None:
        self._idle = idle
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to ``address`` that stays open within the context."""
        entry = self._entries.get(address)
        if entry is None:
            channel = grpc.aio.insecure_channel(address, options=channel_options())
            entry = self._entries[address] = _Entry(channel)
        self._entries.move_to_end(address)
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            await self._trim()

    async def close(self) -> None:
        """Close every channel; calls on them end."""
        entries, self._entries = self._entries, OrderedDict()
        for entry in entries.values():
            await entry.channel.close(None)

    async def _trim(self) -> None:
        unused = [address for address, entry in self._entries.items() if entry.users == 0]
        for address in unused[: max(0, len(unused) - self._idle)]:
            await self._entries.pop(address).channel.close(None)
