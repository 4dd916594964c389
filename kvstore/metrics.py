"""Prometheus metrics of a store node and of prompts: one table of fixed names, one registry per owner.

``METRICS`` is the table: every metric that exists is made from it, and docs/operations.md lists exactly it.
A store node knows tenants by their domain, so it labels by the first 12 hex digits of that (``unknown`` where
a look-up found nothing that would say whose it was); a gateway labels by name. After ``MAX_TENANTS`` the rest
is ``other``.

The hit rate is defined once: tokens served from a cache over prompt tokens, counted at a prompt's first
admission (``PromptMetrics``), from the same record that its caller is sent. See ``hit_rate``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from cedar.kvstore.stats import Observer, PageUse
from cedar.v1 import common_pb2

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_TENANTS: Final = 64
Kind = Literal["counter", "gauge", "histogram"]
_AGES_S: Final = (1, 10, 60, 600, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 48 * 3600, 72 * 3600, 168 * 3600)
_COMMIT_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_COMMIT_VALUES: Final = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Metric:
    """One line of the table. ``buckets``: of a histogram. ``stat``: the node statistic that a gauge shows."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    stat: str = ""


NODE_METRICS: Final = (
    Metric("cedar_store_lookup_pages_total", "counter", ("tier", "tenant", "result"),
           "pages asked for, by `result` (hit, miss); of tier `window`: records"),
    Metric("cedar_store_lookup_tokens_total", "counter", ("tier", "tenant", "result"),
           "the same in tokens; of tier `window`: tokens past the last whole page"),
    Metric("cedar_store_read_bytes_total", "counter", ("tier", "tenant"), "bytes served"),
    Metric("cedar_store_written_bytes_total", "counter", ("tier", "tenant"), "bytes stored"),
    Metric("cedar_store_hit_age_seconds", "histogram", ("tier",), "time since a served page was stored",
           _AGES_S),
    Metric("cedar_store_evicted_pages_total", "counter", ("tier", "cause"),
           "pages (records) dropped: `expired`, `capacity`, `quota`, `purged`"),
    Metric("cedar_store_evicted_ttl_left_seconds", "histogram", ("cause",),
           "time that an evicted page could still have lived", _AGES_S),
    Metric("cedar_store_quarantined_pages_total", "counter", ("reason",), "stored values that are damaged"),
    Metric("cedar_store_commit_values", "histogram", (), "pages in a group commit", _COMMIT_VALUES),
    Metric("cedar_store_commit_seconds", "histogram", (),
           "from a group commit's first write to the end of its sync, which may follow another's", _COMMIT_S),
    Metric("cedar_store_refused_pages_total", "counter", ("reason",),
           "puts refused: `full`, `disk`, `queue`, `quota`"),
    Metric("cedar_store_pages", "gauge", (), "pages held", stat="store_pages"),
    Metric("cedar_store_page_bytes", "gauge", (), "bytes of the pages held", stat="store_page_bytes"),
    Metric("cedar_store_tenant_bytes", "gauge", ("tenant",), "bytes of the pages held, by tenant"),
    Metric("cedar_store_disk_bytes", "gauge", (), "disk taken", stat="store_disk_bytes"),
    Metric("cedar_store_capacity_bytes", "gauge", (), "disk that may be taken", stat="store_capacity_bytes"),
    Metric("cedar_store_queue_bytes", "gauge", (), "bytes that wait for a commit", stat="store_queue_bytes"),
    Metric("cedar_store_window_records", "gauge", (), "window records in DRAM", stat="store_window_records"),
    Metric("cedar_store_window_bytes", "gauge", (), "DRAM they take", stat="store_window_bytes"),
    Metric("cedar_store_window_budget_bytes", "gauge", (), "DRAM they may take",
           stat="store_window_budget_bytes"),
    Metric("cedar_store_replication_queue_runs", "gauge", (), "runs of pages that wait for their second copy",
           stat="store_replication_queue_runs"),
    Metric("cedar_store_replication_lag_seconds", "gauge", (), "how long the first of them has waited",
           stat="store_replication_lag_s"),
)  # fmt: skip

