"""What a cluster is asked to be: frozen, strict pydantic models, one per owner.

Every name ends in its unit (``_s``, ``_bytes``, ``_tokens``) where it has one. Unknown keys are
refused (``cedar.cluster.config_load`` turns that into a suggestion). What a running cluster turned
out to be (addresses, process ids, fingerprint) is another type: ``cedar.cluster.state_file``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIB = 1 << 20
GIB = 1 << 30

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=1)]
StageName = Literal["encoder", "prefill", "decode"]
Signal = Literal["requests", "queued", "pages", "slots"]


class Settings(BaseModel):
    """Base of every section: immutable, closed, keyword-only, each field with a description."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class ModelSettings(Settings):
    """Which checkpoint is served, and under what name."""

    path: str
    """Checkpoint in the published layout: a folder, or a URL that fsspec opens. Relative to the YAML file."""
    preset: str | None = None
    """A model of configs/models/; when set, the checkpoint's config.json must say the same."""
    served_name: str = "cedar"
    """Name that GetModel reports."""
    page_tokens: Count | None = None
    """Tokens in a page: a constant of the stored format, a multiple of every compression ratio. Unset: the
    model's own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the stages compute."""


class AutoscalingSettings(Settings):
    """How many replicas of a stage there are. The planner sets sum(signal) / target, held within bounds."""

    min: Count = 1
    """Replicas at least."""
    max: Count = 1
    """Replicas at most."""
    signal: Signal = "requests"
    """Load of a replica: requests (active + queued), queued, or leased pages or slots as a fraction."""
    target: Annotated[float, Field(gt=0)] = 4.0
    """The signal's value a replica should have: a count, or a fraction of 1 for pages and slots."""
    up_after_s: Annotated[float, Field(ge=0)] = 5.0
    """Seconds the load must ask for more before replicas are added."""
    down_after_s: Annotated[float, Field(ge=0)] = 120.0
    """Seconds the load must ask for fewer before replicas are drained."""
    stale_after_s: Seconds = 15.0
    """A reading older than this is not believed; without enough fresh readings the size is held."""

    @model_validator(mode="after")
    def _bounds(self) -> AutoscalingSettings:
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is below min: {self.min}")
        if self.signal in ("pages", "slots") and self.target > 1:
            raise ValueError(f"target: {self.target} is over 1, and signal {self.signal!r} is a fraction")
        return self


class StageSettings(Settings):
    """What every stage has."""

    autoscaling: AutoscalingSettings = AutoscalingSettings()
    """Replica bounds and what moves them."""
    host: str = "127.0.0.1"
    """Interface that the stage's gRPC server listens on; "node" means the node's own address."""
    cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that Ray reserves for a replica. A promise to the scheduler, not a limit."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for a replica."""
    threads: Count = 1
    """Compute threads of a replica (OpenMP and torch)."""
    drain_s: Seconds = 30.0
    """Seconds a replica that goes away may take to finish its requests and leases."""


class EncoderSettings(StageSettings):
    """The vision stage."""

    cache_bytes: Bytes = 256 * MIB
    """Memory for image features waiting to be fetched."""
    cache_ttl_s: Seconds = 600.0
    """Seconds that features are kept after their last use."""
    max_queue: Count = 64
    """Images that may wait in one replica."""


class PrefillSettings(StageSettings):
    """The prefill stage."""

    pages: Count = 256
    """Pages of global KV in one replica's memory."""
    slots: Count = 4
    """Prompts in one replica's memory at once, each with its window state."""
    chunk_pages: Count = 2
    """Pages computed in one step; what it seals is sent while the next one runs."""
    max_queue: Count = 64
    """Prompts that may wait in one replica."""
    queue_timeout_s: Seconds = 60.0
    """Seconds a prompt may wait in one replica for a slot and pages."""
    put_queue_bytes: Bytes = 64 * MIB
    """Memory for sealed pages on their way to the store; what does not fit is not stored."""


class DecodeSettings(StageSettings):
    """The decode stage."""

    pages: Count = 512
    """Pages of global KV in one replica's memory."""
    slots: Count = 16
    """Sequences in one replica; all of them go through each step together."""
    request_lease_s: Seconds = 30.0
    """Seconds a request that nobody streams is kept for its stream to come back."""
    finished_ttl_s: Seconds = 60.0
    """Seconds that the tokens of a finished request can still be streamed."""
    drafting: bool = False
    """Verify several tokens a step, proposed by the checkpoint's draft module. Streams are the same to the
    bit, only faster or, in large batches of hard text, slower. Prefill then keeps the module's rings."""
    draft_confidence: Annotated[float, Field(ge=0, le=1)] = 0.3
    """With drafting, a proposal is verified while it and those before it are this likely to be accepted."""
    prepare_tokens: Annotated[int, Field(ge=0)] = 65_536
    """On a GPU, steps of every batch size and of contexts up to so many tokens are compiled and captured
    before a replica is ready; longer ones when they first come up. 0: all of them then."""
    put_queue_bytes: Bytes = 64 * MIB
    """Memory for sealed pages on their way to the store; what does not fit is not stored."""


