"""Removes single pages: invisible at once, not found again after a restart, and their bytes off the disk.

Expiry and eviction drop whole segments; this is for what may not wait for that: a purged tenant, and the
coldest pages of a tenant over its quota. It runs on the writer thread, between two commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import lmdb
from cedar.kvstore.commit import Committer
from cedar.kvstore.erase import erase
from cedar.kvstore.index import PageIndex
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import DATA_FILE, Segment, SegmentDamaged

log = logging.getLogger(__name__)

READERS_END_S: Final = 0.02
"""Readers that had found a page before it became invisible have copied it by then."""

Copies = dict[Segment, dict[bytes, Row]]


def copies_of(segments: Iterable[Segment], tenants: Collection[bytes]) -> Copies:
    """Every row of these tenants, also of copies that were carried on or quarantined."""
    found: Copies = {}
    for segment in segments:
        if not segment.hold():
            continue
        try:
            rows = {key: row for key, row in segment.stored_rows() if row.tenant in tenants}
        except SegmentDamaged as error:
            log.warning("segment %d: %s", segment.number, error)
            continue
        finally:
            segment.let_go()
        if rows:
            found[segment] = rows
    return found


def remove_pages(
    index: PageIndex, committer: Committer, copies: Copies, not_erased: Callable[[], None]
) -> int:
    """On the writer thread: remove these copies; bytes of values that became invisible."""
    size = 0
    for segment, rows in copies.items():
        for key, row in rows.items():
            if index.remove(key, segment):
                size += row.size
    time.sleep(READERS_END_S)
    for segment, rows in copies.items():
        dead = [(key, _dead(row)) for key, row in rows.items()]
        committer.update_rows(segment, dead)
        if not segment.hold():
            continue
        try:
            erase(segment.path / DATA_FILE, _ranges(segment, list(rows), [row.size for row in rows.values()]))
        except (OSError, lmdb.Error) as error:
            log.warning("segment %d: values not erased: %s", segment.number, error)
            not_erased()
        finally:
            segment.let_go()
    return size


def _ranges(segment: Segment, keys: Sequence[bytes], sizes: Sequence[int]) -> list[tuple[int, int]]:
    offsets = segment.offsets(keys)
    return [(offset, size) for offset, size in zip(offsets, sizes, strict=True) if offset]


def _dead(row: Row) -> Row:
    return Row(row.size, row.used_s, row.page_index, row.tenant, row.offset, dead=True)
