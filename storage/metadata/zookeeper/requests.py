"""Requests to ZooKeeper as the client library takes them, and the meaning of their answers.

The library lacks three requests of ZooKeeper 3.6, which are written here: reads of many nodes at
once, persistent watches, and their removal.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kazoo.exceptions import ZookeeperError
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Delete,
    Exists,
    GetChildren,
    GetData,
    SetData,
    Sync,
)
from kazoo.protocol.states import ZnodeStat
from kazoo.security import OPEN_ACL_UNSAFE

ANY_VERSION = -1
"""ZooKeeper takes it for any version; it is never a version that was read."""
REQUEST_OVERHEAD_BYTES = 128
"""Bytes of an operation of a multi beside its path and value, at most; most are the ACL."""

_EPHEMERAL, _SEQUENTIAL = 1, 2
_HEADER = struct.Struct("!iBi")
_INT = struct.Struct("!i")
_STAT = struct.Struct("!qqqqiiiqiiq")
_DONE = _HEADER.pack(-1, True, -1)
_ERROR_TYPE = -1


class Failure(enum.IntEnum):
    """The reason of a failed request (the numbers of ZooKeeper)."""

    ROLLED_BACK = 0
    """Another operation of the same multi failed."""
    CONNECTION_LOSS = -4
    NO_NODE = -101
    NO_AUTH = -102
    BAD_VERSION = -103
    NO_CHILDREN_FOR_EPHEMERALS = -108
    NODE_EXISTS = -110
    NOT_EMPTY = -111
    SESSION_EXPIRED = -112
    SESSION_MOVED = -118
    OTHER = -1

    @property
    def uncertain(self) -> bool:
        """Whether the request may have taken effect all the same."""
        return self in _UNCERTAIN


_UNCERTAIN = frozenset({Failure.CONNECTION_LOSS, Failure.SESSION_EXPIRED, Failure.OTHER})
_NOT_TRIED = -2
"""The server's code for the operations of a multi after the one that failed."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The metadata of a node."""

    czxid: int
    mzxid: int
    version: int
    owner: int
    """The session of an ephemeral node, else 0."""
    mtime_ms: int = 0
    """Time of the last write, by the servers' clock, in Unix ms."""


@dataclass(frozen=True, slots=True)
class MultiResult:
    """The result of a multi: no failure, or the place of the operation that failed and why."""

    failed: int | None = None
    failure: Failure = Failure.ROLLED_BACK


Value: TypeAlias = (
    bool | str | Stat | tuple[bytes, Stat] | list[str] | MultiResult | list["Read"] | None
)
"""The answer to a request; each function below says which one."""
Read: TypeAlias = tuple[bytes, Stat] | list[str] | Failure
"""One part of the answer to `read_many`."""


class Request(Protocol):
    """A request that the library can send."""

    def serialize(self) -> bytes:
        """The body, without length, number and type."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.  `zxid` is that of the change for a write, 0 if there is none."""

    value: Value
    failure: Failure | None
    zxid: int


Done: TypeAlias = Callable[[Answer], None]


def create(
    path: str, value: bytes = b"", *, ephemeral: bool = False, sequential: bool = False
) -> Request:
    """A new node.  Answered with its path, which ends in 10 digits if it is sequential."""
    flags = _EPHEMERAL * ephemeral | _SEQUENTIAL * sequential
    made: Request = Create(path, value, OPEN_ACL_UNSAFE, flags)
    return made


def set_data(path: str, value: bytes, version: int) -> Request:
    """A new value of a node.  Answered with its `Stat` (outside a multi)."""
    made: Request = SetData(path, value, version)
    return made


def delete(path: str, version: int) -> Request:
    """The end of a node without children.  Answered with True."""
    made: Request = Delete(path, version)
    return made


def check(path: str, version: int) -> Request:
    """In a multi: the node must be there at this version."""
    made: Request = CheckVersion(path, version)
    return made


def get_data(path: str) -> Request:
    """The value of a node.  Answered with the value and the `Stat`."""
    made: Request = GetData(path, None)
    return made


def exists(path: str) -> Request:
    """Whether a node exists.  Answered with the `Stat`, or None."""
    made: Request = Exists(path, None)
    return made


def get_children(path: str) -> Request:
    """The children of a node.  Answered with their names, in no order."""
    made: Request = GetChildren(path, None)
    return made


def sync(path: str) -> Request:
    """Make the server catch up with the leader.  Answered with the path."""
    made: Request = Sync(path)
    return made


def read_many(reads: Sequence[Request]) -> Request:
    """`get_data` and `get_children` as of one moment.  Answered with a list of `Read`."""
    return _MultiRead(tuple(reads))


