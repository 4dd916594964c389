from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_ACTIVE: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_ACTIVE: MemberState
MEMBER_STATE_DRAINING: MemberState

class Member(_message.Message):
    __slots__ = ("node_id", "address", "incarnation", "weight", "state", "joined_epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    JOINED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    incarnation: int
    weight: float
    state: MemberState
    joined_epoch: int
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., weight: _Optional[float] = ..., state: _Optional[_Union[MemberState, str]] = ..., joined_epoch: _Optional[int] = ...) -> None: ...

class MemberList(_message.Message):
    __slots__ = ("epoch", "members", "copies")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    copies: int
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., copies: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("node_id", "address", "incarnation", "weight", "known", "draining")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    incarnation: int
    weight: float
    known: MemberList
    draining: bool
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., weight: _Optional[float] = ..., known: _Optional[_Union[MemberList, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("list", "refused", "retry_after_s", "lease_s")
    LIST_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    list: MemberList
    refused: str
    retry_after_s: float
    lease_s: float
    def __init__(self, list: _Optional[_Union[MemberList, _Mapping]] = ..., refused: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "settled_epoch", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    settled_epoch: int
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., settled_epoch: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("known", "epoch", "released", "unsettled")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    known: bool
    epoch: int
    released: bool
    unsettled: int
    def __init__(self, known: _Optional[bool] = ..., epoch: _Optional[int] = ..., released: _Optional[bool] = ..., unsettled: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "drain")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    drain: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., drain: _Optional[bool] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ("list",)
    LIST_FIELD_NUMBER: _ClassVar[int]
    list: MemberList
    def __init__(self, list: _Optional[_Union[MemberList, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
