"""What the machine has: memory that this process may use, and free disk."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_KEPT_BYTES: Final = 32 << 20  # the most that glibc takes for the second
_MADV_HUGEPAGE: Final = 14
_HUGE_PAGE_BYTES: Final = 2 << 20

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """Bytes of RAM that this process may use: the machine's, or its control group's limit if smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return total


def free_disk_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write on the file system of ``path``. OSError if unreadable.

    ``path`` need not be there yet.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def allocated_bytes(path: Path) -> int:
    """Bytes that a file really takes on disk; 0 if it is gone."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def keep_freed_memory() -> bool:
    """Let this process reuse large blocks instead of giving them back to the kernel; whether it can.

    Every frame and every page of a commit is such a block: without this each costs a map and 57 page faults.
    The same as MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ in the environment, which win if set.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return True
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, 8 * _KEPT_BYTES))


def use_one_large_heap() -> bool:
    """Let this process's blocks lie in one heap of large pages, after ``keep_freed_memory``; whether it can.

    For a process that moves megabytes and computes little, before its threads: what is received, copied, sent
    and freed crosses memory several times, and with pages of 4 KiB part of that time goes into finding them.
    Takes address space now, memory when it is used.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.malloc.restype = ctypes.c_void_p
        if not libc.mallopt(_M_ARENA_MAX, 1):
            return False
        # The heap grows by these and keeps the room: seven are less than it is told to give back at.
        blocks = [libc.malloc(ctypes.c_size_t(_KEPT_BYTES - _HUGE_PAGE_BYTES)) for _ in range(7)]
        for block in blocks:
            libc.free(ctypes.c_void_p(block))
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                start, end = (int(text, 16) for text in line.split()[0].split("-"))
                start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
                size = ctypes.c_size_t(max(end - start, 0))
                return bool(libc.madvise(ctypes.c_void_p(start), size, _MADV_HUGEPAGE) == 0)
    except (OSError, AttributeError):
        return False  # not Linux, or not glibc
    return False