def multi(operations: Sequence[Request]) -> Request:
    """Writes and checks, all or none.  Answered with a `MultiResult`."""
    return _Multi(tuple(operations))


def add_watch(path: str, *, recursive: bool) -> Request:
    """Watch a node, and all below it if recursive, until removed.  It need not exist."""
    return _AddWatch(path, 1 if recursive else 0)


def remove_watch(path: str) -> Request:
    """Stop watching a node."""
    return _RemoveWatch(path)


class EncodedRequest:
    """A request with its body, which the library's thread can send without an error.

    Raises the request's error if it cannot be encoded.
    """

    __slots__ = ("_body", "_request", "type")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._body = request.serialize()
        self.type = _type(request)

    def serialize(self) -> bytes:
        """See `Request`."""
        return self._body

    def deserialize(self, buffer: bytes, offset: int) -> object:
        """The value of an answer."""
        return self._request.deserialize(buffer, offset)  # type: ignore[attr-defined]


def failure_of(error: BaseException) -> Failure:
    """The failure that an error of the library means."""
    return _failure(error.code) if isinstance(error, ZookeeperError) else Failure.OTHER


def value_of(value: object) -> Value:
    """The `Value` of an answer of the library."""
    if isinstance(value, ZnodeStat):
        return _stat(value)
    if isinstance(value, tuple):
        data, stat = value
        return data or b"", _stat(stat)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, list):
        return value[0] if value and isinstance(value[0], MultiResult) else value
    return None


class _Parts:
    """Operations one after the other, each with a header; one that cannot be written is refused."""

    __slots__ = ("_body", "_operations")

    def __init__(self, operations: tuple[Request, ...]) -> None:
        self._operations = operations
        parts = []
        for operation in operations:
            parts.append(_HEADER.pack(_type(operation), False, -1))
            parts.append(operation.serialize())
        parts.append(_DONE)
        self._body = b"".join(parts)

    def serialize(self) -> bytes:
        return self._body


class _Multi(_Parts):
    type = 14

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> list[MultiResult]:
        """The place of the first operation that did not merely go down with another.

        In a list, as the library takes answers to transactions for one.
        """
        place = 0
        while True:
            kind, done, _ = _HEADER.unpack_from(buffer, offset)
            offset += _HEADER.size
            if done or kind != _ERROR_TYPE:
                return [MultiResult()]
            (code,) = _INT.unpack_from(buffer, offset)
            offset += _INT.size
            if code not in (Failure.ROLLED_BACK, _NOT_TRIED):
                return [MultiResult(place, _failure(code))]
            place += 1


class _MultiRead(_Parts):
    type = 22

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> list[Read]:
        found: list[Read] = []
        while True:
            kind, done, _ = _HEADER.unpack_from(buffer, offset)
            offset += _HEADER.size
            if done:
                return found
            if kind == _ERROR_TYPE:
                (code,) = _INT.unpack_from(buffer, offset)
                offset += _INT.size
                found.append(_failure(code))
            elif kind == GetData.type:
                data, offset = _buffer(buffer, offset)
                found.append((data, _stat(_STAT.unpack_from(buffer, offset))))
                offset += _STAT.size
            else:
                (count,) = _INT.unpack_from(buffer, offset)
                offset += _INT.size
                names = []
                for _ in range(count):
                    name, offset = _buffer(buffer, offset)
                    names.append(name.decode())
                found.append(names)


class _AddWatch:
    type = 106
    __slots__ = ("_mode", "_path")

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        self._mode = mode

    def serialize(self) -> bytes:
        return _text(self._path) + _INT.pack(self._mode)

    @staticmethod
    def deserialize(_buffer: bytes, _offset: int) -> bool:
        return True


class _RemoveWatch:
    type = 18
    _ANY = 3
    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def serialize(self) -> bytes:
        return _text(self._path) + _INT.pack(self._ANY)

    @staticmethod
    def deserialize(_buffer: bytes, _offset: int) -> bool:
        return True


def _type(operation: Request) -> int:
    kind: int = operation.type  # type: ignore[attr-defined]
    return kind


def _failure(code: int) -> Failure:
    return Failure(code) if code in Failure.__members__.values() else Failure.OTHER


def _stat(fields: Sequence[int]) -> Stat:
    return Stat(fields[0], fields[1], fields[4], fields[7], fields[3])


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _INT.pack(len(encoded)) + encoded


def _buffer(buffer: bytes, offset: int) -> tuple[bytes, int]:
    (size,) = _INT.unpack_from(buffer, offset)
    offset += _INT.size
    if size < 0:
        return b"", offset
    return buffer[offset : offset + size], offset + size
