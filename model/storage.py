"""A folder of files behind a local path or any fsspec URL, read by byte ranges and counted."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cedar.model.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Range = tuple[str, int, int]
"""A file's name, the first byte, and the byte after the last."""

T = TypeVar("T")
_READERS: Final = 4
_BLOCK_READERS: Final = 16
_PIECE_BYTES: Final = 1 << 26  # of one request to a remote store


class Storage:
    """Files of one checkpoint folder. Thread-safe; `bytes_read` counts what was asked of the file system.

    Byte offsets are absolute. A range that ends before it should raises CheckpointError naming the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        import fsspec  # not needed by those who read no checkpoint

        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(path)
        self._root: str = root.rstrip("/")
        self._local = "file" in _protocols(self._fs)
        self._lock = threading.Lock()
        self._maps: dict[str, mmap.mmap] = {}
        self.bytes_read = 0

    def exists(self, name: str) -> bool:
        """Whether the folder holds file `name`."""
        return bool(self._fs.isfile(self._join(name)))

    def size(self, name: str) -> int:
        """Bytes of file `name`."""
        try:
            return int(self._fs.info(self._join(name))["size"])
        except FileNotFoundError:
            raise CheckpointError(name, "missing", f"a file in {self.path}") from None

    def read_all(self, name: str) -> bytes:
        """The whole file."""
        return self.read(name, 0, self.size(name))

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of file `name`."""
        if begin == end:
            return b""
        try:
            data = bytes(self._fs.cat_file(self._join(name), start=begin, end=end))
        except FileNotFoundError:
            raise CheckpointError(name, "missing", f"a file in {self.path}") from None
        self._count(name, len(data), begin, end)
        return data

    def read_tensor(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Bytes [begin, end) as a writable uint8 tensor of its own memory."""
        import torch  # those who read only text files need none

        buffer = torch.empty(end - begin, dtype=torch.uint8)
        if begin == end:
            return buffer
        view = buffer.numpy().data
        if self._local:
            with open(self._join(name), "rb") as file:
                file.seek(begin)
                got = file.readinto(view)
            self._count(name, got, begin, end)
            return buffer
        for at in range(begin, end, _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, end)
            view[at - begin : stop - begin] = self.read(name, at, stop)
        return buffer

    def read_tensors(self, ranges: Sequence[Range]) -> Iterator[torch.Tensor]:
        """`read_tensor` of every range in order, a few of them ahead on threads."""
        return _in_order(self.read_tensor, ranges, _READERS)

    def read_blocks(self, ranges: Sequence[Range]) -> Iterator[bytes]:
        """`read` of every range in order, many of them ahead on threads: for small ones."""
        return _in_order(self.read, ranges, _BLOCK_READERS)

    def map_tensor(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Bytes [begin, end) as uint8 without reading them, where the file is local; elsewhere `read_tensor`.

        The map is private (copy on write) and lives as long as a tensor over it.
        """
        if not self._local or begin == end:
            return self.read_tensor(name, begin, end)
        import torch

        with self._lock:
            if name not in self._maps:
                with open(self._join(name), "rb") as file:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            mapped = self._maps[name]
        return torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=begin)

    def _count(self, name: str, got: int, begin: int, end: int) -> None:
        with self._lock:
            self.bytes_read += got
        if got != end - begin:
            raise CheckpointError(
                f"{name} bytes {begin} to {end}", f"{got} bytes", f"{end - begin} bytes: truncated"
            )

    def _join(self, name: str) -> str:
        return os.path.join(self._root, name) if self._local else f"{self._root}/{name}"


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _in_order(read: Callable[[str, int, int], T], ranges: Sequence[Range], readers: int) -> Iterator[T]:
    with ThreadPoolExecutor(readers, thread_name_prefix="cedar-checkpoint") as pool:
        todo = iter(ranges)
        running: list[Future[T]] = [pool.submit(read, *item) for item in islice(todo, readers)]
        while running:
            result = running.pop(0).result()
            with suppress(StopIteration):
                running.append(pool.submit(read, *next(todo)))
            yield result
