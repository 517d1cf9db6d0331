"""The metadata store interface: a small, versioned, watchable key space.

Rules that every backend keeps, and that one contract suite checks:

- Writes to one key are linearizable; `expect` makes them conditional on the version read.
  Versions are opaque: compare them for equality, and only within one key.
- A record and its index entries change together.  A put carries the record's *full* list of
  index entries; the list of the put before it is gone.
- A record put with a partition key is read and deleted only with the same partition key.
  Partition and index keys are pure functions of (key, value), so a holder can derive them.
- Watches are registered first and read second: a watch obtained before a read reports every
  change that the read may have missed.  Events are coalesced to the newest state of a key and
  say *upsert*, *removed* or *resync*; after *resync* (the watcher fell behind, or the backend
  lost its place) the holder lists again.
- Sequence numbers rise among live keys.  Ephemerals vanish with their session.
- Keys are paths.  Bounds of a scan share everything up to the last slash with its keys.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NewType, Protocol

from protocol.server_error import InternalError, OperatorError, ServerError

Version = NewType("Version", int)

ABSENT = Version(-1)
"""As `expect`: only if the key does not exist."""


class MetadataError(OperatorError):
    """The store could not do it; the outcome may be unknown.  Reported as MetadataError."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class VersionConflict(InternalError):
    """The record is not at the expected version: read it again and decide anew."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class PartitionMismatch(InternalError):
    """The record lives under another partition key than the one given: a programming error."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class SessionLost(InternalError):
    """The session has ended and its ephemerals are gone: open a new one and put them again."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One secondary key of a record.  `index` has no slash; `key` is not empty, no \\x01."""

    index: str
    key: str


@dataclass(frozen=True, slots=True)
class Record:
    """One stored record.  Times are wall-clock milliseconds."""

    key: str
    value: bytes
    version: Version
    modifications: int
    created_ms: int
    modified_ms: int
    ephemeral: bool
    partition: str | None


@dataclass(frozen=True, slots=True)
class IndexHit:
    """A record found through an index, and the secondary key that led to it."""

    index_key: str
    record: Record


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put made: the key (server-made for sequences), its version, its overwrite count."""

    key: str
    version: Version
    modifications: int


class EventKind(enum.Enum):
    """What a watcher is told."""

    UPSERT = "upsert"
    REMOVED = "removed"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class Event:
    """One coalesced change.  `key` is empty for RESYNC; `record` is the newest one for UPSERT."""

    kind: EventKind
    key: str = ""
    record: Record | None = None


class Watch(Protocol):
    """A live subscription to changes.  Iterate it; close it when done."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    def close(self) -> None:
        """Stop watching.  A pending or later `__anext__` ends the iteration."""
        ...


class Session(Protocol):
    """What ephemerals hang on.  Kept alive by the store until closed or lost."""

    @property
    def lost(self) -> bool:
        """True once the session ended, by expiry or close."""
        ...

    async def wait_lost(self) -> None:
        """Return when the session has ended."""
        ...

    async def close(self) -> None:
        """End it now; its ephemerals are removed."""
        ...


class MetadataStore(ABC):
    """See the module's rules.  All methods raise `MetadataError` when the store fails."""

    @abstractmethod
    async def get(self, key: str, *, partition: str | None = None) -> Record | None:
        """The record, or None."""

    @abstractmethod
    async def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> list[Record | None]:
        """As `get` for each key, in order."""

    @abstractmethod
    async def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> PutResult:
        """Store durably; the result is returned only once it is.

        `expect` makes it conditional (`ABSENT`: create only); `session` makes it ephemeral;
        `sequence` makes `key` a prefix ending in "/" that gets "-" and 20 digits appended
        (needs `partition`, excludes `expect` and `session`).
        Raises `VersionConflict`, `SessionLost`, `PartitionMismatch`.
        """

    @abstractmethod
    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        """Remove; False if there was nothing.  Raises `VersionConflict` for a failed `expect`."""

    @abstractmethod
    async def children(self, key: str) -> list[str]:
        """Names (last path parts, sorted) of the direct children of `key`."""

    @abstractmethod
    async def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        """Records with lo <= key < hi in key order.  `fresh` proves it is not behind our writes."""

    @abstractmethod
    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
    ) -> list[IndexHit]:
        """Hits with lo <= secondary key < hi, in order of secondary key, then primary key."""

    @abstractmethod
    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        """Changes of one record."""

    @abstractmethod
    def watch_children(self, key: str) -> Watch:
        """Changes of the direct children of `key`."""

    @abstractmethod
    def watch_index(self, index: str, lo: str, hi: str) -> Watch:
        """Records that enter, change within, or leave the range of an index."""

    @abstractmethod
    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        """New keys of a sequence, possibly conflated: scan on from the last one seen."""

    @abstractmethod
    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        """A session for ephemerals, kept alive by the store."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is queued, end sessions, release everything."""
