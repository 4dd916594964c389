"""Settings of the three stage workers. Frozen; unknown keys are refused; units are in the names."""

from __future__ import annotations

from cedar.kvstore.tls import TlsConfig
from pydantic import BaseModel, ConfigDict, Field


class WorkerConfig(BaseModel):
    """What every worker needs to know.

    ``port`` 0 picks a free one. ``threads`` are torch's threads inside one operation. ``drain_s`` bounds how
    long ``stop()`` waits for running requests before it cancels them. A call on the engine's thread that
    takes longer than ``stuck_s`` makes the worker unhealthy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    drain_s: float = Field(default=30.0, ge=0)
    stuck_s: float = Field(default=300.0, gt=0)
    retry_after_ms: int = Field(default=250, ge=1)


class EncoderConfig(WorkerConfig):
    """Encoder worker: features stay for ``cache_ttl_s`` after their last use, within ``cache_bytes``."""

    cache_bytes: int = Field(default=256 << 20, gt=0)
    cache_ttl_s: float = Field(default=600.0, gt=0)
    max_queue: int = Field(default=64, ge=1)
    encode_timeout_s: float = Field(default=60.0, gt=0)
    max_image_bytes: int = Field(default=20 << 20, gt=0)
    max_image_pixels: int = Field(default=64_000_000, gt=0)


class PagedConfig(WorkerConfig):
    """What Prefill and Decode share: memory for pages and window state, and the store behind it.

    ``page_tokens`` unset: the model's default. ``store``: which one (``kvstore.connect``), unset for none;
    one that is silent for ``store_timeout_s`` is a miss. ``store_tls``: certificates for the way there.
    ``put_queue_bytes`` bounds pages that wait to be stored; what does not fit is dropped and counted.
    ``store_wait_s`` bounds how long a request's last event waits for the store to acknowledge its puts;
    tokens never wait for it. ``share_replayed_pages``: pages computed after a bounded replay, whose bytes
    depend slightly on where the hit was, may serve other requests; off, they stay with their own request.
    ``drafting``: Decode verifies what the checkpoint's draft module proposes, for which Prefill keeps its
    rings; streams are the same either way.
    """

    page_tokens: int | None = Field(default=None, ge=1)
    pages: int = Field(ge=1)
    slots: int = Field(ge=1)
    store: str | None = None
    store_tls: TlsConfig | None = None
    store_timeout_s: float = Field(default=1.0, gt=0)
    put_queue_bytes: int = Field(default=64 << 20, ge=0)
    store_wait_s: float = Field(default=1.0, ge=0)
    share_replayed_pages: bool = True
    drafting: bool = False


class PrefillConfig(PagedConfig):
    """Prefill worker. ``slots`` bounds how many prompts are loading, computing or being handed over.

    ``chunk_pages``: a prompt runs in chunks that end on multiples of so many pages, so that each page is
    sealed and sent while the next chunk computes. ``heartbeat_s``: a handoff that has nothing to send says
    so this often, which lets Decode keep its own patience (``handoff_idle_s``) short.
    """

    pages: int = Field(default=256, ge=1)
    slots: int = Field(default=4, ge=1)
    chunk_pages: int = Field(default=2, ge=1)
    max_queue: int = Field(default=64, ge=0)
    queue_timeout_s: float = Field(default=60.0, gt=0)
    features_timeout_s: float = Field(default=30.0, gt=0)
    handoff_timeout_s: float = Field(default=30.0, gt=0)
    heartbeat_s: float = Field(default=2.0, gt=0)


class DecodeConfig(PagedConfig):
    """Decode worker. ``slots`` is the largest batch.

    ``request_lease_s``: a request that nobody streams is cancelled after so long. ``finished_ttl_s`` and
    ``finished_max`` bound how long and how many ended token logs stay for a stream that broke at the end.
    With ``drafting``, a proposal is verified while the likelihood that it and those before it are accepted is
    at least ``draft_confidence``. ``prepare_tokens``: on a GPU, steps of every batch size and of contexts up
    to this long are compiled and captured before the worker is ready.
    """

    pages: int = Field(default=512, ge=1)
    slots: int = Field(default=16, ge=1)
    request_lease_s: float = Field(default=30.0, gt=0)
    finished_ttl_s: float = Field(default=60.0, ge=0)
    finished_max: int = Field(default=1024, ge=0)
    handoff_idle_s: float = Field(default=30.0, gt=0)
    draft_confidence: float = Field(default=0.3, ge=0, le=1)
    prepare_tokens: int = Field(default=65_536, ge=0)
