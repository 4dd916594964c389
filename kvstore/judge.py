"""What becomes of a value that is put: new, already here, in conflict with what is here, or over a quota.

On the writer thread. ``waiting`` holds the values that are on their way to the disk and not visible yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto

from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.header import CHECKSUM_BYTES, HEADER_BYTES, read_header, verify_value
from cedar.kvstore.index import Entry, PageIndex
from cedar.kvstore.put import PutItem
from cedar.kvstore.segment import SegmentGone
from cedar.kvstore.tenants import TenantTable


class Verdict(Enum):
    """``TWIN``: the same value is on its way already, so this one is present once that one is."""

    NEW = auto()
    PRESENT = auto()
    TWIN = auto()
    CONFLICT = auto()
    OVER_QUOTA = auto()


class Judge:
    """Put-if-absent: whoever came first stays."""

    def __init__(
        self,
        index: PageIndex,
        tenants: TenantTable,
        *,
        on_quota: Callable[[bytes], None],
        on_corrupt: Callable[[bytes, Entry, CorruptValue], None],
    ) -> None:
        self._index = index
        self._tenants = tenants
        self._on_quota = on_quota
        self._on_corrupt = on_corrupt

    def verdict(self, item: PutItem, waiting: Mapping[bytes, PutItem], now_s: float, carry: bool) -> Verdict:
        """``carry``: the page is held, and is to be copied into the open segment."""
        entry = self._index.live(item.key, now_s)
        twin = waiting.get(item.key)
        if twin is not None:
            same = _stored_checksum(twin.value) == _stored_checksum(item.value)
            return Verdict.TWIN if same else Verdict.CONFLICT
        if carry:
            # One that is gone, or has reached the open segment already, needs no carrying.
            wanted = entry is not None and entry.segment.closed_to_writes
            return Verdict.NEW if wanted else Verdict.PRESENT
        held = None if entry is None else self._same_as_stored(item, entry)
        if held is not None:
            return Verdict.PRESENT if held else Verdict.CONFLICT
        return Verdict.OVER_QUOTA if self._over_quota(item, waiting) else Verdict.NEW

    def _over_quota(self, item: PutItem, waiting: Mapping[bytes, PutItem]) -> bool:
        quota = self._tenants.quota_bytes(item.tenant)
        if quota == float("inf"):
            return False
        coming = sum(len(other.value) for other in waiting.values() if other.tenant == item.tenant)
        if self._index.tenant_bytes(item.tenant) + coming + len(item.value) <= quota:
            return False
        self._on_quota(item.tenant)
        return True

    def _same_as_stored(self, item: PutItem, entry: Entry) -> bool | None:
        """Whether the held value has the same bytes; None when it turns out not to be there."""
        segment = entry.segment
        try:
            if segment.header(entry.offset, entry.size) == read_header(item.value):
                return True
            verify_value(segment.read(entry.offset, entry.size), page_key=item.key)
        except CorruptValue as error:  # a flipped bit in the header looks like a conflict
            self._on_corrupt(item.key, entry, error)
            return None
        except (OSError, SegmentGone):
            return None
        return False


def _stored_checksum(value: bytes | memoryview) -> bytes:
    return bytes(value[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES])
