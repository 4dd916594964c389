"""One mechanism that builds handlers and stubs of every internal service from its proto descriptor.

Wherever a method's type is ``cedar.v1.RawFrame`` the serializer is the identity: the message is the frame's
``bytes`` (see ``frames``). All other types are serialized as usual. Works with ``grpc.server`` and
``grpc.aio.server`` and with channels of both kinds.

gRPC accepts nothing but ``bytes`` there: a handler that answers with a bytearray or a memoryview leaves its
caller hanging until the deadline. Handlers built here check each answer and end the call at once instead.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

RAW_FRAME: Final = "cedar.v1.RawFrame"
DEFAULT_MESSAGE_BYTES: Final = 32 << 20

ChannelOptions = list[tuple[str, int | str]]
_Codec = Callable[[Any], Any] | None


@dataclass(frozen=True)
class TransportOptions:
    """gRPC options of a server and of the channels to it, which must agree with each other."""

    server: ChannelOptions
    channel: ChannelOptions


def transport_options(
    *,
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    keepalive_s: float = 10.0,
    keepalive_timeout_s: float = 3.0,
    max_reconnect_backoff_s: float = 1.0,
) -> TransportOptions:
    """Options for both sides from one set of numbers.

    A client pings every ``keepalive_s``, also without calls, so a dead peer is noticed within
    ``keepalive_s + keepalive_timeout_s``. The server allows twice that rate: with gRPC's own default
    (one ping in five minutes) it would close such a connection with "too_many_pings".
    """
    keepalive_ms = max(int(keepalive_s * 1000), 1)
    shared: ChannelOptions = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", max(int(keepalive_timeout_s * 1000), 1)),
        # Also for the pings that measure bandwidth: while one of those is out, no keepalive ping is sent.
        ("grpc.http2.ping_timeout_ms", max(int(keepalive_timeout_s * 1000), 1)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    server: ChannelOptions = [
        *shared,
        ("grpc.http2.min_ping_interval_without_data_ms", max(keepalive_ms // 2, 1)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", max(keepalive_ms // 2, 1)),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server beside the first
    ]
    channel: ChannelOptions = [
        *shared,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),  # how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", max(int(max_reconnect_backoff_s * 1000), 100)),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # closing a channel closes its connection
    ]
    return TransportOptions(server=server, channel=channel)


def server_options(max_message_bytes: int = DEFAULT_MESSAGE_BYTES) -> ChannelOptions:
    """Options for ``grpc.aio.server`` or ``grpc.server``; pair of ``channel_options``."""
    return transport_options(max_message_bytes=max_message_bytes).server


def channel_options(max_message_bytes: int = DEFAULT_MESSAGE_BYTES) -> ChannelOptions:
    """Options for channels to servers that use ``server_options``."""
    return transport_options(max_message_bytes=max_message_bytes).channel


def service_descriptor(full_name: str) -> ServiceDescriptor:
    """Descriptor of a service by name, such as ``cedar.v1.Store`` (its proto module must be imported)."""
    return descriptor_pool.Default().FindServiceByName(full_name)


def service_handler(descriptor: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Handler that serves ``descriptor`` with the methods of ``servicer``, which have the RPCs' names.

    Unary answers come from functions or coroutine functions, streamed ones from (async) generators.
    TypeError when a method is missing or has the wrong form.
    """
    missing = [
        method.name for method in descriptor.methods if not callable(getattr(servicer, method.name, None))
    ]
    if missing:
        raise TypeError(
            f"{type(servicer).__name__} lacks methods of {descriptor.full_name}: {', '.join(missing)}"
        )
    handlers = {}
    for method in descriptor.methods:
        behavior = getattr(servicer, method.name)
        build = _HANDLERS[(method.client_streaming, method.server_streaming)]
        handlers[method.name] = build(
            _checked(method, behavior),
            request_deserializer=_request_parser(method),
            response_serializer=_serializer(method.output_type),
        )
    return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)