PROMPT_METRICS: Final = (
    Metric("cedar_prompt_tokens_total", "counter", ("tenant", "source"),
           "prompt tokens: `local` (Prefill's memory), `store`, `state` (a window record), `computed`"),
    Metric("cedar_prompt_pages_total", "counter", ("tenant", "source"), "the same in whole pages"),
    Metric("cedar_prompt_replayed_tokens_total", "counter", ("tenant",),
           "tokens run again to rebuild window state; not part of the sum"),
    Metric("cedar_prompts_total", "counter", ("tenant", "window"),
           "admitted prompts, by whether window state was `restored` or not (`rebuilt`)"),
)  # fmt: skip

METRICS: Final = NODE_METRICS + PROMPT_METRICS


def hit_rate(sources: common_pb2.PromptSources) -> float:
    """The hit rate, of one prompt or of a sum of them: tokens served from a cache over prompt tokens."""
    served = sources.hit_local_tokens + sources.hit_store_tokens + sources.state_tokens
    return served / sources.prompt_tokens if sources.prompt_tokens else 0.0


def metrics_table() -> str:
    """The table in Markdown, for docs/operations.md."""
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or '-'} | {m.meaning} |"
        for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows, ""])


class _Instruments:
    """The metrics of a table in a registry of their own, served over HTTP when asked to."""

    def __init__(self, table: Sequence[Metric]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(_BeforeScrape(self.refresh))  # first, so that the others follow it
        made: dict[str, Any] = {}
        for metric in table:
            if metric.kind == "histogram":
                made[metric.name] = Histogram(
                    metric.name, metric.meaning, metric.labels, registry=self.registry, buckets=metric.buckets
                )
            elif metric.kind == "counter":
                made[metric.name] = Counter(
                    metric.name, metric.meaning, metric.labels, registry=self.registry
                )
            else:
                made[metric.name] = Gauge(metric.name, metric.meaning, metric.labels, registry=self.registry)
        self._made = made
        self._tenants: set[str] = set()
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def of(self, name: str, *labels: str) -> Any:
        """A metric, with its labels set."""
        return self._made[name].labels(*labels) if labels else self._made[name]

    def refresh(self) -> None:
        """Set what is read only when somebody asks."""

    def exposition(self) -> str:
        """What a scrape gets."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer scrapes of ``http://host:port/metrics`` on a thread; the port. OSError: it is taken."""
        from prometheus_client import start_http_server

        self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering. May be called again."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tenant_label(self, name: str) -> str:
        """The name, or ``other`` once there are too many."""
        if name not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return "other"
            self._tenants.add(name)
        return name


class StoreMetrics(_Instruments, Observer):
    """Metrics of one node: set as ``Counters.observer``, it is told of every event. Any thread.

    ``stats``: the node's gauges by name, asked for at each scrape. ``tenants``: bytes held by tenant domain.
    ``page_tokens``: of the pages held; 0 while none is, and learnt from the first one stored.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, float]],
        tenants: Callable[[], Mapping[bytes, int]],
        page_tokens: int = 0,
    ) -> None:
        super().__init__(NODE_METRICS)
        self._stats = stats
        self._tenant_bytes = tenants
        self._page_tokens = page_tokens

    def refresh(self) -> None:
        """Set the gauges."""
        stats = self._stats()
        for metric in NODE_METRICS:
            if metric.stat:
                self.of(metric.name).set(stats.get(metric.stat, 0.0))
        self._made["cedar_store_tenant_bytes"].clear()
        for domain, size in self._tenant_bytes().items():
            self.of("cedar_store_tenant_bytes", self._domain(domain)).inc(size)

    # ---- what a node tells ----

    def looked_up(self, tier: str, tenant: bytes, asked: int, held: int, tokens: int | None = None) -> None:
        """A look-up of pages (of a window record, with its ``tokens``)."""
        label = self._domain(tenant)
        for result, pages in (("hit", held), ("miss", asked - held)):
            if pages:
                each = self._page_tokens if tokens is None else tokens % max(self._page_tokens, 1)
                self.of("cedar_store_lookup_pages_total", tier, label, result).inc(pages)
                self.of("cedar_store_lookup_tokens_total", tier, label, result).inc(pages * each)

    def served(self, tier: str, uses: Sequence[PageUse], size: int, page_tokens: int = 0) -> None:
        """Pages (or a record) of ``size`` bytes each were served."""
        self._page_tokens = page_tokens or self._page_tokens
        ages = self.of("cedar_store_hit_age_seconds", tier)
        for use in uses:
            ages.observe(use.age_s)
            self.of("cedar_store_read_bytes_total", tier, self._domain(use.tenant)).inc(size)

    def stored(self, tier: str, tenant: bytes, size: int, page_tokens: int = 0) -> None:
        """Bytes were stored."""
        self._page_tokens = page_tokens or self._page_tokens
        self.of("cedar_store_written_bytes_total", tier, self._domain(tenant)).inc(size)

    def evicted(self, tier: str, cause: str, pages: int, ttl_left_s: Sequence[float] = ()) -> None:
        """Pages were dropped."""
        self.of("cedar_store_evicted_pages_total", tier, cause).inc(pages)
        left = self.of("cedar_store_evicted_ttl_left_seconds", cause)
        for seconds in ttl_left_s:
            left.observe(max(seconds, 0.0))

    def quarantined(self, reason: str) -> None:
        """A value failed verification."""
        self.of("cedar_store_quarantined_pages_total", reason).inc()

    def committed(self, values: int, seconds: float) -> None:
        """A group commit is on disk."""
        self.of("cedar_store_commit_values").observe(values)
        self.of("cedar_store_commit_seconds").observe(seconds)

    def refused(self, reason: str, pages: int) -> None:
        """Puts were refused."""
        self.of("cedar_store_refused_pages_total", reason or "other").inc(pages)

    def _domain(self, tenant: bytes) -> str:
        return self.tenant_label(tenant.hex()[:12] if tenant else "unknown")


class PromptMetrics(_Instruments):
    """Where prompts came from, by tenant name: what ``hit_rate`` is computed from. Any thread."""

    def __init__(self, page_tokens: int) -> None:
        super().__init__(PROMPT_METRICS)
        self._page_tokens = page_tokens

    def admitted(self, tenant: str, sources: common_pb2.PromptSources) -> None:
        """Count a prompt, once: at its first admission."""
        label = self.tenant_label(tenant)
        parts = {
            "local": sources.hit_local_tokens,
            "store": sources.hit_store_tokens,
            "state": sources.state_tokens,
            "computed": sources.computed_tokens,
        }
        for source, tokens in parts.items():
            self.of("cedar_prompt_tokens_total", label, source).inc(tokens)
            self.of("cedar_prompt_pages_total", label, source).inc(tokens // self._page_tokens)
        self.of("cedar_prompt_replayed_tokens_total", label).inc(sources.replayed_tokens)
        window = "restored" if sources.state_restored else "rebuilt"
        self.of("cedar_prompts_total", label, window).inc()

    def totals(self, tenant: str | None = None) -> common_pb2.PromptSources:
        """The sum over all prompts (of one tenant), as the counters have it."""
        sums: dict[str, float] = {}
        replayed = 0.0
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == "cedar_prompt_tokens_total" and tenant in (None, sample.labels["tenant"]):
                    source = sample.labels["source"]
                    sums[source] = sums.get(source, 0.0) + sample.value
                elif sample.name == "cedar_prompt_replayed_tokens_total" and tenant in (
                    None,
                    sample.labels["tenant"],
                ):
                    replayed += sample.value
        return common_pb2.PromptSources(
            prompt_tokens=int(sum(sums.values())),
            replayed_tokens=int(replayed),
            hit_local_tokens=int(sums.get("local", 0)),
            hit_store_tokens=int(sums.get("store", 0)),
            state_tokens=int(sums.get("state", 0)),
            computed_tokens=int(sums.get("computed", 0)),
        )


class _BeforeScrape:
    """A collector that gives nothing, and brings the gauges up to date."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh

    def describe(self) -> list[Any]:
        """Nothing."""
        return []

    def collect(self) -> list[Any]:
        """Nothing, after a refresh."""
        self._refresh()
        return []
