"""From the cluster's configuration to each worker's own. Pure."""

from __future__ import annotations

from pathlib import Path

from cedar.actors.config import DecodeConfig, EncoderConfig, PrefillConfig
from cedar.cluster.config import ClusterConfig
from cedar.kvstore.config import NodeConfig, SsdConfig, WindowConfig


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
        store_timeout_s=config.deadlines.store_s,
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
        put_queue_bytes=stage.put_queue_bytes,
        store_timeout_s=config.deadlines.store_s,
    )


def store_config(config: ClusterConfig, directory: str, host: str) -> NodeConfig:
    """``directory``: of this node's pages; ``host``: the interface to listen on, resolved."""
    store = config.store
    return NodeConfig(
        ssd=SsdConfig(
            directory=Path(directory), capacity_bytes=store.size_limit_bytes, ttl_s=store.page_ttl_s
        ),
        window=WindowConfig(budget_bytes=store.window_bytes, ttl_s=store.window_ttl_s),
        host=host,
        metrics_port=store.metrics_port,
    )
