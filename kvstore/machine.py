"""What the machine has: memory that this process may use, and free disk."""

from __future__ import annotations

import os
from pathlib import Path

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
    """Bytes that an ordinary user can still write on the file system of ``path``. OSError if unreadable."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def allocated_bytes(path: Path) -> int:
    """Bytes that a file really takes on disk; 0 if it is gone."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
