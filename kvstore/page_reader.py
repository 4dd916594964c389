"""Reads leading pages of a chain: which of them, verified, and booked as served. Any thread."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cedar.kvstore.errors import CorruptValue, NotInMemory, StoreClosed
from cedar.kvstore.header import ValueHeader, verify_value
from cedar.kvstore.index import Entry, PageIndex
from cedar.kvstore.quarantine import Quarantine
from cedar.kvstore.records import BLOCK_BYTES, HEAD_BYTES
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, SegmentGone
from cedar.kvstore.stats import Counters, PageUse

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_LOST: Final = 65_536
_NOTHING_READ: Final = ("unreadable", "short")


@dataclass(frozen=True)
class Run:
    """Leading pages read together: how many, and the size of their values."""

    count: int
    value_bytes: int


class PageReader:
    """Reads of one tier. ``mark_dead`` hears of pages that failed verification, ``served`` of the others."""

    def __init__(
        self,
        index: PageIndex,
        counters: Counters,
        quarantine: Quarantine,
        *,
        now_s: Callable[[], float],
        mark_dead: Callable[[Segment, bytes, Row], None],
        served: Callable[[Sequence[bytes], float], None],
    ) -> None:
        self._index = index
        self._counters = counters
        self._quarantine = quarantine
        self._now_s = now_s
        self._mark_dead = mark_dead
        self._served = served
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        self._pid = os.getpid()

    def read_run(
        self, keys: Sequence[bytes], max_bytes: int, build: Callable[[list[memoryview]], T], *, use: bool
    ) -> tuple[Run, T] | None:
        """See ``SsdTier.read_run``."""
        now_s = self._now_s()
        entries = self._leading(keys, max_bytes, now_s)
        views: list[memoryview] = []
        first: ValueHeader | None = None
        for key, entry in zip(keys, entries, strict=False):
            found = self._sound(key, entry)
            if found is None:
                break
            views.append(found[0])
            first = first or found[1]
        if first is None:
            return None
        built = build(views)
        return self._book(keys, entries[: len(views)], first.tokens, now_s, use=use), built

    def read_into(
        self,
        keys: Sequence[bytes],
        max_bytes: int,
        place: Callable[[int, int], Sequence[memoryview]],
        *,
        use: bool,
        wait: bool,
    ) -> Run | None:
        """See ``SsdTier.read_into``."""
        now_s = self._now_s()
        entries = self._leading(keys, max_bytes, now_s)
        if not entries:
            return None
        count = tokens = 0
        size = entries[0].size
        for key, entry, into in zip(keys, entries, place(len(entries), size), strict=False):
            if len(into) != size:
                raise ValueError(f"place: a view of {len(into)} bytes, must be {size}")
            found = self._sound(key, entry, into, wait=wait)
            if found is None:
                break
            tokens = tokens or found[1].tokens
            count += 1
        return self._book(keys, entries[:count], tokens, now_s, use=use) if count else None

    def announce(self, keys: Sequence[bytes]) -> None:
        """See ``SsdTier.announce``."""
        now_s = self._now_s()
        stretches: list[tuple[Segment, int, int]] = []  # pages stored together are read in one go
        for key in keys:
            entry = self._index.live(key, now_s)
            if entry is None:
                break
            end = entry.offset + entry.size
            if stretches:
                segment, start, until = stretches[-1]
                if entry.segment is segment and 0 <= entry.offset - until < HEAD_BYTES + BLOCK_BYTES:
                    stretches[-1] = (segment, start, end)
                    continue
            stretches.append((entry.segment, entry.offset, end))
        for segment, start, end in stretches:
            segment.announce(start, end - start)

    def why_unsound(self, key: bytes) -> str:
        """See ``SsdTier.why_unsound``."""
        entry = self._index.live(key, self._now_s())
        if entry is None:
            return "gone"
        try:
            verify_value(entry.segment.read(entry.offset, entry.size), page_key=key)
        except CorruptValue as error:
            return error.reason
        except OSError as error:
            return str(error.strerror)
        except SegmentGone:
            return "gone"
        return ""

    def tokens_of(self, key: bytes) -> int:
        """Tokens of a page as its header says; 0 when it cannot be read."""
        entry = self._index.get(key)
        if entry is None:
            return 0
        try:
            return entry.segment.header(entry.offset, entry.size).tokens
        except (CorruptValue, OSError, SegmentGone):
            return 0

    def lost(self, key: bytes) -> bool:
        """Whether this page was here and turned out damaged."""
        return key in self._lost

    def corrupt(self, key: bytes, entry: Entry, error: CorruptValue) -> None:
        """A page failed verification: it is not served any more, nor after a restart."""
        if not self._index.remove(key, entry.segment, entry.offset):
            return
        self._lost[key] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        self._counters.add("store_values_corrupt")
        self._counters.observer.quarantined(error.reason)
        self._mark_dead(entry.segment, key, entry.row())
        log.warning("page %s: %s", key.hex(), error)

    def _leading(self, keys: Sequence[bytes], max_bytes: int, now_s: float) -> list[Entry]:
        """Entries of leading pages of one size that should be there; one at least, if the first is."""
        entries: list[Entry] = []
        size = room = 0
        for key in keys:
            entry = self._index.live(key, now_s)
            if entry is None:
                break
            if not entries:
                size = entry.size
                room = max(max_bytes // size, 1)
            elif entry.size != size or len(entries) == room:
                break
            entries.append(entry)
        if keys and not entries:
            expired = self._index.get(keys[0]) is not None
            self._counters.add("store_page_expired" if expired else "store_page_misses")
        return entries

    def _sound(
        self, key: bytes, entry: Entry, into: memoryview | None = None, *, wait: bool = True
    ) -> tuple[memoryview, ValueHeader] | None:
        """The verified value, read into ``into`` if that is given; None when the page cannot be served.

        NotInMemory unless it may ``wait``.
        """
        if os.getpid() != self._pid:
            raise StoreClosed("a store that was open before a fork cannot be used in the child")
        view = into
        try:
            if into is None:
                view = entry.segment.read(entry.offset, entry.size)
            else:
                entry.segment.read_into(entry.offset, into, wait=wait)
            assert view is not None
            return view, verify_value(view, page_key=key)
        except SegmentGone:
            return None
        except OSError as error:  # not the value's fault: no memory, for one
            if not wait:
                raise NotInMemory from None
            log.warning("segment %d: page %s not read: %s", entry.segment.number, key.hex(), error)
            return None
        except CorruptValue as error:
            if not wait:
                raise NotInMemory from None
            if view is not None and error.reason not in _NOTHING_READ:
                self._quarantine.keep(key, error.reason, bytes(view), tenant=entry.tenant)
            self.corrupt(key, entry, error)
            return None

    def _book(
        self, keys: Sequence[bytes], entries: Sequence[Entry], page_tokens: int, now_s: float, *, use: bool
    ) -> Run:
        count, size = len(entries), entries[0].size
        if use:
            served = keys[:count]
            self._index.touch(served, now_s)
            self._served(served, now_s)
            self._counters.add("store_pages_read", count)
            self._counters.add("store_read_bytes", size * count)
            uses = [PageUse(entry.tenant, now_s - entry.put_s) for entry in entries]
            self._counters.observer.served("ssd", uses, size, page_tokens)
        return Run(count, size)
