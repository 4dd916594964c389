from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_FAILED: FinishReason

class RawFrame(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ImageSpan(_message.Message):
    __slots__ = ("start", "length", "rows", "columns", "content_hash")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    rows: int
    columns: int
    content_hash: bytes
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., content_hash: _Optional[bytes] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_ids", "logprobs", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("index", "id", "logprob", "top")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class PromptSources(_message.Message):
    __slots__ = ("prompt_tokens", "hit_local_tokens", "hit_store_tokens", "state_tokens", "computed_tokens", "replayed_tokens", "state_restored")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_RESTORED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    hit_local_tokens: int
    hit_store_tokens: int
    state_tokens: int
    computed_tokens: int
    replayed_tokens: int
    state_restored: bool
    def __init__(self, prompt_tokens: _Optional[int] = ..., hit_local_tokens: _Optional[int] = ..., hit_store_tokens: _Optional[int] = ..., state_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., state_restored: _Optional[bool] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("pages_hit", "pages_sealed", "pages_sent", "pages_stored", "page_bytes_sent", "state_bytes_sent", "feature_bytes_sent", "images_encoded")
    PAGES_HIT_FIELD_NUMBER: _ClassVar[int]
    PAGES_SEALED_FIELD_NUMBER: _ClassVar[int]
    PAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_STORED_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    pages_hit: int
    pages_sealed: int
    pages_sent: int
    pages_stored: int
    page_bytes_sent: int
    state_bytes_sent: int
    feature_bytes_sent: int
    images_encoded: int
    def __init__(self, pages_hit: _Optional[int] = ..., pages_sealed: _Optional[int] = ..., pages_sent: _Optional[int] = ..., pages_stored: _Optional[int] = ..., page_bytes_sent: _Optional[int] = ..., state_bytes_sent: _Optional[int] = ..., feature_bytes_sent: _Optional[int] = ..., images_encoded: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queue_s", "encoder_s", "prefill_s", "handoff_s", "decode_s", "ttft_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    ENCODER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    encoder_s: float
    prefill_s: float
    handoff_s: float
    decode_s: float
    ttft_s: float
    def __init__(self, queue_s: _Optional[float] = ..., encoder_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., ttft_s: _Optional[float] = ...) -> None: ...
