"""An event loop whose time is a number: it jumps to the next timer instead of waiting, in one fixed order.

Everything of the store that acts does so in tasks of an asyncio loop, so a loop like this one runs the real
code of several nodes in one thread, an hour in seconds, the same way each time. A *process* is what one node
or client would be alone: its tasks, and all that they start, know whose they are (a context variable), and
can be stopped for a while or for good, at any await, as SIGSTOP and SIGKILL do: nothing of it runs any more,
no ``finally`` either.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


MAX_STEPS = 500_000
"""Ten times what a history takes: more is something that goes round and round without time passing."""


class Deadlock(RuntimeError):
    """Nothing is left to happen, and the simulation still waits; or it never ends."""


class Process:
    """The tasks of one program."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.running = True
        self.killed = False
        self._loop = loop
        self._parked: list[asyncio.Handle] = []
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        return self._loop.create_task(work, context=context)

    def park(self, handle: asyncio.Handle) -> None:
        """Something was to happen in a process that does not run."""
        self._parked.append(handle)

    def pause(self) -> None:
        """Stop, in the middle of everything."""
        self.running = False

    def resume(self) -> None:
        """Go on: what has become due meanwhile happens now."""
        self.running = True
        parked, self._parked = self._parked, []
        self._loop.ready(parked)

    def kill(self) -> None:
        """Stop for good."""
        self.killed = True
        self.pause()


class _Task(asyncio.Task[Any]):
    """Hashed by its number, so that sets of tasks have the same order each time."""

    def __init__(self, number: int, *arguments: Any, **keywords: Any) -> None:
        self.number = number
        super().__init__(*arguments, **keywords)

    def __hash__(self) -> int:
        return self.number


class _Call:
    """A callback that asks first whether its process runs."""

    __slots__ = ("arguments", "callback", "handle", "process")

    def __init__(self, process: Process, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.process = process
        self.callback = callback
        self.arguments = arguments
        self.handle: Any = None

    def __call__(self) -> None:
        if self.process.running:
            self.callback(*self.arguments)
        else:
            self.process.park(self.handle)


class _Jump:
    """In the place of a selector: waiting is adding."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> tuple[()]:
        if timeout is None:
            raise Deadlock("nothing is left to happen")
        if self._loop.steps > MAX_STEPS:
            raise Deadlock(f"no end after {MAX_STEPS} steps")
        self._loop.now_s += timeout
        return ()

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. ``failures``: what went wrong in tasks and callbacks that nobody waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.steps = 0
        self.failures: list[str] = []
        self._selector = _Jump(self)
        self._numbers = 0
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        process = (PROCESS.get() if context is None else context.get(PROCESS)) or None
        self.steps += 1
        if process is None:
            return super().call_soon(callback, *args, context=context)
        call = _Call(process, callback, args)
        call.handle = super().call_soon(call, context=context)
        return call.handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        process = (PROCESS.get() if context is None else context.get(PROCESS)) or None
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        call = _Call(process, callback, args)
        call.handle = super().call_at(when, call, context=context)
        return call.handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def ready(self, handles: list[asyncio.Handle]) -> None:
        """Let these run next."""
        self._ready.extend(handles)

    def _make_task(self, loop: Any, work: Any, context: Any = None) -> asyncio.Task[Any]:
        self._numbers += 1
        task = _Task(self._numbers, work, loop=loop, context=context)
        process = (PROCESS.get() if context is None else context.get(PROCESS)) or None
        if process is not None:
            process.tasks[task.number] = task
            task.add_done_callback(lambda done: process.tasks.pop(done.number, None))
        return task

    def _failed(self, loop: Any, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