class TlsSettings(Settings):
    """Certificates of the store: its nodes, the member list and everyone who calls them show one."""

    ca_file: str
    """Authorities that are trusted, PEM. Like the other two, under the same path on every machine."""
    certificate_file: str
    """Own certificate with its chain, PEM."""
    key_file: str
    """Its key, PEM."""
    server_name: str = ""
    """Name that servers' certificates are checked for. Empty: the host in their address."""


class TenantSettings(Settings):
    """Limits of one tenant in the store."""

    ttl_s: Seconds | None = None
    """Seconds that its pages are kept after their last use. Unset: as everyone's."""
    quota_bytes: Bytes | None = None
    """Most bytes on disk, on all nodes together and copies included. Unset: no limit of its own."""


class StoreSettings(Settings):
    """The page store and the window tier."""

    nodes: Annotated[int, Field(ge=0)] = 1
    """Store nodes; pages are spread over them. 0 runs without a store: every prompt is cold."""
    directory: str | None = None
    """Folder of the pages on disk, one subfolder per node. Unset: inside the cluster's temporary
    folder."""
    host: str = "127.0.0.1"
    """Interface that store nodes listen on; "node" means the node's own address."""
    size_limit_bytes: Bytes = 4 * GIB
    """Most bytes on disk per node; the oldest pages go first."""
    page_ttl_s: Seconds = 72 * 3600.0
    """Seconds that a page is kept after its last use."""
    window_bytes: Bytes = 256 * MIB
    """Memory for window state per node."""
    window_ttl_s: Seconds = 600.0
    """Seconds that window state is kept after its last use."""
    share_replayed_pages: bool = True
    """Pages computed after a bounded replay may serve other requests of their tenant. Their bytes depend
    slightly on where the hit was, which the model is trained for; off, they stay with their own request."""
    durability: Literal["batch", "none"] = "batch"
    """When a put is acknowledged: its batch is on disk, or (none) handed to the kernel."""
    copies: Count = 2
    """Nodes that hold a page which is hit often; 1 makes no copies."""
    copy_after_hits: Annotated[int, Field(ge=0)] = 3
    """Hits after which a page is copied to a second node. 0 copies every page when it is written."""
    copy_bytes_per_s: Bytes = 32 * MIB
    """Bandwidth of a node for copies."""
    move_bytes_per_s: Bytes = 32 * MIB
    """Bandwidth of a node for pages that move when nodes come and go."""
    lease_s: Annotated[float, Field(ge=0.5)] = 5.0
    """A node of several that is silent for this long is no longer asked; what it held is a miss."""
    tenants: dict[str, TenantSettings] = {}
    """Limits of single tenants, by name: `ttl_s` and `quota_bytes`."""
    tls: TlsSettings | None = None
    """Certificates. Unset: no encryption inside the cluster."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on loopback that answers Prometheus for store node 0; node i has this port + i. Unset: none."""
    cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that Ray reserves for a node."""

    @model_validator(mode="after")
    def _room_for_ports(self) -> StoreSettings:
        if self.metrics_port and self.metrics_port + self.nodes > 65536:
            raise ValueError(f"metrics_port: {self.metrics_port} leaves no port for {self.nodes} nodes")
        return self


class AuthSettings(Settings):
    """Who may call, and which tenant they are. Tenants never share pages."""

    api_keys_file: str | None = None
    """YAML file, API key to tenant name. Unset: no key is asked for and all callers are the default
    tenant."""
    default_tenant: str = "default"
    """Tenant of callers when no keys are configured."""
    secret_file: str | None = None
    """File with the secret that tenant domains are derived from. Unset: made once, beside the store."""


class GatewaySettings(Settings):
    """The public gRPC endpoint and its limits."""

    host: str = "127.0.0.1"
    """Interface to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    """TCP port; 0 takes a free one."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on loopback that answers Prometheus for the gateway. Unset: none."""
    auth: AuthSettings = AuthSettings()
    """API keys and tenants."""
    max_prompt_tokens: Count = 1 << 20
    """Longest prompt, after images are expanded; the model's context is a limit too."""
    max_images: Annotated[int, Field(ge=0)] = 32
    """Most images in one request."""
    max_image_bytes: Annotated[int, Field(ge=1, le=24 * MIB)] = 20 * MIB
    """Largest encoded image. It travels to the Encoder in one message."""
    max_image_pixels: Count = 64_000_000
    """Most pixels of one image, checked before it is decoded."""
    max_request_bytes: Bytes = 128 * MIB
    """Largest request message."""
    max_output_tokens: Count = 65536
    """Most tokens one request may ask for."""
    default_output_tokens: Count = 1024
    """Tokens generated when a request does not say."""
    max_active_requests: Count = 256
    """Requests in the stages at once; more wait."""
    max_queued_requests: Annotated[int, Field(ge=0)] = 1024
    """Requests that may wait; more are refused with a retry delay."""
    max_attempts: Count = 4
    """Times that a request may be given to the stages, the first included."""
    threads: Count = 2
    """Threads that tokenize prompts and decode images."""
    cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that Ray reserves for the gateway."""


class DeadlineSettings(Settings):
    """Every wait has one."""

    request_s: Seconds = 600.0
    """A whole request, unless its client asks for less."""
    encode_s: Seconds = 60.0
    """One image in the Encoder."""
    prefill_s: Seconds = 300.0
    """One prompt in Prefill, its hand-over included."""
    token_s: Seconds = 60.0
    """Silence of a Decode worker before its stream counts as broken."""
    worker_s: Seconds = 30.0
    """Time for a worker of a stage to appear when none can be asked."""
    store_s: Seconds = 2.0
    """One look-up in the store; after that it is a miss."""
    start_s: Seconds = 180.0
    """A cluster's start."""
    stop_s: Seconds = 45.0
    """A cluster's end, draining included."""


