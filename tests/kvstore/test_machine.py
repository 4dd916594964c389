"""What a node's process asks of its allocator, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, threading
from pathlib import Path
from cedar.kvstore.machine import keep_freed_memory, use_one_large_heap

assert keep_freed_memory() and use_one_large_heap()
made = []
thread = threading.Thread(target=lambda: made.append(bytes(3_000_000)))
thread.start()
thread.join()
address, heap, flags = id(made[0]) + 2_500_000, False, ""  # the heap begins at no large page
for line in Path("/proc/self/smaps").read_text().splitlines():
    field = line.split()[0]
    if "-" in field and not field.endswith(":"):
        start, end = (int(text, 16) for text in field.split("-"))
        heap = start <= address < end and line.endswith("[heap]")
    elif heap and field == "VmFlags:":
        flags = line
print("hg" in flags.split())
"""


def test_blocks_of_all_threads_lie_in_one_heap_of_large_pages() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
