"""The base of all backends: it checks calls before they queue, and hands out watches."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, cast

from storage.clock import Clock
from storage.metadata import operations
from storage.metadata.keys import level_under
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.store import (
    IndexEntry,
    InvalidMetadataRequest,
    MetadataError,
    MetadataStore,
    PutResult,
    Session,
    SessionLost,
    Version,
    Wanted,
    Watch,
)

S = TypeVar("S", bound=Session)


class WatchRegistry(Protocol):
    """The watches of a store, by key, level or sequence.  It checks nothing."""

    def watch_key(self, key: str, partition: str | None) -> Watch:
        """Changes of one record."""
        ...

    def watch_level(self, level: str, wanted: Wanted | None = None) -> Watch:
        """Changes of the records of a level, all of them or those that are wanted."""
        ...

    def watch_sequence(self, prefix: str, partition: str) -> Watch:
        """New keys of a sequence."""
        ...


class CheckedStore(MetadataStore, Generic[S]):
    """The part that all backends share: it checks calls, then hands them to the backend.

    It refuses, before the operation queues, invalid keys, bounds and sizes; a session of another
    store or one that has ended; and any call of a closed store.  `S` is the backend's class of
    sessions.
    """

    _hub: WatchRegistry
    """Set by the backend."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closed = False

    @abstractmethod
    def _submit(
        self, operation: Put | SequencePut | Delete, owner: S | None
    ) -> "asyncio.Future[object]":
        """Begin a write.  The future, or the call, raises `MetadataError`, also once closed.

        It returns without waiting, so that operations take effect in the order of the calls.
        """

    @abstractmethod
    def _own(self, session: Session) -> S | None:
        """The session if this store made it, ended or not."""

    @abstractmethod
    def _session_id(self, owner: S) -> int:
        """The id by which operations name the session."""

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
        """See `MetadataStore.put`."""
        owner = None if session is None else self._checked_owner(session)
        check = operations.checked_sequence_put if sequence else operations.checked_put
        operation = check(
            key,
            value,
            partition=partition,
            expect=expect,
            session_id=None if owner is None else self._session_id(owner),
            indexes=indexes,
            now_ms=self._clock.now_ms(),
        )
        return cast(PutResult, await self._submit(operation, owner))

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        """See `MetadataStore.delete`."""
        operation = operations.checked_delete(key, partition=partition, expect=expect)
        return cast(bool, await self._submit(operation, None))

    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        """See `MetadataStore.watch_key`."""
        self._check_open()
        operations.check_key(key)
        operations.check_partition(partition)
        return self._hub.watch_key(key, partition)

    def watch_children(self, key: str, *, wanted: Wanted | None = None) -> Watch:
        """See `MetadataStore.watch_children`."""
        self._check_open()
        operations.check_level(key)
        return self._hub.watch_level(level_under(key), wanted)

    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        """See `MetadataStore.watch_sequence`."""
        self._check_open()
        operations.check_sequence_prefix(prefix)
        operations.check_partition(partition)
        return self._hub.watch_sequence(prefix, partition)

    def _check_keys(self, keys: Sequence[str], partition: str | None) -> None:
        """Refuse a read of records if the store is closed, or a key or the partition invalid."""
        self._check_open()
        for key in keys:
            operations.check_key(key)
        operations.check_partition(partition)

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()

    def _checked_owner(self, session: Session) -> S:
        owner = self._own(session)
        if owner is None:
            raise InvalidMetadataRequest(
                "The session is not of this store: pass one that its open_session returned."
            )
        if session.lost:
            raise SessionLost("The session has ended: open a new one, put the ephemerals again.")
        return owner


def closed_error() -> MetadataError:
    """The error of calls of a closed store."""
    return MetadataError("The metadata store is closed: open it again.")
