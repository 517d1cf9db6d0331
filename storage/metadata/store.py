"""The metadata store interface: a small, versioned, watchable key space.

One contract suite (`tests/contract/metadata`) checks every backend.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NewType, Protocol

from magnetar.protocol.server_error import InternalError, OperatorError, PeerError, ServerError

Version = NewType("Version", int)

CLOCK_KEY = "/magnetar/clock"
"""The record that is put to read the time of the servers' clock."""
ABSENT = Version(-1)
"""As `expect`: only if the key does not exist."""


class MetadataError(OperatorError):
    """The store failed; the outcome of the call may be unknown.  Reported as MetadataError."""

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


class InvalidMetadataRequest(InternalError):
    """The call breaks a rule of the store.  Nothing was stored; the caller must be fixed."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class MetadataDefect(InternalError):
    """A bug of the store's own code ended the call before it was sent.  Nothing was stored."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class RecordTooLarge(PeerError):
    """A value, key or index list is above its bound.  Nothing was stored; store less of it.

    Not a MetadataError on the wire: clients would try again, in vain.
    """

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One secondary key of a record.

    `index` has no slash; `key` is not empty and has no control characters (so no \\x01, which
    separates index keys in stores).
    """

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


def first_hits(
    hits: Sequence[IndexHit], limit: int | None, max_bytes: int | None
) -> list[IndexHit]:
    """The first of the ordered hits that are within the bounds of `MetadataStore.scan_index`."""
    found = list(hits[:limit])
    if max_bytes is None:
        return found
    size = 0
    for number, hit in enumerate(found):
        size += len(hit.record.value)
        if size >= max_bytes:
            return found[: number + 1]
    return found


def is_cut(hits: Sequence[IndexHit], limit: int | None, max_bytes: int | None) -> bool:
    """Whether there may be more hits behind those that a scan with these bounds has found."""
    many = limit is not None and len(hits) >= limit
    if many or max_bytes is None:
        return many
    return sum(len(hit.record.value) for hit in hits) >= max_bytes


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of a put: the key (server-made for sequences), version and overwrite count."""

    key: str
    version: Version
    modifications: int


class EventKind(enum.Enum):
    """The kind of an event of a watch.  After RESYNC the watcher lists again."""

    UPSERT = "upsert"
    REMOVED = "removed"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class Event:
    """One coalesced change.  `key` is empty for RESYNC; `record` is the newest one for UPSERT."""

    kind: EventKind
    key: str = ""
    record: Record | None = None


Wanted = Callable[[str], bool]
"""Whether a watch reports changes of this key.  It is called for every change, so it must be quick;
it raises nothing, and its answer may change with time."""


class Watch(Protocol):
    """A live subscription to changes, for one task.  Iterate it; close it when done.

    A watch obtained before a read reports every change that the read may have missed; so does one
    whose `wanted` accepts the key before the read.  Events are coalesced to the newest state of a
    key.  Events of different keys may come in another order than the changes; the last event of a
    key has its newest state.  RESYNC comes when the watcher fell behind, or the backend may have
    missed changes.  The watch ends (no more events) when it or its store is closed.
    """

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    def close(self) -> None:
        """Stop watching.  A pending or later `__anext__` ends the iteration."""
        ...


class Session(Protocol):
    """The owner of ephemeral records.  Kept alive by the store until closed or lost.

    Ephemerals vanish with their session, index entries included.
    """

    @property
    def lost(self) -> bool:
        """True once the session ended, by expiry or close."""
        ...

    async def wait_lost(self) -> None:
        """Return when the session has ended."""
        ...

    async def close(self) -> None:
        """End the session now; its ephemeral records are removed."""
        ...


class MetadataStore(ABC):
    """Interface: a small, versioned key space with conditional writes, sessions and watches.

    Keys are paths: `/` and parts without `/`, none of them empty, `.` or `..`.  Only records that
    were put exist: a path has children without being a record itself, and the other way round.

    Order is bytewise in UTF-8 (which is the order of code points), and defined among keys that
    share everything up to the last slash.  Secondary keys are ordered the same way, as whole
    strings.

    Writes to one key are linearizable.  Operations issued one after the other, without waiting in
    between, take effect in that order.  Versions are opaque: compare them for equality, and only
    within one key.

    A record put with a partition key is read and deleted only with the same partition key.
    Partition and index keys follow from key and value alone, so that every process can derive them.

    All methods raise `MetadataError` when the store fails.
    """

    @abstractmethod
    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        """The record, or None.  `fresh` proves that it is not behind any acknowledged write."""

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

        `expect` makes it conditional on the version (`ABSENT`: create only).

        `session` makes the record ephemeral; a put of another session takes it over, and a put
        without a session makes it persistent.

        `sequence` makes `key` a prefix ending in "/" that gets "-" and 20 digits appended (needs
        `partition`, excludes `expect` and `session`).  Numbers rise among the keys there are.  No
        other keys may be directly under the prefix.

        `indexes` is the full list of the record's index entries; it replaces the one of the put
        before, together with the record.

        Raises `VersionConflict`, `SessionLost`, `PartitionMismatch`, `RecordTooLarge`,
        `InvalidMetadataRequest`.  A cancelled put may or may not take effect.
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
        """Records with lo <= key < hi in key order, as of one moment.

        The bounds share everything up to the last slash.  The one exception is an upper bound of
        that prefix and one more slash, which ends the level: `["/a/", "/a//")` are the direct
        children of `/a`.  With `partition` the caller states that all records live there, and only
        that shard is asked; a record of another partition in the range is a `PartitionMismatch`.
        Without it every shard is asked.  `fresh` proves that the answer is not behind any
        acknowledged write.
        """

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
        max_bytes: int | None = None,
    ) -> list[IndexHit]:
        """Hits with lo <= secondary key < hi, in order of secondary key, then primary key.

        A record with several keys in the range is hit once for each.  With `partition`, only
        records that live there.  At most `limit` hits; the hit with which the values have
        `max_bytes` together is the last.  `is_cut` tells whether there may be more.  A record that
        existed during the whole scan is never left out before the last hit.
        """

    @abstractmethod
    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        """Changes of one record.  Iterating raises `PartitionMismatch` if it lives elsewhere."""

    @abstractmethod
    def watch_children(self, key: str, *, wanted: Wanted | None = None) -> Watch:
        """Changes of the direct children of `key`.

        With `wanted`, only of keys that it accepts when their change becomes known here: no other
        record is read.  RESYNC comes in any case.
        """

    @abstractmethod
    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        """New keys of a sequence, possibly conflated: scan on from the last one seen.

        Events are hints without a record; the first one may name the current last key.
        """

    @abstractmethod
    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        """A session for ephemerals, kept alive by the store (by timers of the running loop).

        It is lost when the process could not do so for `timeout_ms`.  `identity` names the process
        for operators who inspect the store.
        """

    async def server_time_ms(self) -> int | None:
        """Time of the servers' clock during this call, in Unix ms; None if they have none."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Finish queued operations, end sessions, release everything."""
