"""The peer's side of the comparison with LMCache's local disk: runs under the Python that has LMCache.

``python store_lmcache.py DIRECTORY`` reads commands from stdin ("put N KEY..." or "get N KEY...", values of
N bytes made from the key) and answers with seconds, so that the caller can take turns with it. The back end
is a library: files of one chunk each, written and read by this process itself, not flushed to the disk.
It checks nothing; what is read is checked here, as the node's clients do. Standard library, torch, xxhash and
LMCache only: nothing of Cedar is installed there.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import xxhash

BUFFER_BYTES = 128 << 20


class DiskBackend:
    """LMCache's back end, as its engine sets it up without a GPU: chunks of bytes in, chunks of bytes out."""

    def __init__(self, directory: str) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
        from lmcache.v1.memory_allocators.host_memory_allocator import (  # type: ignore[import-not-found]
            HostMemoryAllocator,
        )
        from lmcache.v1.memory_management import MemoryFormat  # type: ignore[import-not-found]
        from lmcache.v1.storage_backend.local_cpu_backend import (  # type: ignore[import-not-found]
            LocalCPUBackend,
        )
        from lmcache.v1.storage_backend.local_disk_backend import (  # type: ignore[import-not-found]
            LocalDiskBackend,
        )

        self._torch = torch
        self._format = MemoryFormat.KV_2LTD
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, local_disk=directory, max_local_disk_size=8.0
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.checksums: dict[str, bytes] = {}
        self._memory = LocalCPUBackend(
            config, dst_device="cpu", memory_allocator=HostMemoryAllocator(BUFFER_BYTES)
        )
        self._disk = LocalDiskBackend(config, loop, self._memory, dst_device="cpu")

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> bool:
        """Returns once all of them are in their files."""
        written = threading.Semaphore(0)
        objects = []
        for value in values:
            chunk = self._memory.allocate(self._torch.Size([len(value)]), self._torch.uint8, self._format)
            memoryview(chunk.byte_array).cast("B")[:] = value
            objects.append(chunk)
        self._disk.batched_submit_put_task(
            list(map(self._key, keys)), objects, on_complete_callback=lambda _: written.release()
        )
        done = all(written.acquire(timeout=30) for _ in keys)
        for chunk in objects:
            chunk.ref_count_down()
        return done

    def get(self, keys: Sequence[str]) -> bool:
        """Reads them into LMCache's own buffers; whether they are what was put."""
        found = self._disk.batched_get_blocking(list(map(self._key, keys)))
        good = all(
            chunk is not None and xxhash.xxh3_128_digest(chunk.byte_array) == self.checksums[key]
            for key, chunk in zip(keys, found, strict=True)
        )
        for chunk in found:
            if chunk is not None:
                chunk.ref_count_down()
        return good

    def _key(self, name: str) -> Any:
        from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found]

        return CacheEngineKey("bench", 1, 0, int(name[:15], 16), self._torch.uint8)


def main() -> None:
    """Entry point; see the module docstring."""
    backend = DiskBackend(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        verb, size, *keys = line.split()
        if verb == "put":
            values = [hashlib.shake_128(key.encode()).digest(int(size)) for key in keys]
            backend.checksums.update(zip(keys, map(xxhash.xxh3_128_digest, values), strict=True))
            started_s = time.perf_counter()
            good = backend.put(keys, values)
        else:
            started_s = time.perf_counter()
            good = backend.get(keys)
        print(time.perf_counter() - started_s if good else -1.0, flush=True)


if __name__ == "__main__":
    main()
