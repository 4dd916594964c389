"""The purges a node knows: which tenants were to be forgotten, and by which orders. Kept on disk.

They outlive every page that could come back: a node that was away, or a copy under way between two nodes,
must not bring a purged tenant's pages in again. So nodes exchange what they know when they meet, before they
serve; pages between nodes carry the purges of their tenant that the sender had carried out when it read them,
and are refused where one of them is missing.

A purge is named by whoever orders it: its time, and some random bits. Names are compared for being equal,
never for which is later: clocks differ and step back, and an order that looks older than another is an order.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Collection, Iterable
from typing import Any, Final

from cedar.kvstore.rows import MAX_TENANT_BYTES
from cedar.kvstore.state_file import StateText
from cedar.v1 import store_peer_pb2

log = logging.getLogger(__name__)

KEEP_MS: Final = 90 * 24 * 3600 * 1000
MAX_TENANTS: Final = 100_000
MAX_A_TENANT: Final = 16
_RANDOM_BITS: Final = 20


def new_purge_id(wall_s: float, rng: random.Random) -> int:
    """A name for a purge that is ordered now."""
    return (int(wall_s * 1000) << _RANDOM_BITS) | rng.getrandbits(_RANDOM_BITS)


class Purges:
    """Purges by tenant, kept in ``file``."""

    def __init__(self, file: StateText) -> None:
        self._file = file
        self._known: dict[bytes, tuple[int, ...]] = {}  # ascending
        self._unfinished: set[bytes] = set()
        text = file.load()
        if text is not None:
            try:
                data: Any = json.loads(text)
                for tenant, ids in data["known"].items():
                    if isinstance(ids, int):  # as written before purges had names: the time alone
                        ids = [ids << _RANDOM_BITS]
                    self._known[bytes.fromhex(tenant)] = tuple(sorted(map(int, ids)))
                self._unfinished = {bytes.fromhex(tenant) for tenant in data["unfinished"]}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("the known purges are unreadable and forgotten: %s", error)

    @property
    def unfinished(self) -> list[bytes]:
        """Tenants whose purge began here and was not completed."""
        return sorted(self._unfinished)

    def of(self, tenant: bytes) -> tuple[int, ...]:
        """The tenant's purges that are known here."""
        return self._known.get(tenant, ())

    def carried_out(self, tenant: bytes) -> tuple[int, ...]:
        """Those after which nothing older of the tenant is left here; none of them while one is under way."""
        return () if tenant in self._unfinished else self.of(tenant)

    def covered(self, tenant: bytes, ids: Collection[int]) -> bool:
        """Whether someone who knows the purges ``ids`` of a tenant knows all that are known here."""
        forgotten = min(ids) if len(ids) >= MAX_A_TENANT else 0
        return all(mine in ids or mine < forgotten for mine in self.of(tenant))

    def begin(self, tenant: bytes, purge_id: int) -> bool:
        """A purge is to be carried out here; False when it is known and was completed. Saved by ``save``."""
        known = self.of(tenant)
        full = len(known) >= MAX_A_TENANT
        if not 0 < len(tenant) <= MAX_TENANT_BYTES or (full and purge_id < known[0]):
            return False
        if purge_id in known:
            return tenant in self._unfinished
        self._known[tenant] = tuple(sorted((*known, purge_id)))[-MAX_A_TENANT:]
        self._unfinished.add(tenant)
        oldest = max(ids[-1] for ids in self._known.values()) - (KEEP_MS << _RANDOM_BITS)
        self._known = {t: ids for t, ids in self._known.items() if ids[-1] > oldest}
        if len(self._known) > MAX_TENANTS:
            by_age = sorted(self._known, key=lambda name: self._known[name][-1])
            for name in by_age[: len(self._known) - MAX_TENANTS]:
                del self._known[name]
        return True

    def finish(self, tenant: bytes) -> None:
        """Nothing of the tenant from before is left here."""
        self._unfinished.discard(tenant)

    def save(self) -> None:
        """Write everything down. OSError when the disk will not: until it does, a restart forgets."""
        self._file.save(
            json.dumps(
                {
                    "known": {tenant.hex(): ids for tenant, ids in self._known.items()},
                    "unfinished": [tenant.hex() for tenant in sorted(self._unfinished)],
                }
            )
        )

    def to_proto(self) -> store_peer_pb2.Purges:
        """All of them."""
        return store_peer_pb2.Purges(
            purges=[
                store_peer_pb2.PurgeRequest(tenant=tenant, purge_id=purge_id)
                for tenant, ids in self._known.items()
                for purge_id in ids
            ]
        )

    def unknown(self, message: store_peer_pb2.Purges) -> Iterable[tuple[bytes, int]]:
        """Those of a peer's purges that are not known here."""
        for purge in message.purges:
            if purge.purge_id not in self.of(purge.tenant):
                yield purge.tenant, purge.purge_id
