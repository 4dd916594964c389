from cedar.v1 import common_pb2 as _common_pb2
from cedar.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HeldRequest(_message.Message):
    __slots__ = ("root_key", "page_keys")
    ROOT_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    root_key: bytes
    page_keys: bytes
    def __init__(self, root_key: _Optional[bytes] = ..., page_keys: _Optional[bytes] = ...) -> None: ...

class HeldResponse(_message.Message):
    __slots__ = ("held", "windows")
    HELD_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    windows: _containers.RepeatedCompositeFieldContainer[_store_pb2.WindowRecord]
    def __init__(self, held: _Optional[bytes] = ..., windows: _Optional[_Iterable[_Union[_store_pb2.WindowRecord, _Mapping]]] = ...) -> None: ...

class ListPagesRequest(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ListedPages(_message.Message):
    __slots__ = ("page_keys",)
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    page_keys: bytes
    def __init__(self, page_keys: _Optional[bytes] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "purge_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PURGE_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: bytes
    purge_id: int
    def __init__(self, tenant: _Optional[bytes] = ..., purge_id: _Optional[int] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("pages", "bytes", "windows")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    bytes: int
    windows: int
    def __init__(self, pages: _Optional[int] = ..., bytes: _Optional[int] = ..., windows: _Optional[int] = ...) -> None: ...

class Purges(_message.Message):
    __slots__ = ("purges",)
    PURGES_FIELD_NUMBER: _ClassVar[int]
    purges: _containers.RepeatedCompositeFieldContainer[PurgeRequest]
    def __init__(self, purges: _Optional[_Iterable[_Union[PurgeRequest, _Mapping]]] = ...) -> None: ...
