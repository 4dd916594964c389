"""Configuration of a store node and of a client: frozen, keyword-only, units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.machine import memory_bytes
from cedar.kvstore.tenants import TenantLimits, TenantTable
from cedar.kvstore.tls import TlsConfig

Durability = Literal["batch", "none"]
HOUR_S: Final = 3600.0
MIB: Final = 1 << 20
GIB: Final = 1 << 30
MAX_SEGMENT_BYTES: Final = 16 * GIB
"""Unless asked for: a segment that has lost its index is read from end to end at a start."""


@dataclass(frozen=True, kw_only=True)
class SsdConfig:
    """The tier of immutable pages on SSD.

    ``durability``: "batch" acknowledges a put when its group commit is on disk; "none" leaves writing to the
    kernel, and the data is thrown away when the machine went down without a clean stop.
    ``tenants``: limits by tenant domain; ``tenant_limits``: of everybody else.
    """

    directory: Path
    capacity_bytes: int = 64 * GIB
    ttl_s: float = 72 * HOUR_S
    segment_s: float = 0.0  # age at which a segment is closed to writes; 0: a twelfth of ttl_s
    segment_bytes: int = 0  # size at which it is; 0: a twenty-fourth of capacity_bytes, 16 GiB at most
    high_watermark: float = 0.92
    low_watermark: float = 0.85
    reserve_bytes: int = 256 * MIB  # free disk that is never used
    durability: Durability = "batch"
    commit_values: int = 16  # enough for a commit not to wait for more
    commit_bytes: int = 4 * MIB  # most in one commit
    commit_wait_s: float = 0.005
    queue_bytes: int = 64 * MIB
    carry_bytes_per_s: int = 16 * MIB
    disk_retry_s: float = 1.0  # after a failed commit puts are refused this long
    max_restart_gap_s: float = 24 * HOUR_S
    quarantine_bytes: int = 64 * MIB
    usage_flush_s: float = 15.0
    maintenance_s: float = 1.0
    tenant_limits: TenantLimits = field(default_factory=TenantLimits)
    tenants: Mapping[bytes, TenantLimits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))
        if self.segment_s == 0:
            object.__setattr__(self, "segment_s", self.ttl_s / 12)
        if self.segment_bytes == 0:
            smallest = min(MIB, self.capacity_bytes // 4)
            share = min(self.capacity_bytes // 24, MAX_SEGMENT_BYTES)
            object.__setattr__(self, "segment_bytes", max(share, smallest))
        for name in (
            "capacity_bytes", "segment_bytes", "ttl_s", "segment_s", "commit_values", "commit_bytes",
            "queue_bytes", "carry_bytes_per_s", "disk_retry_s", "usage_flush_s", "maintenance_s",
        ):  # fmt: skip
            _expect_positive(name, getattr(self, name))
        if not 0 < self.low_watermark < self.high_watermark <= 1:
            watermarks = (self.low_watermark, self.high_watermark)
            raise InvalidRequest("watermarks", watermarks, "0 < low_watermark < high_watermark <= 1")
        if self.segment_bytes * 4 > self.capacity_bytes:
            raise InvalidRequest("segment_bytes", self.segment_bytes, "at most a quarter of capacity_bytes")
        if self.segment_s > self.ttl_s:
            raise InvalidRequest("segment_s", self.segment_s, f"at most ttl_s={self.ttl_s}")
        if self.durability not in ("batch", "none"):
            raise InvalidRequest("durability", self.durability, "batch or none")

    @property
    def tenant_table(self) -> TenantTable:
        """Limits by tenant, with what they leave open filled in."""
        return TenantTable(self.ttl_s, self.tenant_limits, self.tenants)

    @property
    def usage_grain_s(self) -> float:
        """Two uses of a page closer than this may count as one after a restart."""
        return self.segment_s / 4


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """The tier of window state in DRAM."""

    budget_bytes: int = 0  # 0: a tenth of the memory this process may use
    ttl_s: float = 600.0
    max_record_bytes: int = 64 * MIB
    max_records_per_key: int = 1024

    def __post_init__(self) -> None:
        if self.budget_bytes == 0:
            object.__setattr__(self, "budget_bytes", memory_bytes() // 10)
        for name in ("budget_bytes", "ttl_s", "max_record_bytes", "max_records_per_key"):
            _expect_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One store node: its two tiers, where it listens, and what it admits at a time."""

    ssd: SsdConfig
    window: WindowConfig = field(default_factory=WindowConfig)
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    fingerprints: tuple[bytes, ...] = ()  # models whose pages are taken; empty: any
    read_threads: int = 4
    max_keys: int = 65_536  # page keys in one request
    max_value_bytes: int = 16 * MIB
    max_message_bytes: int = 32 * MIB
    max_matches: int = 256
    max_reads: int = 64  # streams at a time; each holds eight frames at most
    max_writes: int = 32
    max_window_calls: int = 64
    put_wait_s: float = 2.0  # how long a put may wait for room in the commit queue
    retry_after_s: float = 0.05
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 3.0
    grace_s: float = 5.0  # time for calls in flight when the node's process is told to stop
    tls: TlsConfig | None = None  # both sides show certificates
    metrics_port: int | None = None  # Prometheus scrapes on this port of ``metrics_host``; 0: any free one
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        for name in (
            "read_threads", "max_keys", "max_value_bytes", "max_message_bytes", "max_matches", "max_reads",
            "max_writes", "max_window_calls", "put_wait_s", "retry_after_s", "keepalive_s",
            "keepalive_timeout_s",
        ):  # fmt: skip
            _expect_positive(name, getattr(self, name))
        if not 0 <= self.port < 65_536:
            raise InvalidRequest("port", self.port, "0 to 65535")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65_536:
            raise InvalidRequest("metrics_port", self.metrics_port, "0 to 65535")
        if any(len(fingerprint) != 32 for fingerprint in self.fingerprints):
            raise InvalidRequest("fingerprints", [len(f) for f in self.fingerprints], "32 bytes each")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How long a client waits for a store before it calls it a miss, and what it keeps in memory."""

    match_timeout_s: float = 0.5
    stall_timeout_s: float = 1.0  # between two messages of a stream
    transfer_bytes_per_s: float = 50e6  # a whole transfer may take stall_timeout_s + bytes / this
    put_timeout_s: float = 10.0
    window_timeout_s: float = 2.0
    stats_timeout_s: float = 2.0
    read_ahead_bytes: int = 8 * MIB  # how far a shared fetch runs ahead of its fastest reader
    join_bytes: int = 8 * MIB  # after so much of a fetch an equal one starts anew instead of sharing it
    lag_bytes: int = 64 * MIB  # how far the slowest reader may fall behind before it fetches for itself
    max_window_bytes: int = 64 * MIB
    max_value_bytes: int = 16 * MIB
    max_message_bytes: int = 32 * MIB
    breaker_failures: int = 3
    breaker_open_s: float = 0.5
    breaker_max_open_s: float = 8.0
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _expect_positive(name, getattr(self, name))


def _expect_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InvalidRequest(name, value, "must be above 0")
