from cedar.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplainRequest(_message.Message):
    __slots__ = ("root_key", "page_keys")
    ROOT_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    root_key: bytes
    page_keys: bytes
    def __init__(self, root_key: _Optional[bytes] = ..., page_keys: _Optional[bytes] = ...) -> None: ...

class PageState(_message.Message):
    __slots__ = ("held", "expired", "damaged", "size", "page_index", "tenant", "age_s", "idle_s", "ttl_left_s", "segment")
    HELD_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TTL_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    held: bool
    expired: bool
    damaged: bool
    size: int
    page_index: int
    tenant: bytes
    age_s: float
    idle_s: float
    ttl_left_s: float
    segment: int
    def __init__(self, held: _Optional[bool] = ..., expired: _Optional[bool] = ..., damaged: _Optional[bool] = ..., size: _Optional[int] = ..., page_index: _Optional[int] = ..., tenant: _Optional[bytes] = ..., age_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., ttl_left_s: _Optional[float] = ..., segment: _Optional[int] = ...) -> None: ...

class WindowState(_message.Message):
    __slots__ = ("page_key", "tokens", "digest", "size", "ttl_left_s")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TTL_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    tokens: int
    digest: bytes
    size: int
    ttl_left_s: float
    def __init__(self, page_key: _Optional[bytes] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., size: _Optional[int] = ..., ttl_left_s: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("node_id", "pages", "windows")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    pages: _containers.RepeatedCompositeFieldContainer[PageState]
    windows: _containers.RepeatedCompositeFieldContainer[WindowState]
    def __init__(self, node_id: _Optional[str] = ..., pages: _Optional[_Iterable[_Union[PageState, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[WindowState, _Mapping]]] = ...) -> None: ...

class TopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "pages", "bytes", "used_lately", "oldest_s", "idle_s", "ttl_s", "quota_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_LATELY_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    pages: int
    bytes: int
    used_lately: int
    oldest_s: float
    idle_s: float
    ttl_s: float
    quota_bytes: float
    def __init__(self, tenant: _Optional[bytes] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., used_lately: _Optional[int] = ..., oldest_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., ttl_s: _Optional[float] = ..., quota_bytes: _Optional[float] = ...) -> None: ...

class TopResponse(_message.Message):
    __slots__ = ("node_id", "tenants", "directory")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    directory: str
    def __init__(self, node_id: _Optional[str] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ..., directory: _Optional[str] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("tenant", "scrub", "sample", "bytes_per_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    scrub: bool
    sample: float
    bytes_per_s: float
    def __init__(self, tenant: _Optional[bytes] = ..., scrub: _Optional[bool] = ..., sample: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class BadPage(_message.Message):
    __slots__ = ("page_key", "reason")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    reason: str
    def __init__(self, page_key: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class CheckProgress(_message.Message):
    __slots__ = ("node_id", "pages", "total", "bytes", "bad", "done")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    pages: int
    total: int
    bytes: int
    bad: _containers.RepeatedCompositeFieldContainer[BadPage]
    done: bool
    def __init__(self, node_id: _Optional[str] = ..., pages: _Optional[int] = ..., total: _Optional[int] = ..., bytes: _Optional[int] = ..., bad: _Optional[_Iterable[_Union[BadPage, _Mapping]]] = ..., done: _Optional[bool] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("tenant", "page_keys", "segment")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    page_keys: bytes
    segment: int
    def __init__(self, tenant: _Optional[bytes] = ..., page_keys: _Optional[bytes] = ..., segment: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("node_id", "nodes_unsettled", "copies_waiting", "done", "handed_over")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    COPIES_WAITING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    nodes_unsettled: int
    copies_waiting: int
    done: bool
    handed_over: bool
    def __init__(self, node_id: _Optional[str] = ..., nodes_unsettled: _Optional[int] = ..., copies_waiting: _Optional[int] = ..., done: _Optional[bool] = ..., handed_over: _Optional[bool] = ...) -> None: ...

class ExportedPage(_message.Message):
    __slots__ = ("page_key", "size", "page_index", "tenant", "age_s")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    size: int
    page_index: int
    tenant: bytes
    age_s: float
    def __init__(self, page_key: _Optional[bytes] = ..., size: _Optional[int] = ..., page_index: _Optional[int] = ..., tenant: _Optional[bytes] = ..., age_s: _Optional[float] = ...) -> None: ...

class ExportMeta(_message.Message):
    __slots__ = ("pages", "total")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[ExportedPage]
    total: int
    def __init__(self, pages: _Optional[_Iterable[_Union[ExportedPage, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...
