"""Waits for the disk while the writer goes on writing: one sync at a time, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SyncThread:
    """``on_end`` is called, on that thread, when a sync has ended; ``outcome`` then says how."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._work: Callable[[], None] | None = None
        self._begin = threading.Semaphore(0)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="cedar-store-sync", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the sync that was started last is over."""
        return self._ended.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Begin a sync; the one before must be over."""
        self._ended.clear()
        self._work = work
        self._begin.release()

    def outcome(self) -> Exception | None:
        """Wait for the end of the sync: None, or what it raised. To be asked once.

        It is not kept: with it its traceback would keep the file open, and a dropped segment's room taken.
        """
        self._ended.wait()
        error, self._error = self._error, None
        return error

    def stop(self) -> None:
        """End the thread, once nothing is under way."""
        self._work = None
        self._begin.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._begin.acquire()
            work = self._work
            if work is None:
                return
            try:
                work()
                self._error = None
            except Exception as error:
                self._error = error
            self._ended.set()
            self._on_end()
