from cedar.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("image", "content_hash", "tenant")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    content_hash: bytes
    tenant: bytes
    def __init__(self, image: _Optional[bytes] = ..., content_hash: _Optional[bytes] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("rows", "columns", "feature_bytes", "cached", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    feature_bytes: int
    cached: bool
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ..., feature_bytes: _Optional[int] = ..., cached: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class FeaturesRequest(_message.Message):
    __slots__ = ("content_hash", "tenant")
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    content_hash: bytes
    tenant: bytes
    def __init__(self, content_hash: _Optional[bytes] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class FeatureMeta(_message.Message):
    __slots__ = ("content_hash", "rows", "width", "checksum")
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    content_hash: bytes
    rows: int
    width: int
    checksum: bytes
    def __init__(self, content_hash: _Optional[bytes] = ..., rows: _Optional[int] = ..., width: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "images", "sampling", "root_key", "page_keys", "hit_pages", "window", "decode_address", "decode_incarnation", "features", "prompt_tokens", "tenant", "encoder_start", "decoder_start")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROOT_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    HIT_PAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_START_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: bytes
    images: _containers.RepeatedCompositeFieldContainer[_common_pb2.ImageSpan]
    sampling: _common_pb2.SamplingParams
    root_key: bytes
    page_keys: bytes
    hit_pages: int
    window: WindowRef
    decode_address: str
    decode_incarnation: int
    features: _containers.RepeatedCompositeFieldContainer[FeatureSource]
    prompt_tokens: int
    tenant: bytes
    encoder_start: int
    decoder_start: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[_common_pb2.ImageSpan, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., root_key: _Optional[bytes] = ..., page_keys: _Optional[bytes] = ..., hit_pages: _Optional[int] = ..., window: _Optional[_Union[WindowRef, _Mapping]] = ..., decode_address: _Optional[str] = ..., decode_incarnation: _Optional[int] = ..., features: _Optional[_Iterable[_Union[FeatureSource, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., tenant: _Optional[bytes] = ..., encoder_start: _Optional[int] = ..., decoder_start: _Optional[int] = ...) -> None: ...

class WindowRef(_message.Message):
    __slots__ = ("page_key", "tokens", "digest")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    tokens: int
    digest: bytes
    def __init__(self, page_key: _Optional[bytes] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FeatureSource(_message.Message):
    __slots__ = ("content_hash", "encoder_address")
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ENCODER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    content_hash: bytes
    encoder_address: str
    def __init__(self, content_hash: _Optional[bytes] = ..., encoder_address: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("admitted", "done")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    admitted: PrefillAdmitted
    done: PrefillDone
    def __init__(self, admitted: _Optional[_Union[PrefillAdmitted, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillAdmitted(_message.Message):
    __slots__ = ("sources", "encoder_start", "decoder_start")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ENCODER_START_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_FIELD_NUMBER: _ClassVar[int]
    sources: _common_pb2.PromptSources
    encoder_start: int
    decoder_start: int
    def __init__(self, sources: _Optional[_Union[_common_pb2.PromptSources, _Mapping]] = ..., encoder_start: _Optional[int] = ..., decoder_start: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("traffic", "queue_s", "compute_s", "handoff_s")
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    traffic: _common_pb2.Traffic
    queue_s: float
    compute_s: float
    handoff_s: float
    def __init__(self, traffic: _Optional[_Union[_common_pb2.Traffic, _Mapping]] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., handoff_s: _Optional[float] = ...) -> None: ...

class HandoffHeader(_message.Message):
    __slots__ = ("request_id", "decode_incarnation", "fingerprint", "state_groups", "token_ids", "images", "sampling", "root_key", "page_keys", "prompt_tokens", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STATE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROOT_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode_incarnation: int
    fingerprint: bytes
    state_groups: _containers.RepeatedScalarFieldContainer[str]
    token_ids: bytes
    images: _containers.RepeatedCompositeFieldContainer[_common_pb2.ImageSpan]
    sampling: _common_pb2.SamplingParams
    root_key: bytes
    page_keys: bytes
    prompt_tokens: int
    tenant: bytes
    def __init__(self, request_id: _Optional[str] = ..., decode_incarnation: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., state_groups: _Optional[_Iterable[str]] = ..., token_ids: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[_common_pb2.ImageSpan, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., root_key: _Optional[bytes] = ..., page_keys: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class HandoffReply(_message.Message):
    __slots__ = ("accepted", "missing_pages", "refusal", "retry_after_ms")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_PAGES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    missing_pages: _containers.RepeatedScalarFieldContainer[int]
    refusal: str
    retry_after_ms: int
    def __init__(self, accepted: _Optional[bool] = ..., missing_pages: _Optional[_Iterable[int]] = ..., refusal: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class PageMeta(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[_Iterable[int]] = ...) -> None: ...

class StateMeta(_message.Message):
    __slots__ = ("tokens", "total_bytes", "offset", "checksum")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    total_bytes: int
    offset: int
    checksum: bytes
    def __init__(self, tokens: _Optional[int] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: _common_pb2.TokenEvent
    def __init__(self, token: _Optional[_Union[_common_pb2.TokenEvent, _Mapping]] = ...) -> None: ...

class HandoffFailed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class HandoffDone(_message.Message):
    __slots__ = ("pages_received",)
    PAGES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    pages_received: int
    def __init__(self, pages_received: _Optional[int] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("request_id", "from_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    from_index: int
    def __init__(self, request_id: _Optional[str] = ..., from_index: _Optional[int] = ...) -> None: ...

class StreamResponse(_message.Message):
    __slots__ = ("token", "end")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    token: _common_pb2.TokenEvent
    end: StreamEnd
    def __init__(self, token: _Optional[_Union[_common_pb2.TokenEvent, _Mapping]] = ..., end: _Optional[_Union[StreamEnd, _Mapping]] = ...) -> None: ...

class StreamEnd(_message.Message):
    __slots__ = ("reason", "tokens", "pages_sealed", "pages_stored", "decode_s", "state_stored", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_SEALED_FIELD_NUMBER: _ClassVar[int]
    PAGES_STORED_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_STORED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    tokens: int
    pages_sealed: int
    pages_stored: int
    decode_s: float
    state_stored: bool
    detail: str
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., tokens: _Optional[int] = ..., pages_sealed: _Optional[int] = ..., pages_stored: _Optional[int] = ..., decode_s: _Optional[float] = ..., state_stored: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class DecodeCancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DecodeCancelResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class WorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("stage", "incarnation", "pid", "active", "queued", "pages_total", "pages_leased", "pages_cached", "slots_total", "slots_leased", "counters", "fingerprint", "page_tokens", "page_bytes", "draining")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_LEASED_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_LEASED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    stage: str
    incarnation: int
    pid: int
    active: int
    queued: int
    pages_total: int
    pages_leased: int
    pages_cached: int
    slots_total: int
    slots_leased: int
    counters: _containers.ScalarMap[str, float]
    fingerprint: bytes
    page_tokens: int
    page_bytes: int
    draining: bool
    def __init__(self, stage: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., active: _Optional[int] = ..., queued: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_leased: _Optional[int] = ..., pages_cached: _Optional[int] = ..., slots_total: _Optional[int] = ..., slots_leased: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., fingerprint: _Optional[bytes] = ..., page_tokens: _Optional[int] = ..., page_bytes: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
