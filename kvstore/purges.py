"""The purges a node knows: which tenants were to be forgotten, and when. Kept on disk.

They outlive every page that could come back: a node that was away, or a copy under way between two nodes,
must not bring a purged tenant's pages in again. So nodes exchange what they know when they meet, before they
serve; pages between nodes carry the sender's newest purge of their tenant, and are refused when it is old.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from cedar.kvstore.rows import MAX_TENANT_BYTES
from cedar.v1 import store_peer_pb2

log = logging.getLogger(__name__)

KEEP_MS: Final = 90 * 24 * 3600 * 1000
MAX_PURGES: Final = 100_000


class Purges:
    """Newest purge by tenant, in the file ``path``; an entry is on disk before it counts as known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[bytes, int] = {}
        self._unfinished: set[bytes] = set()
        if path.exists():
            try:
                data: Any = json.loads(path.read_text("utf-8"))
                self._known = {bytes.fromhex(tenant): int(ms) for tenant, ms in data["known"].items()}
                self._unfinished = {bytes.fromhex(tenant) for tenant in data["unfinished"]}
            except (ValueError, KeyError, AttributeError) as error:
                log.warning("%s is unreadable, its purges are forgotten: %s", path, error)

    @property
    def unfinished(self) -> list[bytes]:
        """Tenants whose purge began here and was not completed."""
        return sorted(self._unfinished)

    def newest_ms(self, tenant: bytes) -> int:
        """When the tenant was last purged; 0: never."""
        return self._known.get(tenant, 0)

    def begin(self, tenant: bytes, purged_ms: int) -> bool:
        """A purge is to be carried out here; False when it is known already."""
        if not 0 < len(tenant) <= MAX_TENANT_BYTES or purged_ms <= self.newest_ms(tenant):
            return False
        self._known[tenant] = purged_ms
        self._unfinished.add(tenant)
        newest = max(self._known.values())
        self._known = {t: ms for t, ms in self._known.items() if ms > newest - KEEP_MS}
        if len(self._known) > MAX_PURGES:
            oldest = sorted(self._known, key=self._known.__getitem__)
            for name in oldest[: len(self._known) - MAX_PURGES]:
                del self._known[name]
        self._save()
        return True

    def finish(self, tenant: bytes) -> None:
        """Nothing of the tenant from before is left here."""
        self._unfinished.discard(tenant)
        self._save()

    def to_proto(self) -> store_peer_pb2.Purges:
        """All of them."""
        return store_peer_pb2.Purges(
            purges=[store_peer_pb2.PurgeRequest(tenant=t, purged_ms=ms) for t, ms in self._known.items()]
        )

    def unknown(self, message: store_peer_pb2.Purges) -> Iterable[tuple[bytes, int]]:
        """Those of a peer's purges that are not known here."""
        for purge in message.purges:
            if purge.purged_ms > self.newest_ms(purge.tenant):
                yield purge.tenant, purge.purged_ms

    def _save(self) -> None:
        text = json.dumps(
            {
                "known": {tenant.hex(): ms for tenant, ms in self._known.items()},
                "unfinished": [tenant.hex() for tenant in sorted(self._unfinished)],
            }
        )
        fresh = self._path.with_suffix(".new")
        fresh.write_text(text, "utf-8")
        fresh.replace(self._path)
