"""The index: which page is where, in memory, rebuilt from the segments at start.

It is the only judge of what the tier holds: a page is visible from the moment it is inserted here, after its
commit, until it is removed, expires, or is replaced by a copy in a younger segment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment


class Entry:
    """Where one page is and when it was last used (store time)."""

    __slots__ = ("offset", "page_index", "put_s", "segment", "size", "tenant", "ttl_s", "used_s")

    def __init__(self, segment: Segment, row: Row, ttl_s: float) -> None:
        self.segment = segment
        self.offset = row.offset
        self.size = row.size
        self.page_index = row.page_index
        self.tenant = row.tenant
        self.put_s = row.used_s
        self.used_s = row.used_s
        self.ttl_s = ttl_s

    def row(self) -> Row:
        """What its segment was told of it."""
        return Row(self.size, self.put_s, self.page_index, self.tenant, self.offset)


class PageIndex:
    """Entries by page key. Single look-ups need no lock; changes that belong together take it."""

    def __init__(self, ttl_s: Callable[[bytes], float], usage_grain_s: float) -> None:
        self._ttl_s = ttl_s
        self._grain_s = usage_grain_s
        self._entries: dict[bytes, Entry] = {}
        self._unlogged: dict[bytes, float] = {}
        self._lock = threading.Lock()
        self._value_bytes = 0
        self._tenant_bytes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def value_bytes(self) -> int:
        """Sum of the sizes of all values."""
        return self._value_bytes

    def tenant_bytes(self, tenant: bytes) -> int:
        """Sum of the sizes of a tenant's values."""
        return self._tenant_bytes.get(tenant, 0)

    def tenants(self) -> dict[bytes, int]:
        """That sum, of every tenant."""
        with self._lock:
            return dict(self._tenant_bytes)

    def get(self, key: bytes) -> Entry | None:
        """The entry, expired or not."""
        return self._entries.get(key)

    def live(self, key: bytes, now_s: float) -> Entry | None:
        """The entry if it can be served at ``now_s``."""
        entry = self._entries.get(key)
        if entry is None or entry.used_s + entry.ttl_s <= now_s or entry.segment.dropped:
            return None
        return entry

    def use_leading(self, keys: Sequence[bytes], now_s: float) -> int:
        """How many of ``keys``, from the first on, are live; records a use of each, as ``touch`` does.

        One pass, since a chain of a million tokens has thousands of keys and its caller waits for this.
        """
        look_up = self._entries.get
        grain_began_s = now_s // self._grain_s * self._grain_s
        segment = None
        for count, key in enumerate(keys):
            entry = look_up(key)
            if entry is None or (used_s := entry.used_s) + entry.ttl_s <= now_s:
                return count
            if entry.segment is not segment:
                segment = entry.segment
                if segment.dropped:
                    return count
            if used_s < now_s:
                if used_s < grain_began_s:
                    self._unlogged[key] = now_s
                entry.used_s = now_s
        return len(keys)

    def touch(self, keys: Iterable[bytes], now_s: float) -> None:
        """Record a use of each page. Uses in different grains of time are also remembered over a restart."""
        grain = int(now_s // self._grain_s)
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.used_s < now_s:
                if int(entry.used_s // self._grain_s) != grain:
                    self._unlogged[key] = now_s
                entry.used_s = now_s

    def take_unlogged(self) -> dict[bytes, float]:
        """Uses since the last call that the usage log should hold."""
        taken, self._unlogged = self._unlogged, {}
        return taken

    def insert(self, key: bytes, row: Row, segment: Segment) -> None:
        """Make a stored page visible. It replaces an earlier copy, which stays where it is, unseen."""
        with self._lock:
            if key in self._entries:
                self._forget(key)
            self._entries[key] = Entry(segment, row, self._ttl_s(row.tenant))
            self._value_bytes += row.size
            self._tenant_bytes[row.tenant] = self._tenant_bytes.get(row.tenant, 0) + row.size
            segment.live_pages += 1

    def remember_use(self, key: bytes, used_s: float) -> None:
        """Raise the last use of a page, as read back from the usage log."""
        entry = self._entries.get(key)
        if entry is not None and entry.used_s < used_s:
            entry.used_s = used_s

    def remove(self, key: bytes, segment: Segment, offset: int) -> bool:
        """Forget a page if its current copy is the one at ``offset`` of ``segment``."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.segment is not segment or entry.offset != offset:
                return False
            return self._forget(key)

    def current_keys(self, segment: Segment) -> list[tuple[bytes, Entry]]:
        """The pages whose current copy is in ``segment``, each once."""
        found = {}
        for key in list(segment.keys):
            entry = self._entries.get(key)
            if entry is not None and entry.segment is segment:
                found[key] = entry
        return list(found.items())

    def remove_segment(self, segment: Segment) -> int:
        """Forget every page whose current copy is in ``segment``; how many there were."""
        return sum(self.remove(key, segment, entry.offset) for key, entry in self.current_keys(segment))

    def copies(self, segment: Segment, tenant: bytes) -> dict[int, tuple[bytes, Row]]:
        """Every record of a tenant in ``segment``, by offset: what is served, and what only lies there."""
        with self._lock:
            found = {at: page for at, page in segment.left_over.items() if page[1].tenant == tenant}
            for key, entry in self.current_keys(segment):
                if entry.tenant == tenant:
                    found[entry.offset] = (key, entry.row())
        return found

    def items(self) -> list[tuple[bytes, Entry]]:
        """A snapshot of everything."""
        with self._lock:
            return list(self._entries.items())

    def check_integrity(self) -> None:
        """AssertionError when the books do not balance."""
        with self._lock:
            pages: dict[Segment, int] = {}
            for entry in self._entries.values():
                pages[entry.segment] = pages.get(entry.segment, 0) + 1
            total = sum(entry.size for entry in self._entries.values())
            assert total == self._value_bytes, (
                f"{self._value_bytes} bytes in the books, entries add up to {total}"
            )
            owned: dict[bytes, int] = {}
            for entry in self._entries.values():
                owned[entry.tenant] = owned.get(entry.tenant, 0) + entry.size
            assert owned == self._tenant_bytes, "bytes by tenant differ from the entries"
            for segment, count in pages.items():
                books = segment.live_pages
                assert books == count, (
                    f"segment {segment.number}: {books} pages in its books, {count} indexed"
                )

    def _forget(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        if not entry.segment.dropped:
            entry.segment.left_over[entry.offset] = (key, entry.row())
        entry.segment.live_pages -= 1
        self._value_bytes -= entry.size
        left = self._tenant_bytes[entry.tenant] - entry.size
        if left:
            self._tenant_bytes[entry.tenant] = left
        else:
            del self._tenant_bytes[entry.tenant]
        return True
