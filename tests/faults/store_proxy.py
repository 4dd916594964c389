"""A TCP proxy that misbehaves: cuts, stalls, corrupts, delays, or loses one direction of what it carries."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What happens to the bytes from the server to the client, per connection.

    After ``after`` bytes: ``reset`` sends an RST, ``close`` a FIN, ``stall`` says nothing any more, ``flip``
    changes a bit and goes on. ``delay_s`` holds up every piece. ``deaf``: what the client says is dropped.
    """

    kind: str = ""
    after: int = 1 << 62
    delay_s: float = 0.0
    deaf: bool = False


@dataclass
class Proxy:
    """In front of one address."""

    target: str
    fault: Fault = field(default_factory=Fault)
    address: str = ""
    hits: int = 0
    carried: int = 0
    _open: set[asyncio.Task[None]] = field(default_factory=set)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        host, port = self.target.rsplit(":", 1)
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            self._open.discard(task)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._up(reader, up_writer))
                both.create_task(self._down(up_reader, writer))
                both.create_task(self._until_closed())
        except* (ConnectionError, _End):
            pass
        finally:
            for end in (writer, up_writer):
                end.close()
            self._open.discard(task)

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise _End

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.fault.deaf:
                writer.write(data)
                await writer.drain()
        raise _End

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(1 << 14):
            fault = self.fault
            if fault.delay_s:
                await asyncio.sleep(fault.delay_s)
            left = fault.after - passed
            passed += len(data)
            self.carried += len(data)
            if left < len(data) and fault.kind and left >= 0:
                self.hits += 1
                if fault.kind == "flip":
                    data = data[:left] + bytes([data[left] ^ 0x10]) + data[left + 1 :]
                else:
                    writer.write(data[:left])
                    await self._end(writer, fault.kind)
            writer.write(data)
            await writer.drain()
        raise _End

    async def _end(self, writer: asyncio.StreamWriter, kind: str) -> None:
        if kind == "stall":
            await asyncio.sleep(3600)
        if kind == "reset":
            end: socket.socket = writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _End


class _End(Exception):
    """The connection is over."""


@asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[Proxy]:
    """A proxy before ``target``, on a port of its own."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy._closing.set()
        if proxy._open:
            await asyncio.wait(list(proxy._open))
