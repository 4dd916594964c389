"""The one thread of a worker on which the network runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cedar.actors.errors import Unavailable

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Runs submitted calls one at a time, in order; between them ``step`` while it reports work.

    ``threads``: torch's threads inside one operation. An exception out of ``step`` is a bug: ``on_failure``
    is called with it (on this thread) and no further step is taken. Calls go on, so that what is left can be
    torn down.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        step: Callable[[], bool] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._threads = threads
        self._step = step
        self._on_failure = on_failure
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._awake = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def busy_s(self) -> float:
        """How long the call or step that runs now has been running; 0 when none does."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def wake(self) -> None:
        """Say that ``step`` may have work."""
        with self._condition:
            self._awake = True
            self._condition.notify()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; its future may be cancelled until the call begins. Unavailable once closed."""
        future: Future[T] = Future()
        with self._condition:
            if self._closing:
                raise Unavailable("the worker is stopping")
            self._calls.append((call, future))  # type: ignore[arg-type]  # a Future of T is one of object
            self._condition.notify()
        return future

    async def call(self, call: Callable[[], T]) -> T:
        """Run a call and wait for it.

        When the waiter is cancelled, a call that has not begun never will; one that has begun is waited for
        all the same, so that the memory it writes can be given away afterwards.
        """
        future = self.submit(call)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not future.cancel():
                await _finished(waiter)
            raise

    def close(self) -> None:
        """End the thread after the call that runs now; queued calls are cancelled. Blocks; idempotent."""
        with self._condition:
            self._closing = True
            pending = list(self._calls)
            self._calls.clear()
            self._condition.notify()
        for _, future in pending:
            future.cancel()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        stepping = self._step is not None
        while True:
            self._busy_since = None
            with self._condition:
                while not self._calls and not self._awake and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                queued = self._calls.popleft() if self._calls else None
            self._busy_since = time.monotonic()
            if queued is not None:
                _perform(*queued)
                continue
            self._awake = False
            if stepping and self._step is not None:
                try:
                    if self._step():
                        self.wake()
                except BaseException as error:
                    _log.exception("the engine's step failed")
                    stepping = False
                    if self._on_failure is not None:
                        self._on_failure(error)


def _perform(call: Callable[[], object], future: Future[object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def _finished(waiter: asyncio.Future[T]) -> None:
    """Wait for a call that has begun, however often the waiter is cancelled."""
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue
    if not waiter.cancelled():
        waiter.exception()  # seen: the waiter ends as cancelled
