"""Removes single pages: invisible at once, not found again after a restart, and their bytes off the disk.

Expiry and eviction drop whole segments; this is for what may not wait for that: a purged tenant, and the
coldest pages of a tenant over its quota. It runs on the writer thread, between two commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from cedar.kvstore.commit import Committer
from cedar.kvstore.index import PageIndex
from cedar.kvstore.rows import Row
from cedar.kvstore.segment import Segment, SegmentGone

log = logging.getLogger(__name__)

READERS_END_S: Final = 0.02
"""Readers that had found a page before it became invisible have copied it by then."""

Copies = dict[Segment, dict[int, tuple[bytes, Row]]]
"""By segment and offset: (page key, row)."""


def remove_pages(
    index: PageIndex, committer: Committer, copies: Copies, not_erased: Callable[[], None]
) -> int:
    """On the writer thread: remove these copies, and what else is nobody's in their segments.

    Bytes of values that became invisible.
    """
    size = 0
    for segment, pages in copies.items():
        for key, row in pages.values():
            if index.remove(key, segment, row.offset):
                size += row.size
    time.sleep(READERS_END_S)
    for segment, pages in copies.items():
        if pages:
            committer.mark_dead(segment, pages.values())
            committer.write_index(segment)
        try:
            segment.erase(row for _, row in pages.values())
        except SegmentGone:
            continue
        except OSError as error:
            log.warning("segment %d: values not erased: %s", segment.number, error)
            not_erased()
        else:
            committer.mark_dead(segment, pages.values(), erased=True)
    return size
