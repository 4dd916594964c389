"""The store as its users see it: a store that is dead, slow or lying is a miss, never an exception.

``match``, ``get_pages`` and ``get_window`` answer with less, puts answer "refused"; everything received is
verified here (header, key, model, checksum) before it is handed on. Every call has a deadline. After several
failures in a row the store is left alone for a moment (``breaker``); gRPC reconnects by itself.
What raises is a caller's mistake (InvalidRequest) and the cancelling of the caller's own task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from cedar.kvstore.breaker import Breaker
from cedar.kvstore.call_answer import answer_of, own_cancellation
from cedar.kvstore.call_guard import RETRY_AFTER
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.errors import CorruptValue, FrameError, InvalidRequest
from cedar.kvstore.frames import record_checksum
from cedar.kvstore.keys import KEY_BYTES
from cedar.kvstore.page_wire import page_frames, verified_values
from cedar.kvstore.put import PutCounts
from cedar.kvstore.rpc import ServiceStub, transport_options
from cedar.kvstore.shared_fetch import FellBehind, SharedFetch
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.transport import GrpcTransport, Transport
from cedar.kvstore.window_tier import WindowName
from cedar.kvstore.window_wire import assemble_window, window_frames
from cedar.v1 import store_pb2
from google.protobuf.message import DecodeError

log = logging.getLogger(__name__)
T = TypeVar("T")

_SERVICE = store_pb2.DESCRIPTOR.services_by_name["Store"]
_GUESSED_VALUE_BYTES = 256 << 10
_OLD_CHANNEL_S = 30.0  # calls under way when certificates change may take this long
_FAILURES = (grpc.RpcError, grpc.aio.UsageError, TimeoutError, DecodeError, FrameError, CorruptValue)


@dataclass(frozen=True)
class Match:
    """Leading pages that the store holds, and the window records at them, the longest first."""

    pages: int = 0
    windows: tuple[WindowName, ...] = ()


class StoreClient:
    """Client of one store node at ``address`` ("host:port"); belongs to one event loop.

    ``fingerprint``: the model whose pages are wanted; pages of another are treated as damaged.
    ``counters``: outcomes by name, for the user's metrics.
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: bytes | None = None,
        config: ClientConfig | None = None,
        tls: TlsConfig | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.address = address
        self.config = config or ClientConfig()
        self.counters: Counter[str] = Counter()
        self._fingerprint = fingerprint
        self._channel: grpc.aio.Channel | None = None
        self._stub: ServiceStub | None = None
        options = transport_options(
            max_message_bytes=self.config.max_message_bytes,
            keepalive_s=self.config.keepalive_s,
            keepalive_timeout_s=self.config.keepalive_timeout_s,
        )
        self._maker = (transport or GrpcTransport(tls)).channels(options.channel)
        self._retiring: set[asyncio.Task[None]] = set()
        self._breaker = Breaker(
            failures=self.config.breaker_failures,
            open_s=self.config.breaker_open_s,
            max_open_s=self.config.breaker_max_open_s,
        )
        self._fetches: dict[bytes, SharedFetch] = {}
        self._closed = False

    async def match(self, root: bytes, keys: Sequence[bytes], *, tenant: bytes = b"") -> Match:
        """How much of the chain ``keys`` under ``root`` the store holds; nothing when it does not answer.

        ``tenant``: its tenant domain, to whom the look-up is booked.
        """
        _expect_keys((root, *keys))
        request = store_pb2.MatchRequest(root_key=root, page_keys=b"".join(keys), tenant=tenant)
        response = await self._unary("MatchPrefix", request, self.config.match_timeout_s)
        if response is None:
            return Match()
        return Match(
            min(response.pages, len(keys)),
            tuple(
                WindowName(record.page_key, record.tokens, record.digest)
                for record in response.windows
                if len(record.page_key) == KEY_BYTES and len(record.digest) == KEY_BYTES and record.tokens
            ),
        )

    async def get_pages(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[int, memoryview], None]:
        """(index, value) of leading pages of ``keys``, in order, each a verified sealed value.

        The payload is ``value[HEADER_BYTES:]``. Ends at the first page that is missing, damaged or late: what
        came is usable. Equal fetches that run at the same time share one stream.
        """
        _expect_keys(keys)
        start = 0
        while start < len(keys) and not self._closed:
            wanted = keys[start:]
            try:
                async with aclosing(self._fetch(wanted).read()) as values:
                    async for index, value in values:
                        self.counters["pages_received"] += 1
                        yield start + index, value
                        reached = start + index + 1
                return
            except FellBehind:
                start = reached
                self.counters["fetches_restarted"] += 1

    async def put_pages(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int = 0, tenant: bytes = b""
    ) -> PutCounts:
        """Store sealed values of consecutive pages; answers when they are durable.

        ``first_page``: the place of the first in its chain. ``tenant``: its tenant domain.
        """
        if len(keys) != len(values):
            raise InvalidRequest("values", len(values), f"one for each of {len(keys)} keys")
        _expect_keys(keys)
        if not keys:
            return PutCounts()
        if not self._may_call():
            return PutCounts(refused=len(keys), reason="unavailable")
        frames = page_frames(keys, values, first_page=first_page, tenant=tenant)
        try:
            call = self._connected().PutPages(frames, timeout=self.config.put_timeout_s)
            response = await answer_of(call)
        except _FAILURES as error:
            return self._put_failed(error, len(keys))
        self._breaker.succeeded()
        answered = response.stored + response.present + response.conflicts + response.refused
        if answered != len(keys):
            self.counters["store_lied"] += 1
            return PutCounts(refused=len(keys), reason="invalid")
        reason = "full" if response.refused else ""
        return PutCounts(response.stored, response.present, response.conflicts, response.refused, reason)

    async def get_window(
        self, page_key: bytes, tokens: int, digest: bytes, *, tenant: bytes = b""
    ) -> bytes | None:
        """A window record, verified; None when it is gone or does not arrive whole and in time."""
        _expect_keys((page_key, digest))
        if not self._may_call():
            return None
        request = store_pb2.GetWindowRequest(page_key=page_key, tokens=tokens, digest=digest, tenant=tenant)
        try:
            async with asyncio.timeout(self.config.window_timeout_s):
                call = self._connected().GetWindow(request, timeout=self.config.window_timeout_s)
                name = WindowName(page_key, tokens, digest)
                record = await answer_of(assemble_window(call, name, self.config.max_window_bytes))
        except _FAILURES as error:
            self._failed("get_window", error)
            return None
        self._breaker.succeeded()
        return record

    async def put_window(
        self, page_key: bytes, tokens: int, digest: bytes, record: bytes, *, tenant: bytes = b""
    ) -> bool:
        """File a window record; whether the store keeps it. ``tenant``: its tenant domain."""
        _expect_keys((page_key, digest))
        if not self._may_call():
            return False
        name = WindowName(page_key, tokens, digest)
        frames = window_frames(name, record, record_checksum(record), tenant=tenant)
        try:
            response = await answer_of(
                self._connected().PutWindow(frames, timeout=self.config.window_timeout_s)
            )
        except _FAILURES as error:
            self._failed("put_window", error)
            return False
        self._breaker.succeeded()
        return bool(response.stored)

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of the node by name; empty when it does not answer."""
        response = await self._unary("Stats", store_pb2.StatsRequest(), self.config.stats_timeout_s)
        return {} if response is None else dict(response.values)

    async def close(self) -> None:
        """End running fetches and close the connection; from now on everything is a miss."""
        self._closed = True
        for fetch in list(self._fetches.values()):
            await fetch.cancel()
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = self._stub = None
        for task in list(self._retiring):
            task.cancel()
        if self._retiring:
            await asyncio.wait(list(self._retiring))

    # ---- inside ----

    def _fetch(self, keys: Sequence[bytes]) -> SharedFetch:
        """The running fetch of these keys, or a new one."""
        name = b"".join(keys)
        running = self._fetches.get(name)
        if running is not None and running.joinable:
            self.counters["fetches_joined"] += 1
            return running

        def ended(fetch: SharedFetch) -> None:
            if self._fetches.get(name) is fetch:
                del self._fetches[name]

        fetch = SharedFetch(
            self._values(keys),
            ahead_bytes=self.config.read_ahead_bytes,
            keep_bytes=self.config.lag_bytes,
            join_bytes=self.config.join_bytes,
            on_end=ended,
        )
        self._fetches[name] = fetch
        self.counters["fetches"] += 1
        return fetch

    async def _values(self, keys: Sequence[bytes]) -> AsyncGenerator[list[memoryview], None]:
        if not self._may_call():
            return
        config = self.config
        request = store_pb2.GetPagesRequest(page_keys=b"".join(keys))
        whole_s = config.stall_timeout_s + len(keys) * _GUESSED_VALUE_BYTES / config.transfer_bytes_per_s
        call = self._connected().GetPages(request, timeout=whole_s)
        values = verified_values(
            call,
            keys,
            fingerprint=self._fingerprint,
            stall_timeout_s=config.stall_timeout_s,
            max_value_bytes=config.max_value_bytes,
        )
        try:
            async with aclosing(values):
                async for found in values:
                    yield found
            self._breaker.succeeded()
        except _FAILURES as error:
            self._failed("get_pages", error)
        except asyncio.CancelledError:
            if own_cancellation():
                raise
            self._failed("get_pages", ConnectionError("the channel was closed"))
        finally:
            call.cancel()

    async def _unary(self, method: str, request: Any, timeout_s: float) -> Any:
        """The response, or None."""
        if not self._may_call():
            return None
        try:
            response = await answer_of(getattr(self._connected(), method)(request, timeout=timeout_s))
        except _FAILURES as error:
            self._failed(method, error)
            return None
        self._breaker.succeeded()
        return response

    def _connected(self) -> ServiceStub:
        if self._channel is not None and self._maker.outdated():
            old, self._channel, self._stub = self._channel, None, None
            task = asyncio.get_running_loop().create_task(old.close(_OLD_CHANNEL_S))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        if self._stub is None:
            self._channel = self._maker.open(self.address)
            self._stub = ServiceStub(self._channel, _SERVICE)
        return self._stub

    def _may_call(self) -> bool:
        if self._closed:
            return False
        if not self._breaker.allows(asyncio.get_running_loop().time()):
            self.counters["calls_skipped"] += 1
            return False
        return True

    def _failed(self, what: str, error: Exception) -> None:
        """Count a failure. A store that answers, even with a refusal, is not a dead one."""
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        if code == grpc.StatusCode.NOT_FOUND:
            self._breaker.succeeded()
            return
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED or status_lost(error):
            self.counters["store_busy"] += 1
            return
        self.counters["store_failures"] += 1
        if isinstance(error, (CorruptValue, FrameError, DecodeError)):
            self.counters["store_lied"] += 1
        log.warning("store %s: %s: %s", self.address, what, error if code is None else code.name)
        self._breaker.failed(asyncio.get_running_loop().time())

    def _put_failed(self, error: Exception, pages: int) -> PutCounts:
        self._failed("put_pages", error)
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED or status_lost(error):
            return PutCounts(refused=pages, reason="busy", retry_after_s=_retry_after_s(error))
        late = code == grpc.StatusCode.DEADLINE_EXCEEDED or isinstance(error, TimeoutError)
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return PutCounts(refused=pages, reason="invalid")
        return PutCounts(refused=pages, reason="timeout" if late else "unavailable")


def _expect_keys(keys: Sequence[bytes]) -> None:
    for length in set(map(len, keys)):
        if length != KEY_BYTES:
            raise InvalidRequest("key", f"{length} bytes", f"must be {KEY_BYTES} bytes")


def status_lost(error: Exception) -> bool:
    """The store ended a call that was still being written: gRPC's asyncio client may then lose the status.

    It was refused, most likely because the store is busy; in any case the store is alive.
    """
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() != grpc.StatusCode.INTERNAL:
        return False
    return error.details() == "Internal error from Core"


def _retry_after_s(error: Exception) -> float:
    metadata: Any = error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else None
    for name, value in metadata or ():
        if name == RETRY_AFTER:
            try:
                return max(int(value), 0) / 1000
            except ValueError:
                return 0.0
    return 0.0
