"""Pages whose bytes follow from their key, and a tier in a process of its own that takes orders.

As a program it opens the tier in DIRECTORY with SETTINGS (JSON), prints one line, then answers one JSON line
for each on its standard input: ``["put", salt, pages]`` and so on, the methods of ``Orders``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from cedar.kvstore.clock import Clock
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.errors import Refused
from cedar.kvstore.header import seal_value
from cedar.kvstore.keys import chain_keys, root_key
from cedar.kvstore.put import PutItem
from cedar.kvstore.ssd_tier import SsdTier

FINGERPRINT = hashlib.sha256(b"a model").digest()
ROOT = root_key(b"test-format", FINGERPRINT, b"tenant")
PAGE_TOKENS = 32
SIZE = 12_000  # a value of several blocks, so that it can tear


def keys_of(salt: int, pages: int) -> list[bytes]:
    """The keys of a chain."""
    ids = [salt * 65_537 + i for i in range(pages * PAGE_TOKENS)]
    return chain_keys(ROOT, ids, [], PAGE_TOKENS)


def value_of(key: bytes, size: int = SIZE) -> bytes:
    """The only value that is right under ``key``."""
    payload = hashlib.shake_128(key).digest(size)
    return seal_value(payload, fingerprint=FINGERPRINT, page_key=key, tokens=PAGE_TOKENS)


def items_of(salt: int, pages: int) -> list[PutItem]:
    """What to put for a chain."""
    keys = keys_of(salt, pages)
    return [PutItem(key, value_of(key), index, b"tenant") for index, key in enumerate(keys)]


def open_tier(
    directory: Path, *, background: bool = False, clock: Clock | None = None, **changes: Any
) -> SsdTier:
    """A small tier."""
    settings: dict[str, Any] = {
        "directory": directory,
        "capacity_bytes": 64 * MIB,
        "segment_bytes": MIB,
        "reserve_bytes": MIB,
        "commit_wait_s": 0.0,
        "disk_retry_s": 0.05,
    }
    return SsdTier(SsdConfig(**settings | changes), clock=clock, background=background)


def count(tier: SsdTier, salt: int, pages: int) -> list[int]:
    """[right, missing, wrong] values of a chain."""
    found = [0, 0, 0]
    for key in keys_of(salt, pages):
        value = tier.get(key)
        found[1 if value is None else 0 if value == value_of(key) else 2] += 1
    return found


class Orders:
    """What the program does when told."""

    def __init__(self, tier: SsdTier) -> None:
        self.tier = tier

    def put(self, salt: int, pages: int) -> dict[str, Any]:
        """Put a chain and wait for the answer."""
        began_s = time.monotonic()
        counts = self.tier.put(items_of(salt, pages)).result(60)
        return vars(counts) | {"took_s": time.monotonic() - began_s}

    def flood(self, first: int, chains: int, pages: int) -> dict[str, float]:
        """Put many chains at once; what became of them, and of the queue."""
        commits, most = self.tier.counters["store_commits"], 0.0
        answers, refused = [], 0
        for salt in range(first, first + chains):
            try:
                answers.append(self.tier.put(items_of(salt, pages)))
            except Refused:
                refused += pages
            most = max(most, self.tier.stats()["store_queue_bytes"])
        stored = sum(answer.result(60).stored for answer in answers)
        commits = self.tier.counters["store_commits"] - commits
        return {"stored": stored, "refused": refused, "most_queued": most, "commits": commits}

    def get(self, salt: int, pages: int) -> list[int]:
        """[right, missing, wrong]"""
        return count(self.tier, salt, pages)

    def write_indices(self) -> int:
        """Bring every index up to date; how many could not be."""
        committer = self.tier._committer
        unindexed = self.tier._segments.unindexed
        self.tier._writer.call(lambda: committer.keep_index(everything=True)).result(60)
        return len(unindexed())

    def where(self, salt: int, page: int) -> list[Any]:
        """[values file, offset of the value]"""
        entry = self.tier._index.get(keys_of(salt, page + 1)[page])
        assert entry is not None
        return [str(entry.segment.path / "values.dat"), entry.offset]

    def tick(self) -> bool:
        """A round of maintenance; whether it went well."""
        try:
            self.tier.maintenance.tick()
        except OSError:
            return False
        return True

    def stats(self) -> dict[str, float]:
        """Counters and gauges."""
        return self.tier.counters.snapshot() | self.tier.stats()

    def check(self) -> None:
        """Do the books balance?"""
        self.tier.check_integrity(deep=True)

    def close(self) -> None:
        """Stop cleanly."""
        self.tier.close()


def main() -> None:
    """Take orders until the other side closes."""
    logging.disable(logging.CRITICAL)
    orders = Orders(open_tier(Path(sys.argv[1]), **json.loads(sys.argv[2])))
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(orders, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
