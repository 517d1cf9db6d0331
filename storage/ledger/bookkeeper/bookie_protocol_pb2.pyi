from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AuthMessage(_message.Message):
    __slots__ = ("authPluginName", "payload")
    AUTHPLUGINNAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    authPluginName: str
    payload: bytes
    def __init__(self, authPluginName: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class RequestHeader(_message.Message):
    __slots__ = ("version", "operation", "txnId")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    TXNID_FIELD_NUMBER: _ClassVar[int]
    version: int
    operation: int
    txnId: int
    def __init__(self, version: _Optional[int] = ..., operation: _Optional[int] = ..., txnId: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("header", "startTls")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STARTTLS_FIELD_NUMBER: _ClassVar[int]
    header: RequestHeader
    startTls: StartTls
    def __init__(self, header: _Optional[_Union[RequestHeader, _Mapping[str, object]]] = ..., startTls: _Optional[_Union[StartTls, _Mapping[str, object]]] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("header", "status", "startTls")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STARTTLS_FIELD_NUMBER: _ClassVar[int]
    header: RequestHeader
    status: int
    startTls: StartTls
    def __init__(self, header: _Optional[_Union[RequestHeader, _Mapping[str, object]]] = ..., status: _Optional[int] = ..., startTls: _Optional[_Union[StartTls, _Mapping[str, object]]] = ...) -> None: ...

class StartTls(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
