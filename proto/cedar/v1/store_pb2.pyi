from cedar.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MatchRequest(_message.Message):
    __slots__ = ("root_key", "page_keys", "tenant")
    ROOT_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    root_key: bytes
    page_keys: bytes
    tenant: bytes
    def __init__(self, root_key: _Optional[bytes] = ..., page_keys: _Optional[bytes] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class WindowRecord(_message.Message):
    __slots__ = ("page_key", "tokens", "digest")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    tokens: int
    digest: bytes
    def __init__(self, page_key: _Optional[bytes] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("pages", "windows")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    windows: _containers.RepeatedCompositeFieldContainer[WindowRecord]
    def __init__(self, pages: _Optional[int] = ..., windows: _Optional[_Iterable[_Union[WindowRecord, _Mapping]]] = ...) -> None: ...

class GetPagesRequest(_message.Message):
    __slots__ = ("page_keys",)
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    page_keys: bytes
    def __init__(self, page_keys: _Optional[bytes] = ...) -> None: ...

class StoredMeta(_message.Message):
    __slots__ = ("page_keys", "value_bytes", "first_page", "tenant", "idle_s", "purges")
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PURGES_FIELD_NUMBER: _ClassVar[int]
    page_keys: bytes
    value_bytes: int
    first_page: int
    tenant: bytes
    idle_s: int
    purges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page_keys: _Optional[bytes] = ..., value_bytes: _Optional[int] = ..., first_page: _Optional[int] = ..., tenant: _Optional[bytes] = ..., idle_s: _Optional[int] = ..., purges: _Optional[_Iterable[int]] = ...) -> None: ...

class PutPagesResponse(_message.Message):
    __slots__ = ("stored", "present", "conflicts", "refused")
    STORED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    present: int
    conflicts: int
    refused: int
    def __init__(self, stored: _Optional[int] = ..., present: _Optional[int] = ..., conflicts: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class WindowMeta(_message.Message):
    __slots__ = ("page_key", "tokens", "digest", "total_bytes", "offset", "checksum", "tenant", "purges")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PURGES_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    tokens: int
    digest: bytes
    total_bytes: int
    offset: int
    checksum: bytes
    tenant: bytes
    purges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page_key: _Optional[bytes] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., checksum: _Optional[bytes] = ..., tenant: _Optional[bytes] = ..., purges: _Optional[_Iterable[int]] = ...) -> None: ...

class PutWindowResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    def __init__(self, stored: _Optional[bool] = ...) -> None: ...

class GetWindowRequest(_message.Message):
    __slots__ = ("page_key", "tokens", "digest", "tenant")
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    page_key: bytes
    tokens: int
    digest: bytes
    tenant: bytes
    def __init__(self, page_key: _Optional[bytes] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., tenant: _Optional[bytes] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...
