"""Limits of single tenants: how long their pages live, and how much of a node they may take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cedar.kvstore.errors import InvalidRequest

QUOTA_LOW: Final = 0.85
"""A tenant over its quota loses its coldest pages until this part of the quota is left."""


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """``ttl_s``: since last use, None: the tier's. ``quota_bytes``: on all nodes together, None: no limit."""

    ttl_s: float | None = None
    quota_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttl_s", "quota_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(name, value, "must be above 0")


class TenantTable:
    """Limits by tenant domain. ``share``: the part of each quota that falls to this node."""

    def __init__(self, ttl_s: float, default: TenantLimits, tenants: Mapping[bytes, TenantLimits]) -> None:
        self._ttl_s = ttl_s
        self._default = default
        self._tenants = dict(tenants)
        self.share = 1.0

    @property
    def longest_ttl_s(self) -> float:
        """The longest that a page of anyone may live unused."""
        limits = (self._default, *self._tenants.values())
        return max(self._ttl_s, *(limit.ttl_s or 0.0 for limit in limits))

    def ttl_s(self, tenant: bytes) -> float:
        """How long a page of this tenant lives after its last use."""
        return self._tenants.get(tenant, self._default).ttl_s or self._default.ttl_s or self._ttl_s

    def quota_bytes(self, tenant: bytes) -> float:
        """How much the tenant may take on this node."""
        limits = self._tenants.get(tenant, self._default)
        quota = limits.quota_bytes if limits.quota_bytes is not None else self._default.quota_bytes
        return float("inf") if quota is None else quota * self.share