class ServiceStub:
    """Client side of a service: one callable an RPC, under the RPC's name, as generated stubs have.

    ``channel`` is a ``grpc.Channel`` or a ``grpc.aio.Channel``.
    """

    def __init__(self, channel: Any, descriptor: ServiceDescriptor) -> None:
        for method in descriptor.methods:
            shape = (
                "stream" if method.client_streaming else "unary",
                "stream" if method.server_streaming else "unary",
            )
            multicallable = getattr(channel, f"{shape[0]}_{shape[1]}")(
                f"/{descriptor.full_name}/{method.name}",
                request_serializer=_serializer(method.input_type),
                response_deserializer=_parser(method.output_type),
            )
            setattr(self, method.name, multicallable)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no RPC named {name}")


class HealthServicer(Protocol):
    """What ``add_health`` returns; on an aio server its methods are coroutines."""

    def set(self, service: str, status: Any) -> Any:
        """Set the status of one service ("" is the whole server)."""

    def enter_graceful_shutdown(self) -> Any:
        """Turn every service to NOT_SERVING, for good."""


def add_health(server: Any, descriptors: Sequence[ServiceDescriptor]) -> HealthServicer:
    """Register gRPC health (the named services serving) and reflection on a server of either kind."""
    asynchronous = isinstance(server, grpc.aio.Server)
    module: Any = health
    servicer = module.aio.HealthServicer() if asynchronous else module.HealthServicer()
    serving = health_pb2.HealthCheckResponse.SERVING
    names = [descriptor.full_name for descriptor in descriptors]
    for name in names:
        if asynchronous:
            servicer._server_status[name] = serving  # nobody watches before the server starts
        else:
            servicer.set(name, serving)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return cast(HealthServicer, servicer)


_HANDLERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _parser(message: Any) -> _Codec:
    return None if message.full_name == RAW_FRAME else GetMessageClass(message).FromString


def _request_parser(method: MethodDescriptor) -> _Codec:
    """Like ``_parser``, but a request that is no message is an answer to give, not an exception to raise."""
    parse = _parser(method.input_type)
    if parse is None or method.client_streaming:
        return parse

    def parsed(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parsed


def _serializer(message: Any) -> _Codec:
    return None if message.full_name == RAW_FRAME else GetMessageClass(message).SerializeToString


def _checked(method: MethodDescriptor, behavior: Callable[..., Any]) -> Callable[..., Any]:
    """The behavior with every answer's type checked; its form (sync or async) stays."""
    expected: type = (
        bytes if method.output_type.full_name == RAW_FRAME else GetMessageClass(method.output_type)
    )

    def check(answer: object) -> object:
        if type(answer) is not expected:
            raise TypeError(
                f"{method.full_name} must answer with {expected.__name__}, got {type(answer).__name__}"
            )
        return answer

    if method.server_streaming:
        if inspect.isasyncgenfunction(behavior):

            async def stream(request: Any, context: Any) -> AsyncIterator[object]:
                if isinstance(request, DecodeError):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
                answers = behavior(request, context)
                try:
                    async for answer in answers:
                        yield check(answer)
                finally:
                    await answers.aclose()

            return stream
        if inspect.iscoroutinefunction(behavior):
            raise TypeError(f"{method.full_name} must be a generator, so that its answers can be checked")

        def stream_sync(request: Any, context: Any) -> Iterator[object]:
            if isinstance(request, DecodeError):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            for answer in behavior(request, context):
                yield check(answer)

        return stream_sync
    if inspect.iscoroutinefunction(behavior):

        async def unary(request: Any, context: Any) -> object:
            if isinstance(request, DecodeError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            return check(await behavior(request, context))

        return unary
    if inspect.isgeneratorfunction(behavior) or inspect.isasyncgenfunction(behavior):
        raise TypeError(f"{method.full_name} has one answer, so it must not be a generator")

    def unary_sync(request: Any, context: Any) -> object:
        if isinstance(request, DecodeError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        return check(behavior(request, context))

    return unary_sync