class DirectorySettings(Settings):
    """Who is alive."""

    heartbeat_s: Seconds = 0.5
    """Seconds between a worker's announcements."""
    expire_after_s: Seconds = 3.0
    """A worker that is silent for this long is gone."""
    poll_s: Seconds = 0.5
    """Seconds between the gateway's looks at the directory."""


class RaySettings(Settings):
    """The Ray under the cluster."""

    address: str | None = None
    """An existing Ray to join ("auto", "host:port"). Unset: an isolated Ray of its own on this machine."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs that a local Ray is told it has. Unset: one for each process of the cluster; real cores are
    shared."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a local Ray."""
    object_store_bytes: Annotated[int, Field(ge=80 * MIB)] = 80 * MIB
    """Shared memory of a local Ray. No request passes through it."""
    temp_directory: str | None = None
    """Parent of a local Ray's session folder. Unset: the system's. Short: it holds UNIX sockets."""
    auth: Literal["disabled", "token"] = "disabled"
    """Ray's own token check, set alike in every process (RAY_AUTH_MODE)."""
    namespace: str = "cedar"
    """Ray namespace of the cluster's actors."""

    @model_validator(mode="after")
    def _existing(self) -> RaySettings:
        if self.address == "local":
            raise ValueError('address: "local" is what an unset address means; leave it out')
        return self


class ClusterConfig(Settings):
    """Everything one can ask of a cluster."""

    model: ModelSettings
    """The checkpoint."""
    gateway: GatewaySettings = GatewaySettings()
    """The public endpoint."""
    encoder: EncoderSettings = EncoderSettings()
    """Vision."""
    prefill: PrefillSettings = PrefillSettings()
    """Causal encoder and decoder replay."""
    decode: DecodeSettings = DecodeSettings()
    """Token generation."""
    store: StoreSettings = StoreSettings()
    """Pages on SSD, window state in DRAM."""
    directory: DirectorySettings = DirectorySettings()
    """Heartbeats."""
    deadlines: DeadlineSettings = DeadlineSettings()
    """Waits."""
    ray: RaySettings = RaySettings()
    """Ray."""

    @model_validator(mode="after")
    def _consistent(self) -> ClusterConfig:
        if self.directory.expire_after_s < 2 * self.directory.heartbeat_s:
            raise ValueError(
                f"directory.expire_after_s: {self.directory.expire_after_s} is below two heartbeats "
                f"(directory.heartbeat_s: {self.directory.heartbeat_s})"
            )
        if self.store.tenants and self.ray.address is not None and self.gateway.auth.secret_file is None:
            raise ValueError(
                "store.tenants: every node must know whose pages are whose, "
                "which needs gateway.auth.secret_file on an existing Ray (ray.address)"
            )
        if self.gateway.default_output_tokens > self.gateway.max_output_tokens:
            raise ValueError(
                f"gateway.default_output_tokens: {self.gateway.default_output_tokens} is over "
                f"gateway.max_output_tokens: {self.gateway.max_output_tokens}"
            )
        return self

    def stage(self, name: StageName) -> StageSettings:
        """The settings of one stage."""
        stages: dict[StageName, StageSettings] = {
            "encoder": self.encoder,
            "prefill": self.prefill,
            "decode": self.decode,
        }
        return stages[name]
