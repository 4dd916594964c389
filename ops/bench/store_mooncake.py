"""The peer's side of the comparison with the Mooncake store: runs under the Python that has Mooncake.

``python store_mooncake.py serve MASTER`` lends memory to the store; ``... client MASTER`` reads commands from
stdin ("put N KEY..." or "get N KEY...", values of N bytes made from the key) and answers with seconds, so
that the caller can take turns with it. TCP, values fetched from the lending process; the client checks each,
as the node's clients do. Standard library, xxhash and Mooncake only: nothing of Cedar is installed there.
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import xxhash

LENT_BYTES = 1 << 30
LOCAL_BYTES = 256 << 20


def connect(master: str, lent_bytes: int) -> Any:
    """A client of the store behind ``master``."""
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", lent_bytes, LOCAL_BYTES, "tcp", "", master)
    if status:
        raise SystemExit(f"Mooncake: setup failed with {status}")
    return store


def main() -> None:
    """Entry point; see the module docstring."""
    role, master = sys.argv[1:3]
    if role == "serve":
        store = connect(master, LENT_BYTES)
        print("ready", flush=True)
        sys.stdin.read()
        store.close()
        return
    store = connect(master, 0)
    checksums: dict[str, bytes] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        verb, size, *keys = line.split()
        if verb == "put":
            values = [hashlib.shake_128(key.encode()).digest(int(size)) for key in keys]
            checksums.update(zip(keys, map(xxhash.xxh3_128_digest, values), strict=True))
            started_s = time.perf_counter()
            failed = store.put_batch(keys, values)
        else:
            started_s = time.perf_counter()
            found = store.get_batch(keys)
            failed = [xxhash.xxh3_128_digest(value) for value in found] != [checksums[key] for key in keys]
        print(-1.0 if failed else time.perf_counter() - started_s, flush=True)
    store.close()


if __name__ == "__main__":
    main()
