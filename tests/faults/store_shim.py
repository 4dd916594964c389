"""A disk that fails when told: builds ``store_shim.c`` and rules it through the file that both sides map."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

SYNC: Final = 1  # fsync, fdatasync
WRITE: Final = 2  # write, writev, pwrite, pwritev
NAMES: Final = 4  # mkdir, unlink, rmdir, rename, and opening to write
SHORT: Final = -1  # "error": write half and say so


class NoCompiler(Exception):
    """There is nothing to build the shim with."""


class Orders(ctypes.Structure):
    """``struct orders`` of the shim."""

    calls: int
    skip: int
    times: int
    error: int
    delay_us: int
    segments_only: int
    hits: int
    seen: int
    bad_offset: int
    bad_bytes: int
    bad_file: bytes
    directory: bytes
    _fields_ = (
        ("calls", ctypes.c_int32),
        ("skip", ctypes.c_int32),
        ("times", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("delay_us", ctypes.c_int32),
        ("segments_only", ctypes.c_int32),
        ("hits", ctypes.c_int32),
        ("seen", ctypes.c_int32),
        ("bad_offset", ctypes.c_int64),
        ("bad_bytes", ctypes.c_int64),
        ("bad_file", ctypes.c_char * 256),
        ("directory", ctypes.c_char * 256),
    )


class FailingDisk:
    """The disk under ``directory`` as processes started with ``environment`` see it."""

    def __init__(self, library: Path, orders_file: Path, directory: Path) -> None:
        orders_file.write_bytes(bytes(ctypes.sizeof(Orders)))
        with open(orders_file, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.orders = Orders.from_buffer(self._map)
        self.orders.directory = os.fsencode(directory.resolve())
        self.orders.segments_only = 1
        self.environment = {"LD_PRELOAD": str(library), "STORE_SHIM": str(orders_file)}

    def fail(self, calls: int, error: int, *, after: int = 0, times: int = 1 << 30) -> None:
        """Let ``after`` matching calls pass, then fail ``times`` of them."""
        orders = self.orders
        orders.calls = orders.hits = orders.seen = 0
        orders.skip, orders.times, orders.error = after, times, error
        orders.calls = calls

    def read_only(self) -> None:
        """As after an ``errors=remount-ro``: nothing under the directory can be written or renamed."""
        self.orders.segments_only = 0
        self.fail(WRITE | NAMES, errno.EROFS)

    def slow(self, delay_s: float) -> None:
        """Every sync takes this much longer."""
        self.orders.delay_us = int(delay_s * 1e6)
        self.fail(SYNC, 0, times=0)

    def break_sectors(self, path: Path, offset: int, size: int) -> None:
        """Reads of this range fail: SIGBUS under a map made from now on, EIO in plain reads."""
        start = offset // 4096 * 4096
        self.orders.bad_file = os.fsencode(path.resolve())
        self.orders.bad_offset = start
        self.orders.bad_bytes = -(-(offset + size - start) // 4096) * 4096

    def heal(self) -> None:
        """From now on the disk works, except for its broken sectors."""
        self.orders.calls = self.orders.delay_us = 0


def build(directory: Path) -> Path:
    """Compile the shim. NoCompiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoCompiler("no C compiler here")
    library = directory / "store_shim.so"
    source = Path(__file__).with_name("store_shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise NoCompiler(f"{compiler} cannot build the shim: {made.stderr.strip()[-200:]}")
    return library
