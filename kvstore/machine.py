"""What the machine has: memory that this process may use, and free disk."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 32 << 20  # the most that glibc takes for the second

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
