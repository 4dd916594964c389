from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from cedar.kvstore.rpc import (
    ServiceStub,
    add_health,
    channel_options,
    server_options,
    service_descriptor,
    service_handler,
    transport_options,
)
from cedar.v1 import store_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

STORE = store_pb2.DESCRIPTOR.services_by_name["Store"]


class Echo:
    """Answers with what ``answer`` says."""

    answer: Any = b"frame"

    async def MatchPrefix(self, request: Any, context: Any) -> Any:
        return store_pb2.MatchResponse(pages=len(request.page_keys))

    async def GetPages(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield request.page_keys
        yield self.answer

    async def PutPages(self, request_iterator: Any, context: Any) -> Any:
        sizes = [len(message) async for message in request_iterator if type(message) is bytes]
        return store_pb2.PutPagesResponse(stored=sum(sizes))

    async def PutWindow(self, request_iterator: Any, context: Any) -> Any:
        return self.answer

    async def GetWindow(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield self.answer

    async def Stats(self, request: Any, context: Any) -> Any:
        return store_pb2.StatsResponse()


class SyncEcho:
    """The same with plain functions."""

    answer: Any = b"frame"

    def MatchPrefix(self, request: Any, context: Any) -> Any:
        return store_pb2.MatchResponse(pages=len(request.page_keys))

    def GetPages(self, request: Any, context: Any) -> Iterator[Any]:
        yield request.page_keys
        yield self.answer

    def PutPages(self, request_iterator: Any, context: Any) -> Any:
        return store_pb2.PutPagesResponse(stored=sum(len(message) for message in request_iterator))

    def PutWindow(self, request_iterator: Any, context: Any) -> Any:
        return self.answer

    def GetWindow(self, request: Any, context: Any) -> Iterator[Any]:
        yield self.answer

    def Stats(self, request: Any, context: Any) -> Any:
        return store_pb2.StatsResponse()


@asynccontextmanager
async def connected(servicer: object) -> AsyncIterator[ServiceStub]:
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((service_handler(STORE, servicer),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield ServiceStub(channel, STORE)
    await server.stop(None)


async def test_frames_pass_as_bytes_and_messages_as_messages():
    async with connected(Echo()) as stub:
        assert (await stub.MatchPrefix(store_pb2.MatchRequest(page_keys=b"abc"), timeout=5)).pages == 3
        request = store_pb2.GetPagesRequest(page_keys=b"raw")
        assert [message async for message in stub.GetPages(request, timeout=5)] == [b"raw", b"frame"]
        assert (await stub.PutPages(iter([b"ab", b"c"]), timeout=5)).stored == 3


@pytest.mark.parametrize("answer", [bytearray(b"x"), memoryview(b"x"), None, "x"])
async def test_a_handler_that_does_not_answer_bytes_ends_the_call_at_once(answer: object):
    servicer = Echo()
    servicer.answer = answer
    async with connected(servicer) as stub:
        for call in (
            stub.GetPages(store_pb2.GetPagesRequest(), timeout=10),
            stub.GetWindow(store_pb2.GetWindowRequest(), timeout=10),
        ):
            started = asyncio.get_running_loop().time()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in call]
            assert caught.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED
            assert "must answer with bytes" in (caught.value.details() or "")
            assert asyncio.get_running_loop().time() - started < 2
        with pytest.raises(grpc.aio.AioRpcError, match="PutWindowResponse"):
            await stub.PutWindow(iter([b"x"]), timeout=10)


@pytest.mark.parametrize("answer", [bytearray(b"x"), memoryview(b"x")])
def test_the_same_on_a_threaded_server_and_channel(answer: object):
    servicer = SyncEcho()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=server_options())
        server.add_generic_rpc_handlers((service_handler(STORE, servicer),))
        add_health(server, [STORE])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            stub = ServiceStub(channel, STORE)
            request = store_pb2.GetPagesRequest(page_keys=b"raw")
            assert list(stub.GetPages(request, timeout=5)) == [b"raw", b"frame"]
            assert stub.PutPages(iter([b"ab", b"c"]), timeout=5).stored == 3
            status = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="cedar.v1.Store"), timeout=5
            )
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
            assert "cedar.v1.Store" in services
            servicer.answer = answer
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.GetWindow(store_pb2.GetWindowRequest(), timeout=10))
            assert caught.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        server.stop(None).wait()


def test_an_incomplete_servicer_is_refused_when_built():
    class Half:
        def MatchPrefix(self, request: Any, context: Any) -> None: ...

    with pytest.raises(TypeError, match="GetPages, PutPages, PutWindow, GetWindow, Stats"):
        service_handler(STORE, Half())


def test_a_method_of_the_wrong_form_is_refused_when_built():
    class Writer(Echo):
        async def GetPages(self, request: Any, context: Any) -> None:  # type: ignore[override]
            await context.write(b"unchecked")

    class Streams(Echo):
        async def Stats(self, request: Any, context: Any) -> AsyncIterator[Any]:
            yield store_pb2.StatsResponse()

    with pytest.raises(TypeError, match="must be a generator"):
        service_handler(STORE, Writer())
    with pytest.raises(TypeError, match="must not be a generator"):
        service_handler(STORE, Streams())


def test_an_unknown_rpc_is_an_attribute_error():
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(AttributeError, match="Nothing"):
        _ = ServiceStub(channel, STORE).Nothing


def test_services_are_found_by_name():
    assert service_descriptor("cedar.v1.Store") is STORE


@pytest.mark.parametrize("keepalive_s", [0.5, 10.0, 60.0])
def test_the_server_always_allows_the_pings_its_clients_send(keepalive_s: float):
    options = transport_options(keepalive_s=keepalive_s)
    server, channel = dict(options.server), dict(options.channel)
    allowed = int(server["grpc.http2.min_recv_ping_interval_without_data_ms"])
    assert allowed <= int(channel["grpc.keepalive_time_ms"])
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.max_receive_message_length"] == channel["grpc.max_send_message_length"]
    assert server["grpc.so_reuseport"] == 0


async def test_a_client_that_pings_often_is_not_sent_away():
    options = transport_options(keepalive_s=0.05)
    server = grpc.aio.server(options=options.server)
    server.add_generic_rpc_handlers((service_handler(STORE, Echo()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options.channel) as channel:
        stub = ServiceStub(channel, STORE)
        for _ in range(8):
            await stub.Stats(store_pb2.StatsRequest(), timeout=5)
            await asyncio.sleep(0.08)
    await server.stop(None)
