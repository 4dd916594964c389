"""What every stage worker is: a gRPC server on one event loop, with a beginning, a drain and an end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import grpc
from cedar.actors.config import WorkerConfig
from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import BooksError, PortInUse, Unavailable
from cedar.actors.status import Answering, Context
from cedar.kvstore.rpc import HealthServicer, add_health, server_options, service_handler
from cedar.v1 import stages_pb2
from cedar.v1.stages_pb2 import WorkerStatus, WorkerStatusRequest
from grpc_health.v1 import health_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_WORDS_S = 2.0
"""How long cancelled handlers may take to free what they hold."""


class StageWorker(ABC):
    """Base of the three workers. All of it belongs to the loop that called ``start``."""

    stage: ClassVar[str]

    def __init__(self, config: WorkerConfig) -> None:
        self._base = config
        self.incarnation = secrets.randbits(63) | 1
        self.address = ""
        self.counters: Counter[str] = Counter()
        self._server: grpc.aio.Server | None = None
        self._health: HealthServicer | None = None
        self._thread: EngineThread | None = None
        self._draining = False
        self._bug: BaseException | None = None
        self._calls = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Load, listen, and return the address. PortInUse when the port is taken; the model's own errors."""
        self._loop = asyncio.get_running_loop()
        self._thread = self._make_thread()
        self._thread.start()
        try:
            await self._open(self._thread)
            self.address = await self._listen()
        except BaseException:
            await self._shut()
            raise
        _log.info("%s worker %x listens on %s", self.stage, self.incarnation, self.address)
        return self.address

    def healthy(self) -> bool:
        """False after a bug, or when the engine's thread does not come back: the worker must be replaced."""
        stuck = self._thread is not None and self._thread.busy_s() > self._base.stuck_s
        return self._bug is None and not stuck

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait until nothing is active and nothing leased; whether that came in time."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self.active() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return not self.active()

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain (``drain_s``, else the config's; 0 is abrupt), end what is left, free all. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(
                self._stop(self._base.drain_s if drain_s is None else drain_s)
            )
        await asyncio.shield(self._stopping)

    def status(self) -> WorkerStatus:
        """Numbers for the directory, the live view and tests."""
        status = WorkerStatus(
            stage=self.stage,
            incarnation=self.incarnation,
            pid=os.getpid(),
            active=self.active(),
            draining=self._draining,
        )
        for name, value in self.counters.items():
            status.counters[name] = value
        self._describe(status)
        return status

    async def GetStatus(self, request: WorkerStatusRequest, context: Context) -> WorkerStatus:
        """The ``Worker`` service."""
        return self.status()

    def assert_idle(self) -> None:
        """BooksError unless no request is active and no page or slot is leased, and the books balance."""
        self._check_books()
        status = self.status()
        busy = {
            name: getattr(status, name)
            for name in ("active", "queued", "pages_leased", "slots_leased")
            if getattr(status, name)
        }
        if busy:
            raise BooksError(f"{self.stage} worker is not idle: {busy}")

    def active(self) -> int:
        """Requests that hold or wait for something here."""
        return self._calls

    @contextmanager
    def working(self, *, new: bool = True) -> Iterator[None]:
        """Around a call: counted while it lasts. ``new`` work is refused when draining or failed."""
        if new and self._draining:
            raise Unavailable(f"{self.stage} worker is draining")
        if new and self._bug is not None:
            raise Unavailable(f"{self.stage} worker has failed and is being replaced")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def on_bug(self, error: BaseException) -> None:
        """A bug was seen: the worker turns unhealthy. Loop thread only."""
        self.counters["bugs"] += 1
        if self._bug is None:
            self._bug = error
            if self._health is not None:
                self.background(self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING))

    @abstractmethod
    async def _open(self, thread: EngineThread) -> None:
        """Load what the stage needs, on its thread."""

    async def _break_off(self) -> None:  # noqa: B027  # most stages have nothing to add
        """End what is still active after the drain, so that its peers try elsewhere."""

    async def _close(self) -> None:  # noqa: B027
        """Close clients and background work. Called once the server is gone."""

    def _describe(self, status: WorkerStatus) -> None:  # noqa: B027
        """Fill in what the stage knows of itself."""

    def _check_books(self) -> None:  # noqa: B027
        """BooksError when pages or slots do not add up."""

    @abstractmethod
    def _service(self) -> str:
        """Name of the stage's service in stages.proto."""

    def _make_thread(self) -> EngineThread:
        return EngineThread(f"cedar-{self.stage}", self._base.threads)

    def _answering(self, context: Context) -> Answering:
        return Answering(context, self.stage, self.on_bug)

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something for the worker's life; what it raises is a bug."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s worker: background work failed", self.stage, exc_info=error)
            self.on_bug(error)

    async def _listen(self) -> str:
        server = grpc.aio.server(options=server_options())
        services = [stages_pb2.DESCRIPTOR.services_by_name[name] for name in (self._service(), "Worker")]
        server.add_generic_rpc_handlers(tuple(service_handler(service, self) for service in services))
        self._health = add_health(server, services)
        host = f"[{self._base.host}]" if ":" in self._base.host else self._base.host
        try:
            port = server.add_insecure_port(f"{host}:{self._base.port}")
        except RuntimeError:
            port = 0
        if port == 0:
            raise PortInUse("port", f"{host}:{self._base.port}", "free, on an address of this machine")
        await server.start()
        self._server = server
        return f"{host}:{port}"

    async def _stop(self, drain_s: float) -> None:
        if self._server is None:  # never started, or failed to
            return
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        await self.drain(drain_s)
        await self._break_off()
        await self._shut()

    async def _shut(self) -> None:
        if self._server is not None:
            await self._server.stop(0.2)
            self._server = None
            deadline = time.monotonic() + _LAST_WORDS_S
            while self._calls and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close)
