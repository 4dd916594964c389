"""The tier of window state in DRAM: records that live for minutes, in a budget, least recently used first.

A record is filed under the key of its last full page (or the root key) with its exact position and a digest
of the tokens after that page; one page key may have many. Bytes are counted as held: the record and a fixed
``NAME_BYTES`` for its name, and room promised to a record that is still arriving. Freed at once on removal.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from cedar.kvstore.clock import Clock
from cedar.kvstore.config import WindowConfig
from cedar.kvstore.stats import Counters, PageUse

NAME_BYTES: Final = 256
"""Charged for the name and the books of each record."""


class WindowName(NamedTuple):
    """Which state a record is: after ``tokens`` tokens, of which the last full page has ``page_key``."""

    page_key: bytes
    tokens: int
    digest: bytes


def longest_first(name: WindowName) -> tuple[int, WindowName]:
    """Sorts names by what they are worth, in one order everywhere."""
    return -name.tokens, name


@dataclass
class _Held:
    record: bytes
    checksum: bytes
    expires_s: float
    tenant: bytes
    put_s: float


class WindowTier:
    """Window records of one node. Every method is quick and may be called from any thread."""

    def __init__(self, config: WindowConfig, clock: Clock, counters: Counters) -> None:
        self.config = config
        self._clock = clock
        self._counters = counters
        self._held: OrderedDict[WindowName, _Held] = OrderedDict()  # least recently used first
        self._by_page: dict[bytes, OrderedDict[WindowName, None]] = {}
        self._used_bytes = 0
        self._promised_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def used_bytes(self) -> int:
        """Bytes of the records held, names included."""
        return self._used_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes promised to records that are arriving."""
        return self._promised_bytes

    def promise(self, record_bytes: int) -> bool:
        """Make room for a record to come, until ``put`` or ``retract``; False when it cannot be had."""
        size = record_bytes + NAME_BYTES
        with self._lock:
            room = self.config.budget_bytes - self._promised_bytes
            if record_bytes > self.config.max_record_bytes or size > room:
                self._counters.add("store_window_refused")
                return False
            self._expire(self._clock.monotonic_s())
            while self._used_bytes + size > room:
                self._remove(next(iter(self._held)))
                self._counters.add("store_window_evicted_budget")
                self._counters.observer.evicted("window", "capacity", 1)
            self._promised_bytes += size
            return True

    def retract(self, record_bytes: int) -> None:
        """A promised record does not come."""
        with self._lock:
            self._promised_bytes -= record_bytes + NAME_BYTES

    def put(self, name: WindowName, record: bytes, checksum: bytes, *, tenant: bytes = b"") -> None:
        """Keep a promised record; one of the same name is replaced."""
        with self._lock:
            self._promised_bytes -= len(record) + NAME_BYTES
            if name in self._held:
                self._remove(name)
            siblings = self._by_page.setdefault(name.page_key, OrderedDict())
            while len(siblings) >= self.config.max_records_per_key:
                self._remove(next(iter(siblings)))
                self._counters.add("store_window_evicted_budget")
                self._counters.observer.evicted("window", "capacity", 1)
            # The dictionary of the page went with its last record, if that was just removed.
            self._by_page.setdefault(name.page_key, siblings)[name] = None
            now_s = self._clock.monotonic_s()
            self._held[name] = _Held(record, checksum, now_s + self.config.ttl_s, tenant, now_s)
            self._used_bytes += len(record) + NAME_BYTES
            self._counters.add("store_window_puts")
            self._counters.observer.stored("window", tenant, len(record))

    def get(self, name: WindowName, tenant: bytes = b"") -> tuple[bytes, bytes] | None:
        """(record, checksum), which counts as a use and renews its time; None when gone.

        ``tenant``: who asks; to whom a miss is booked.
        """
        with self._lock:
            held = self._held.get(name)
            now_s = self._clock.monotonic_s()
            if held is None or held.expires_s <= now_s:
                self._counters.add("store_window_misses")
                self._counters.observer.looked_up("window", tenant, 1, 0, name.tokens)
                return None
            held.expires_s = now_s + self.config.ttl_s
            self._held.move_to_end(name)
            self._by_page[name.page_key].move_to_end(name)
            self._counters.add("store_window_hits")
            age_s = max(now_s - held.put_s, 0.0)
            self._counters.observer.looked_up("window", held.tenant, 1, 1, name.tokens)
            self._counters.observer.served("window", [PageUse(held.tenant, age_s)], len(held.record))
            return held.record, held.checksum

    def names(self, page_keys: Iterable[bytes], limit: int) -> list[WindowName]:
        """Names of the records under these page keys, the longest first, ``limit`` at most. Not a use."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            by_page = self._by_page
            found = [
                name
                for page_key in page_keys
                if page_key in by_page
                for name in by_page[page_key]
                if self._held[name].expires_s > now_s
            ]
        found.sort(key=longest_first)
        return found[:limit]

    def delete(self, name: WindowName) -> bool:
        """Remove a record now; whether there was one."""
        with self._lock:
            if name not in self._held:
                return False
            self._remove(name)
            return True

    def describe(self, name: WindowName) -> tuple[int, float] | None:
        """(bytes, seconds left) of a record; None when gone. Not a use."""
        held = self._held.get(name)
        return None if held is None else (len(held.record), held.expires_s - self._clock.monotonic_s())

    def tenant_of(self, name: WindowName) -> bytes:
        """Whose record it is; empty when that is not known, or the record gone."""
        held = self._held.get(name)
        return b"" if held is None else held.tenant

    def purge(self, tenant: bytes) -> int:
        """Remove every record of a tenant, and those of which nobody knows the tenant; how many."""
        with self._lock:
            names = [name for name, held in self._held.items() if held.tenant in (tenant, b"")]
            for name in names:
                self._remove(name)
            if names:
                self._counters.observer.evicted("window", "purged", len(names))
            return len(names)

    def expire(self) -> None:
        """Remove every record that is past its time."""
        with self._lock:
            self._expire(self._clock.monotonic_s())

    def stats(self) -> dict[str, float]:
        """Gauges, by name."""
        return {
            "store_window_records": float(len(self._held)),
            "store_window_bytes": float(self._used_bytes),
            "store_window_promised_bytes": float(self._promised_bytes),
            "store_window_budget_bytes": float(self.config.budget_bytes),
        }

    def check_integrity(self) -> None:
        """AssertionError when the books do not balance."""
        with self._lock:
            total = sum(len(held.record) + NAME_BYTES for held in self._held.values())
            assert total == self._used_bytes, (
                f"{self._used_bytes} bytes in the books, records add up to {total}"
            )
            assert self._promised_bytes >= 0
            assert self._used_bytes + self._promised_bytes <= self.config.budget_bytes
            listed = [name for siblings in self._by_page.values() for name in siblings]
            assert sorted(listed) == sorted(self._held), "records by page differ from records"
            assert all(self._by_page.values()), "a page key without records"

    def _expire(self, now_s: float) -> None:
        # A use renews the time and moves to the end, so the order of use is the order of expiry.
        while self._held:
            name, held = next(iter(self._held.items()))
            if held.expires_s > now_s:
                return
            self._remove(name)
            self._counters.add("store_window_evicted_ttl")
            self._counters.observer.evicted("window", "expired", 1)

    def _remove(self, name: WindowName) -> None:
        held = self._held.pop(name)
        self._used_bytes -= len(held.record) + NAME_BYTES
        siblings = self._by_page[name.page_key]
        del siblings[name]
        if not siblings:
            del self._by_page[name.page_key]
