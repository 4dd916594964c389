"""A network in memory that carries the store's real RPCs, late, twice, damaged or never.

It stands where gRPC stands (``kvstore.transport``): the handlers, serializers and stubs are the real ones, so
what travels is the real bytes. A call is two streams of messages, each in order, as over one connection;
different calls overtake each other. A message that is lost stalls its stream for good, as a cut link does
with TCP: the caller's deadline ends the call, or the keepalive does. A call to a host that is not there is
UNAVAILABLE at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from cedar.kvstore.frames import FRAME_HEADER_BYTES
from cedar.kvstore.rpc import ChannelOptions, service_handler
from virtual_loop import Process, VirtualLoop

KEEPALIVE_S = 3.0
DUPLICATE_WITHIN_S = 3.0
Code = grpc.StatusCode


@dataclass
class Weather:
    """How bad the network is; probabilities are of each message or call."""

    delay_s: float = 0.002
    lost: float = 0.0
    duplicated: float = 0.0
    damaged: float = 0.0


class Network:
    """Hosts and links. ``failures``: exceptions that handlers let out, which no handler may."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = Weather()
        self.servers: dict[str, SimulatedServer] = {}
        self.cut: dict[tuple[str, str], float] = {}
        self.slow: dict[str, float] = {}
        self.calls: dict[int, _Call] = {}
        self.failures: list[str] = []
        self.sent = 0
        self.closed = False
        self._number = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def heal(self) -> None:
        """Fair weather on every link."""
        self.weather = Weather()
        self.cut.clear()
        self.slow.clear()

    def sever(self, source: str, target: str) -> None:
        """Nothing gets from one host to the other any more; the other direction is as it was."""
        self.cut.setdefault((source, target), self.loop.now_s)

    def mend(self, source: str, target: str) -> None:
        self.cut.pop((source, target), None)

    def drop(self, host: str) -> None:
        """A host's connections are gone."""
        self.servers.pop(host, None)
        for call in list(self.calls.values()):
            if host in (call.client, call.server):
                call.broken("connection reset")

    def delay_s(self, source: str, target: str) -> float:
        slow = self.slow.get(source, 1.0) * self.slow.get(target, 1.0)
        return self.weather.delay_s * slow * (0.2 + self.rng.expovariate(1.0))

    def lost(self, source: str, target: str) -> bool:
        self.sent += 1
        if (source, target) in self.cut:
            return True
        return bool(self.weather.lost) and self.rng.random() < self.weather.lost

    def damage(self, message: bytes) -> bytes:
        """Flip a bit in the payload of a frame, perhaps."""
        if not self.weather.damaged or self.rng.random() >= self.weather.damaged:
            return message
        if not message.startswith(b"CDRF") or len(message) < FRAME_HEADER_BYTES + 64:
            return message
        broken = bytearray(message)
        position = self.rng.randrange(len(broken) // 2 + FRAME_HEADER_BYTES, len(broken))
        broken[position] ^= 1 << self.rng.randrange(8)
        return bytes(broken)

    async def keep_alive(self) -> None:
        """Find connections over links that have been cut for long."""
        while True:
            await asyncio.sleep(KEEPALIVE_S / 4)
            for call in list(self.calls.values()):
                since_s = min(
                    self.cut.get((call.client, call.server), float("inf")),
                    self.cut.get((call.server, call.client), float("inf")),
                )
                if min(since_s, call.stalled_s) < self.loop.now_s - KEEPALIVE_S:
                    call.broken("keepalive timeout")


class SimulatedTransport:
    """``kvstore.transport.Transport`` of one host. Addresses are ``host:1``."""

    def __init__(self, network: Network, host: str, process: Process) -> None:
        self._network = network
        self._host = host
        self._process = process

    def server(self, options: ChannelOptions) -> SimulatedServer:
        return SimulatedServer(self._network, self._host, self._process)

    def channels(self, options: ChannelOptions | None = None) -> SimulatedTransport:
        return self

    def outdated(self) -> bool:
        return False

    def open(self, address: str) -> SimulatedChannel:
        return SimulatedChannel(self._network, self._host, address.partition(":")[0])


class SimulatedServer:
    def __init__(self, network: Network, host: str, process: Process) -> None:
        self._network = network
        self._host = host
        self.process = process
        self._handlers: list[grpc.GenericRpcHandler] = []

    def listen(self, host: str, port: int) -> int:
        return port or 1

    def add(self, services: Sequence[tuple[Any, object]]) -> None:
        self._handlers = [service_handler(*pair) for pair in services]

    async def start(self) -> None:
        self._network.servers[self._host] = self

    async def retire(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        if self._network.servers.get(self._host) is self:
            del self._network.servers[self._host]
        mine = [call for call in self._network.calls.values() if call.server == self._host]
        if mine and grace_s:
            await asyncio.sleep(min(grace_s, 0.1))
        for call in mine:
            call.broken("server stopped")

    def find(self, path: str) -> Any:
        for handler in self._handlers:
            found = handler.service(_Details(path))
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: tuple[Any, ...] = ()


class SimulatedChannel:
    """What ``rpc.ServiceStub`` builds its callables from."""

    def __init__(self, network: Network, client: str, server: str) -> None:
        self._network = network
        self._ends = client, server
        self._calls: dict[int, _Call] = {}

    def _shape(self, streams_in: bool, streams_out: bool) -> Callable[..., Any]:
        def build(path: str, *, request_serializer: Any, response_deserializer: Any) -> Callable[..., Any]:
            def call(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> _Call:
                client, server = self._ends
                made = _Call(
                    self._network, client, server, path, streams_in, streams_out, response_deserializer
                )
                self._calls[made.number] = made
                made.on_end(lambda: self._calls.pop(made.number, None))
                made.begin(request, request_serializer, timeout, tuple(metadata or ()))
                return made

            return call

        return build

    unary_unary = property(lambda self: self._shape(False, False))
    unary_stream = property(lambda self: self._shape(False, True))
    stream_unary = property(lambda self: self._shape(True, False))
    stream_stream = property(lambda self: self._shape(True, True))

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls.values()):
            call.cancel()

    async def __aenter__(self) -> SimulatedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Stream:
    """One direction of a call: messages arrive in the order they were sent in, or stop arriving."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network = network
        self._ends = source, target
        self._last_s = 0.0
        self.stalled_s = float("inf")

    def send(self, arrive: Callable[..., None], *arguments: Any) -> None:
        network = self._network
        if network.closed or self.stalled_s < float("inf"):
            return
        if network.lost(*self._ends):
            self.stalled_s = network.loop.now_s
            return
        self._last_s = max(network.loop.now_s + network.delay_s(*self._ends), self._last_s + 1e-6)
        # It is the network that carries it, not the process that sent it: that may die meanwhile.
        network.loop.call_at(self._last_s, arrive, *arguments, context=contextvars.Context())


class _Call:
    """A call, as ``grpc.aio`` gives it to its caller."""

    def __init__(
        self,
        network: Network,
        client: str,
        server: str,
        path: str,
        streams_in: bool,
        streams_out: bool,
        deserialize: Any,
    ) -> None:
        self.network = network
        self.number = network.number()
        self.began_s = network.loop.now_s
        self.client, self.server, self.path = client, server, path
        self._streams_in, self._streams_out = streams_in, streams_out
        self._deserialize = deserialize or (lambda message: message)
        self._out = _Stream(network, client, server)
        self._back = _Stream(network, server, client)
        self._messages: deque[bytes] = deque()
        self._initial: Any = None
        self._status: tuple[Code, str, Any] | None = None
        self._cancelled = False
        self._news = asyncio.Event()
        self._ended: list[Callable[[], Any]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._pump: asyncio.Task[None] | None = None
        self.served: list[_Served] = []

    @property
    def stalled_s(self) -> float:
        return min(self._out.stalled_s, self._back.stalled_s)

    def on_end(self, function: Callable[[], Any]) -> None:
        self._ended.append(function)

    # ---- the caller's side ----

    def begin(self, request: Any, serialize: Any, timeout_s: float | None, metadata: tuple[Any, ...]) -> None:
        network = self.network
        network.calls[self.number] = self
        self.on_end(lambda: network.calls.pop(self.number, None))
        if timeout_s is not None:
            self._timer = network.loop.call_later(
                timeout_s, self._end, Code.DEADLINE_EXCEEDED, "Deadline Exceeded", None
            )
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._serialize = serialize or (lambda message: message)
        self._log: list[bytes | None] = []
        self._twice = bool(network.weather.duplicated) and network.rng.random() < network.weather.duplicated
        first = _Served(self, answers=True)
        self.served.append(first)
        self._out.send(first.arrive)
        if not self._streams_in:
            self._put(first, request)
            self._put_end(first)
        elif hasattr(request, "__aiter__"):
            self._pump = network.loop.create_task(self._feed(first, request))
        else:
            for message in request:
                self._put(first, message)
            self._put_end(first)

    async def _feed(self, first: _Served, request: AsyncIterator[Any]) -> None:
        async for message in request:
            self._put(first, message)
        self._put_end(first)

    def _put(self, served: _Served, message: Any) -> None:
        raw = self.network.damage(self._serialize(message))
        self._log.append(raw)
        self._out.send(served.receive, raw)

    def _put_end(self, served: _Served) -> None:
        self._out.send(served.receive, None)
        if self._twice:  # the whole call arrives once more, later, and nobody hears the answer
            network = self.network
            second = _Served(self, answers=False)
            after_s = network.rng.uniform(0, DUPLICATE_WITHIN_S)
            network.loop.call_later(
                after_s, self._repeat, second, list(self._log), context=contextvars.Context()
            )

    def _repeat(self, second: _Served, messages: list[bytes | None]) -> None:
        if self.network.closed or self.network.lost(self.client, self.server):
            return
        self.served.append(second)
        second.arrive()
        for message in [*messages, None]:
            second.receive(message)

    def cancel(self) -> bool:
        if self._status is None:
            self._cancelled = True
            self._end(Code.CANCELLED, "Locally cancelled", None)
        return self._cancelled

    def broken(self, why: str) -> None:
        """The connection is gone: both sides see it."""
        for served in self.served:
            served.cancel()
        self._end(Code.UNAVAILABLE, why, None)

    async def initial_metadata(self) -> Any:
        while self._initial is None and self._status is None:
            self._news.clear()
            await self._news.wait()
        return self._initial or ()

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        try:
            while self._status is None:
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise()
        return self._deserialize(self._messages.popleft())

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Any:
        try:
            while not self._messages and self._status is None:
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._messages and not self._cancelled:
            return self._deserialize(self._messages.popleft())
        self._raise()
        raise StopAsyncIteration

    def _raise(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code != Code.OK:
            raise grpc.aio.AioRpcError(code, self._initial or (), trailing or (), details)

    def _end(self, code: Code, details: str, trailing: Any) -> None:
        if self._status is not None:
            return
        self._status = code, details, trailing
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.cancel()
        if code != Code.OK:
            for served in self.served:  # a reset stream tells the other side, if it gets there
                self._out.send(served.cancel)
        for function in self._ended:
            function()
        self._news.set()

    # ---- arriving at the caller ----

    def got_initial(self, metadata: Any) -> None:
        self._initial = metadata
        self._news.set()

    def got(self, message: bytes) -> None:
        if self._status is None:
            self._messages.append(message)
            self._news.set()

    def got_end(self, code: Code, details: str, trailing: Any) -> None:
        self._end(code, details, trailing)


class _Served:
    """A call where it is served. ``answers=False``: a ghost, whose caller has its answer from another."""

    def __init__(self, call: _Call, *, answers: bool) -> None:
        self._call = call
        self._answers = answers
        self._requests: deque[bytes | None] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False

    def arrive(self) -> None:
        call, network = self._call, self._call.network
        server = network.servers.get(call.server)
        if server is None or self._gone:
            self._status(Code.UNAVAILABLE, "connection refused", None)
            return
        handler = server.find(call.path)
        if handler is None:
            self._status(Code.UNIMPLEMENTED, call.path, None)
            return
        self._task = server.process.spawn(self._serve(handler))
        if call._timeout_s is not None:
            self._timer = network.loop.call_later(call._timeout_s, self.cancel)
            self._task.add_done_callback(lambda _: self._timer.cancel() if self._timer else None)

    def receive(self, message: bytes | None) -> None:
        self._requests.append(message)
        self._news.set()

    def cancel(self) -> None:
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    # ---- what handlers are given ----

    def invocation_metadata(self) -> Any:
        return self._call._metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._send(self._call.got_initial, tuple(metadata))

    async def abort(self, code: Code, details: str = "", trailing: Any = ()) -> None:
        self._status(code, details, trailing)
        raise grpc.aio.AbortError

    # ---- inside ----

    async def _serve(self, handler: Any) -> None:
        requests = _Requests(self, handler.request_deserializer)
        try:
            request: Any = requests if handler.request_streaming else await anext(requests)
            name = ("stream" if handler.request_streaming else "unary") + (
                "_stream" if handler.response_streaming else "_unary"
            )
            behavior = getattr(handler, name)
            serialize = handler.response_serializer or (lambda message: message)
            if handler.response_streaming:
                answers = behavior(request, self)
                try:
                    async for answer in answers:
                        self._send(self._call.got, self._call.network.damage(serialize(answer)))
                finally:
                    await answers.aclose()
            else:
                answer = await behavior(request, self)
                self._send(self._call.got, self._call.network.damage(serialize(answer)))
            self._status(Code.OK, "", None)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._status(Code.CANCELLED, "", None)
            raise
        except StopAsyncIteration:
            self._status(Code.INTERNAL, "no request", None)
        except Exception as error:
            self._call.network.failures.append(f"{self._call.path} raised {error!r}")
            self._status(Code.UNKNOWN, repr(error), None)

    def _send(self, arrive: Callable[..., None], *arguments: Any) -> None:
        if self._answers:
            self._call._back.send(arrive, *arguments)

    def _status(self, code: Code, details: str, trailing: Any) -> None:
        self._send(self._call.got_end, code, details, trailing)


class _Requests:
    """The messages of a call as they arrive."""

    def __init__(self, served: _Served, deserialize: Any) -> None:
        self._served = served
        self._deserialize = deserialize or (lambda message: message)

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        served = self._served
        while not served._requests:
            served._news.clear()
            await served._news.wait()
        message = served._requests.popleft()
        if message is None:
            raise StopAsyncIteration
        return self._deserialize(message)
