"""Objects behind fsspec, made fit to wait for: every call has a deadline, and a storm of failures a breaker.

fsspec is imported at the first call. Each call runs on a daemon thread of its own, so that one which hangs is
left behind instead of holding its caller; at most ``max_calls`` run at a time, hung ones included. No file
system is taken from fsspec's cache of instances nor used after a fork, and no listing is cached: its event
loop dies in a forked child, and its lists are as old as they please.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from cedar.kvstore.breaker import Breaker
from cedar.kvstore.errors import InvalidRequest

T = TypeVar("T")
_HOUR_S: Final = 3600.0


class ColdUnavailable(RuntimeError):
    """The cold tier does not answer, answers with errors, or is being left alone for a while."""


@dataclass(frozen=True, kw_only=True)
class ColdConfig:
    """The cold tier: ``url`` is a folder that fsspec opens (``/mnt/cold``, ``memory://x``, ``s3://b/x``).

    ``ttl_s``: how long a pack is kept. ``grace_s``: age at which a pack without a manifest is litter.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    pack_bytes: int = 128 << 20
    ttl_s: float = 30 * 24 * _HOUR_S
    grace_s: float = _HOUR_S
    read_bytes: int = 8 << 20
    call_timeout_s: float = 30.0
    upload_timeout_s: float = 600.0
    attempts: int = 3
    retry_wait_s: float = 0.2
    max_calls: int = 8
    breaker_failures: int = 4
    breaker_open_s: float = 2.0
    breaker_max_open_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.url:
            raise InvalidRequest("url", self.url, "a folder, or a URL that fsspec opens")
        for name in (
            "pack_bytes", "ttl_s", "grace_s", "read_bytes", "call_timeout_s", "upload_timeout_s",
            "attempts", "max_calls", "breaker_failures", "breaker_open_s", "breaker_max_open_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise InvalidRequest(name, getattr(self, name), "must be above 0")


@dataclass(frozen=True)
class ObjectInfo:
    """One listed object: its name below the folder, and its size."""

    name: str
    size: int


@dataclass
class _Process:
    """What belongs to one process and must not outlive a fork."""

    pid: int
    filesystem: Any
    root: str
    breaker: Breaker
    slots: threading.Semaphore


class Objects:
    """Named objects below ``config.url``. Any thread may call; every method blocks at most its deadline.

    ``connect``: gives (file system, root path); tests pass their own.
    """

    def __init__(
        self, config: ColdConfig, *, connect: Callable[[ColdConfig], tuple[Any, str]] | None = None
    ) -> None:
        self.config = config
        self._connect = connect or _fsspec
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``[start, end)`` of an object, fewer if it is shorter. FileNotFoundError, ColdUnavailable."""
        return self._retried(lambda at, root: bytes(at.cat_file(f"{root}/{name}", start, end)))

    def write(self, name: str, data: bytes) -> None:
        """Put a small object, whole. ColdUnavailable."""
        self._retried(lambda at, root: _put(at, f"{root}/{name}", data))

    def upload(self, path: Path, name: str) -> None:
        """Put a local file. ColdUnavailable."""
        self._retried(
            lambda at, root: _upload(at, path, f"{root}/{name}"), timeout_s=self.config.upload_timeout_s
        )

    def size(self, name: str) -> int:
        """Bytes of an object. FileNotFoundError, ColdUnavailable."""
        return self._retried(lambda at, root: int(at.info(f"{root}/{name}")["size"]))

    def list(self, folder: str) -> list[ObjectInfo]:
        """Objects in a folder as the file system lists them, which may be a while ago. ColdUnavailable."""
        return self._retried(lambda at, root: _list(at, f"{root}/{folder}", folder))

    def modified_s(self, name: str) -> float | None:
        """When an object was last written, in unix seconds; None when the file system does not say."""

        def ask(at: Any, root: str) -> float | None:
            try:
                return float(at.modified(f"{root}/{name}").timestamp())
            except NotImplementedError:
                return None

        return self._retried(ask)

    def delete(self, name: str) -> bool:
        """Remove an object; False when it was not there. ColdUnavailable."""
        try:
            self._retried(lambda at, root: at.rm_file(f"{root}/{name}"))
        except FileNotFoundError:
            return False
        return True

    def _retried(self, work: Callable[[Any, str], T], *, timeout_s: float | None = None) -> T:
        deadline_s = timeout_s or self.config.call_timeout_s
        process = self._of_this_process()
        for attempt in range(self.config.attempts):
            if not process.breaker.allows(time.monotonic()):
                raise ColdUnavailable(f"{self.config.url}: left alone after repeated failures")
            try:
                result = self._bounded(process, work, deadline_s)
            except FileNotFoundError:
                process.breaker.succeeded()
                raise
            except ColdUnavailable:
                process.breaker.failed(time.monotonic())
                raise
            except Exception as error:
                process.breaker.failed(time.monotonic())
                if attempt + 1 == self.config.attempts:
                    raise ColdUnavailable(f"{self.config.url}: {type(error).__name__}: {error}") from error
                time.sleep(self.config.retry_wait_s * 2**attempt)
            else:
                process.breaker.succeeded()
                return result
        raise AssertionError("attempts is above 0")

    def _bounded(self, process: _Process, work: Callable[[Any, str], T], timeout_s: float) -> T:
        """The result within ``timeout_s``, from a thread that is abandoned if it takes longer."""
        if not process.slots.acquire(timeout=timeout_s):
            raise ColdUnavailable(f"{self.config.url}: {self.config.max_calls} calls hang")
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(work(process.filesystem, process.root))
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                process.slots.release()

        threading.Thread(target=run, name="cedar-cold", daemon=True).start()
        try:
            return outcome.result(timeout_s)
        except FutureTimeout:
            if outcome.done():
                return outcome.result()  # it raised a TimeoutError of its own
            raise ColdUnavailable(f"{self.config.url}: no answer within {timeout_s:g} s") from None

    def _of_this_process(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.pid != os.getpid():
                config = self.config
                try:
                    filesystem, root = self._connect(config)
                except (ImportError, ValueError) as error:
                    raise InvalidRequest("url", config.url, str(error)) from None
                breaker = Breaker(
                    failures=config.breaker_failures,
                    open_s=config.breaker_open_s,
                    max_open_s=config.breaker_max_open_s,
                )
                slots = threading.Semaphore(config.max_calls)
                self._process = _Process(os.getpid(), filesystem, root.rstrip("/"), breaker, slots)
            return self._process


def _fsspec(config: ColdConfig) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(
        config.url, skip_instance_cache=True, use_listings_cache=False, **config.options
    )
    return filesystem, str(root)


def _put(at: Any, path: str, data: bytes) -> None:
    at.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    at.pipe_file(path, data)


def _upload(at: Any, source: Path, path: str) -> None:
    at.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    at.put_file(str(source), path)


def _list(at: Any, path: str, folder: str) -> list[ObjectInfo]:
    at.invalidate_cache(path)
    try:
        found = at.ls(path, detail=True)
    except FileNotFoundError:
        return []
    return [
        ObjectInfo(f"{folder}/{entry['name'].rsplit('/', 1)[-1]}", int(entry["size"] or 0))
        for entry in found
        if entry["type"] == "file"
    ]
