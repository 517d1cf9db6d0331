"""What the stores inside this process share: checks, queues, watches and sessions.

Rules:
- Writes are operations that queue for a group commit; the backend applies them in order, makes
  them durable, and then, in one call on the loop, publishes the changes and completes the callers.
- Reads see committed state only, and never more of it than watchers have been told: an event that
  comes after a read is not older than what was read.
- Queues are bounded; above the bound an operation is refused, not delayed.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from config import bounds
from storage.clock import Clock
from storage.metadata import operations
from storage.metadata.group import Change, Outcome
from storage.metadata.keys import level_under
from storage.metadata.operations import Operation
from storage.metadata.sessions import KeptSession, SessionKeeper
from storage.metadata.store import (
    IndexEntry,
    InvalidMetadataRequest,
    MetadataError,
    MetadataStore,
    PutResult,
    Session,
    SessionLost,
    Version,
    Watch,
)
from storage.metadata.watches import WatchHub

T = TypeVar("T")


class Waiting(Generic[T]):
    """A request on its way, and who waits for it."""

    __slots__ = ("done", "request")

    def __init__(self, request: T, done: "asyncio.Future[object]") -> None:
        self.request = request
        self.done = done

    def complete(self, outcome: object) -> None:
        """Give the outcome to who still waits."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class EmbeddedStore(MetadataStore):
    """A store whose only process is this one.  Backends add the state and the way to disk."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._hub = WatchHub()
        self._sessions = SessionKeeper(self._loop, self._queue_end_sessions)
        self._queued_operations = 0
        self._queued_bytes = 0
        self._closed = False

    @abstractmethod
    def _enqueue(self, waiting: Waiting[Operation]) -> None:
        """Take an operation into the next commit; `_committed` tells its outcome."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Finish what is queued and release everything."""

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
        check = operations.checked_sequence_put if sequence else operations.checked_put
        operation = check(
            key,
            value,
            partition=partition,
            expect=expect,
            session_id=None if session is None else self._session_id(session),
            indexes=indexes,
            now_ms=self._clock.now_ms(),
        )
        return cast(PutResult, await self._submit(operation))

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        """See `MetadataStore.delete`."""
        operation = operations.checked_delete(key, partition=partition, expect=expect)
        return cast(bool, await self._submit(operation))

    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        """See `MetadataStore.watch_key`."""
        self._check_open()
        operations.check_key(key)
        operations.check_partition(partition)
        return self._hub.watch_key(key, partition)

    def watch_children(self, key: str) -> Watch:
        """See `MetadataStore.watch_children`."""
        self._check_open()
        operations.check_level(key)
        return self._hub.watch_level(level_under(key))

    def watch_index(self, index: str, lo: str, hi: str) -> Watch:
        """See `MetadataStore.watch_index`."""
        self._check_open()
        operations.check_index_range(index, lo, hi)
        return self._hub.watch_index(index, lo, hi)

    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        """See `MetadataStore.watch_sequence`."""
        self._check_open()
        operations.check_sequence_prefix(prefix)
        operations.check_partition(partition)
        return self._hub.watch_sequence(prefix, partition)

    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        """See `MetadataStore.open_session`."""
        operation = operations.checked_session(identity, timeout_ms, self._clock.now_ms())
        begun = self._submit(operation)
        try:
            session_id = cast(int, await asyncio.shield(begun))
        except asyncio.CancelledError:
            begun.add_done_callback(lambda done: self._abandon_session(done, timeout_ms))
            raise
        return self._sessions.keep(session_id, timeout_ms)

    async def close(self) -> None:
        """See `MetadataStore.close`.  Idempotent."""
        if self._closed:
            return
        try:
            await self._sessions.close()
        finally:
            self._closed = True
            await self._shut_down()
            self._hub.close()

    def _committed(
        self, group: list[Waiting[Operation]], outcomes: Sequence[Outcome], changes: list[Change]
    ) -> None:
        """On the loop, after a commit (or its failure): tell watchers, then the callers."""
        self._hub.publish(changes)
        for waiting, outcome in zip(group, outcomes, strict=True):
            self._queued_operations -= 1
            self._queued_bytes -= waiting.request.size
            waiting.complete(outcome)

    def _submit(self, operation: Operation) -> "asyncio.Future[object]":
        done: asyncio.Future[object] = self._loop.create_future()
        error = self._refusal()
        if error is not None:
            done.set_exception(error)
            return done
        self._queued_operations += 1
        self._queued_bytes += operation.size
        self._enqueue(Waiting(operation, done))
        return done

    def _refusal(self) -> MetadataError | None:
        if self._closed:
            return MetadataError("The metadata store is closed: open it again.")
        if (
            self._queued_operations >= bounds.METADATA_QUEUE_OPERATIONS
            or self._queued_bytes >= bounds.METADATA_QUEUE_BYTES
        ):
            return MetadataError(
                f"The metadata store is {self._queued_operations} operations behind "
                f"({self._queued_bytes} bytes): look at the disk's write latency, try again later."
            )
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise MetadataError("The metadata store is closed: open it again.")

    def _abandon_session(self, begun: "asyncio.Future[object]", timeout_ms: int) -> None:
        if begun.cancelled() or begun.exception() is not None or self._closed:
            return
        session = self._sessions.keep(cast(int, begun.result()), timeout_ms)
        session.end()
        self._sessions.remove(session)

    def _session_id(self, session: Session) -> int:
        if not isinstance(session, KeptSession) or not self._sessions.owns(session):
            raise InvalidMetadataRequest(
                "The session is not of this store: pass one that its open_session returned."
            )
        if session.lost:
            raise SessionLost("The session has ended: open a new one, put the ephemerals again.")
        return session.session_id

    def _queue_end_sessions(self, session_ids: tuple[int, ...]) -> "asyncio.Future[bool]":
        return cast("asyncio.Future[bool]", self._submit(operations.EndSessions(session_ids)))
