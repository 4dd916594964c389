"""How nodes and clients reach each other: over gRPC, or over whatever a test puts in its place.

Everything that opens a connection or listens is given a ``Transport``. A channel is what ``rpc.ServiceStub``
calls, a server what ``rpc.service_handler`` is registered with; nothing else of gRPC's machinery is relied
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from cedar.kvstore.rpc import ChannelOptions, add_health, service_handler, transport_options
from cedar.kvstore.tls import ChannelMaker, TlsConfig, server_credentials
from google.protobuf.descriptor import ServiceDescriptor


class PortInUse(RuntimeError):
    """The address cannot be listened on."""


class Channels(Protocol):
    """Opens channels to addresses ("host:port")."""

    def outdated(self) -> bool:
        """Whether channels opened before should be opened anew."""

    def open(self, address: str) -> Any:
        """A channel."""


class Server(Protocol):
    """Serves the services that were added."""

    def listen(self, host: str, port: int) -> int:
        """Take an address, ``port`` 0: any free one; the port. PortInUse."""

    def add(self, services: Sequence[tuple[ServiceDescriptor, object]]) -> None:
        """Serve these, each with the methods of its servicer, and say in health checks that they serve."""

    async def start(self) -> None:
        """Begin to serve."""

    async def retire(self) -> None:
        """Say in health checks that nothing serves any more."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those under way ``grace_s``."""


class Transport(Protocol):
    """Makes servers and channels."""

    def server(self, options: ChannelOptions) -> Server:
        """A server."""

    def channels(self, options: ChannelOptions | None = None) -> Channels:
        """What opens channels."""


class GrpcTransport:
    """The network. ``tls``: both sides show certificates."""

    def __init__(self, tls: TlsConfig | None = None) -> None:
        self._tls = tls

    def server(self, options: ChannelOptions) -> Server:
        """A gRPC server on the running event loop."""
        return _GrpcServer(options, self._tls)

    def channels(self, options: ChannelOptions | None = None) -> Channels:
        """What opens gRPC channels."""
        return ChannelMaker(self._tls, transport_options().channel if options is None else options)


class _GrpcServer:
    def __init__(self, options: ChannelOptions, tls: TlsConfig | None) -> None:
        self._server = grpc.aio.server(options=options)
        self._tls = tls
        self._health: Any = None

    def listen(self, host: str, port: int) -> int:
        address = f"{host}:{port}"
        try:
            if self._tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, server_credentials(self._tls))
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}: {error}") from None

    def add(self, services: Sequence[tuple[ServiceDescriptor, object]]) -> None:
        self._server.add_generic_rpc_handlers(tuple(service_handler(*pair) for pair in services))
        self._health = add_health(self._server, [descriptor for descriptor, _ in services])

    async def start(self) -> None:
        await self._server.start()

    async def retire(self) -> None:
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
