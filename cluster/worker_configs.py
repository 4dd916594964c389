"""From the cluster's configuration to each worker's own. Pure."""

from __future__ import annotations

from pathlib import Path

from cedar.actors.config import DecodeConfig, EncoderConfig, PrefillConfig
from cedar.cluster.config import ClusterConfig
from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.keys import tenant_domain
from cedar.kvstore.tenants import TenantLimits
from cedar.kvstore.tls import TlsConfig

MEMBERSHIP = "membership://"


def encoder_config(config: ClusterConfig, host: str) -> EncoderConfig:
    """``host``: the interface to listen on, resolved."""
    stage = config.encoder
    return EncoderConfig(
        checkpoint=config.model.path,
        host=host,
        device=config.model.device,
        threads=stage.threads,
        drain_s=stage.drain_s,
        cache_bytes=stage.cache_bytes,
        cache_ttl_s=stage.cache_ttl_s,
        max_queue=stage.max_queue,
        encode_timeout_s=config.deadlines.encode_s,
        max_image_bytes=config.gateway.max_image_bytes,
        max_image_pixels=config.gateway.max_image_pixels,
    )


def prefill_config(config: ClusterConfig, host: str) -> PrefillConfig:
    """``host``: the interface to listen on, resolved. The store is told later, when it is known."""
    stage = config.prefill
    return PrefillConfig(
        checkpoint=config.model.path,
        host=host,
        device=config.model.device,
        threads=stage.threads,
        drain_s=stage.drain_s,
        page_tokens=config.model.page_tokens,
        pages=stage.pages,
        slots=stage.slots,
        chunk_pages=stage.chunk_pages,
        max_queue=stage.max_queue,
        queue_timeout_s=stage.queue_timeout_s,
        put_queue_bytes=stage.put_queue_bytes,
        drafting=config.decode.drafting,
        store_timeout_s=config.deadlines.store_s,
        store_tls=store_tls(config),
        share_replayed_pages=config.store.share_replayed_pages,
    )


def decode_config(config: ClusterConfig, host: str) -> DecodeConfig:
    """``host``: the interface to listen on, resolved. The store is told later, when it is known."""
    stage = config.decode
    return DecodeConfig(
        checkpoint=config.model.path,
        host=host,
        device=config.model.device,
        threads=stage.threads,
        drain_s=stage.drain_s,
        page_tokens=config.model.page_tokens,
        pages=stage.pages,
        slots=stage.slots,
        request_lease_s=stage.request_lease_s,
        finished_ttl_s=stage.finished_ttl_s,
        draft_confidence=stage.draft_confidence,
        prepare_tokens=stage.prepare_tokens,
        put_queue_bytes=stage.put_queue_bytes,
        drafting=config.decode.drafting,
        store_timeout_s=config.deadlines.store_s,
        store_tls=store_tls(config),
        share_replayed_pages=config.store.share_replayed_pages,
    )


def store_config(
    config: ClusterConfig, directory: str, host: str, *, index: int = 0, secret: bytes = b""
) -> NodeConfig:
    """``directory``: of this node's pages; ``host``: the interface to listen on, resolved; ``index``: which
    of the store's nodes; ``secret``: what tenants' domains are derived with, needed for limits by tenant."""
    store = config.store
    tenants = {
        tenant_domain(secret, name): TenantLimits(ttl_s=limits.ttl_s, quota_bytes=limits.quota_bytes)
        for name, limits in (store.tenants if secret else {}).items()
    }
    return NodeConfig(
        ssd=SsdConfig(
            directory=Path(directory),
            capacity_bytes=store.size_limit_bytes,
            ttl_s=store.page_ttl_s,
            durability=store.durability,
            tenants=tenants,
        ),
        window=WindowConfig(budget_bytes=store.window_bytes, ttl_s=store.window_ttl_s),
        host=host,
        metrics_port=store.metrics_port + index if store.metrics_port else store.metrics_port,
        tls=store_tls(config),
    )


def peer_config(config: ClusterConfig, target: str) -> PeerConfig:
    """``target``: "membership://host:port", or anything else for the only node."""
    store = config.store
    return PeerConfig(
        membership=target.removeprefix(MEMBERSHIP) if target.startswith(MEMBERSHIP) else "",
        copies=store.copies,
        copy_after_hits=store.copy_after_hits,
        copy_bytes_per_s=store.copy_bytes_per_s,
        move_bytes_per_s=store.move_bytes_per_s,
    )


def store_tls(config: ClusterConfig) -> TlsConfig | None:
    """The store's certificates."""
    tls = config.store.tls
    if tls is None:
        return None
    return TlsConfig(
        ca_file=Path(tls.ca_file),
        certificate_file=Path(tls.certificate_file),
        key_file=Path(tls.key_file),
        server_name=tls.server_name,
    )
