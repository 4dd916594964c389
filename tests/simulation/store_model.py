"""What the store may answer, kept beside it: every key's bytes, who wrote them when, what was purged, what
was lost.

The bytes of a page follow from its key and a *version*: the number of purges of its tenant that had been
ordered when it was written. A real page's bytes would be the same each time; here a page that a purge should
have removed can be told from one that was written again afterwards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

from cedar.kvstore.header import HEADER_BYTES, seal_value
from cedar.kvstore.keys import chain_keys, root_key, tenant_domain

FINGERPRINT = hashlib.sha256(b"a simulated model").digest()
PAGE_TOKENS = 4
PAYLOAD_BYTES = 64
GHOST_S = 20.0
"""After a call has failed at its caller, it may still be carried out for so long: delayed, repeated, held."""

Version = int


class Violation(AssertionError):
    """The store broke a promise."""


def payload(key: bytes, version: Version) -> bytes:
    """64 bytes: the version, and what follows from it and the key."""
    return version.to_bytes(4, "big") + hashlib.shake_128(key + bytes([version % 256])).digest(
        PAYLOAD_BYTES - 4
    )


@lru_cache(65_536)
def value(key: bytes, version: Version) -> bytes:
    """The sealed value of a page."""
    return seal_value(payload(key, version), fingerprint=FINGERPRINT, page_key=key, tokens=PAGE_TOKENS)


def version_of(key: bytes, stored: bytes | memoryview) -> Version:
    """Which version a value is; Violation when it is none."""
    content = bytes(stored[HEADER_BYTES:])
    version = int.from_bytes(content[:4], "big")
    if content != payload(key, version):
        raise Violation(f"wrong bytes under {key.hex()[:12]}")
    return version


@dataclass
class Tenant:
    """``chains``: prompts of this tenant, as page keys; those of one prefix share their first pages."""

    name: str
    domain: bytes
    root: bytes
    chains: list[list[bytes]]
    version: Version = 0
    purging: bool = False


def make_tenant(name: str, lengths: list[tuple[int, int]]) -> Tenant:
    """``lengths``: of each chain, (pages shared with the first chain, pages in all)."""
    domain = tenant_domain(b"secret", name)
    root = root_key(b"simulated-format", FINGERPRINT, domain)
    chains = []
    for number, (shared, pages) in enumerate(lengths):
        ids = list(range(shared * PAGE_TOKENS))
        ids += [1000 * (number + 1) + i for i in range((pages - shared) * PAGE_TOKENS)]
        chains.append(chain_keys(root, ids, [], PAGE_TOKENS))
    return Tenant(name, domain, root, chains)


@dataclass
class Write:
    """A put of one page: from its start until it was answered, or could still happen."""

    version: Version
    start_s: float
    end_s: float = float("inf")
    acknowledged: bool = False


@dataclass
class Purge:
    """An order to forget a tenant. ``purge_id``: its name, once a node was seen to know it.

    ``keepers``: nodes that said it is done, and have kept their disks since; without any nothing is promised.
    """

    tenant: Tenant
    start_s: float
    end_s: float = float("inf")
    keepers: set[str] = field(default_factory=set)
    purge_id: int = 0


@dataclass
class Model:
    """``lost``: keys of which some copy was damaged or wiped, by the time of that."""

    tenants: list[Tenant]
    writes: dict[bytes, list[Write]] = field(default_factory=dict)
    purges: list[Purge] = field(default_factory=list)
    lost: dict[bytes, float] = field(default_factory=dict)
    owners: dict[bytes, Tenant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tenant in self.tenants:
            for chain in tenant.chains:
                self.owners.update(dict.fromkeys(chain, tenant))

    def write(self, key: bytes, version: Version, now_s: float) -> Write:
        """A put of this page begins."""
        begun = Write(version, now_s)
        self.writes.setdefault(key, []).append(begun)
        return begun

    def check_read(self, key: bytes, stored: bytes | memoryview) -> Version:
        """Bytes that a client was given for a key."""
        version = version_of(key, stored)
        if not any(write.version == version for write in self.writes.get(key, ())):
            raise Violation(f"{key.hex()[:12]} version {version} was never written")
        return version

    def older_than(self, key: bytes, version: Version, purge: Purge) -> bool:
        """Whether every write of this version was over before the purge was ordered."""
        writes = [write for write in self.writes.get(key, ()) if write.version == version]
        return all(write.end_s < purge.start_s for write in writes)

    def purges_of(self, key: bytes) -> list[Purge]:
        """Purges of the key's tenant."""
        tenant = self.owners[key]
        return [purge for purge in self.purges if purge.tenant is tenant]

    def must_exist(self, key: bytes) -> bool:
        """Whether a page was acknowledged and nothing is known that could have taken it."""
        acknowledged = [write for write in self.writes.get(key, ()) if write.acknowledged]
        if not acknowledged or key in self.lost:
            return False
        began_s = max(write.start_s for write in acknowledged)
        return all(purge.end_s + GHOST_S < began_s for purge in self.purges_of(key))
