"""The base of the stores inside this process: queues, watches and sessions."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import structlog

from config import bounds
from storage.clock import Clock
from storage.metadata import operations
from storage.metadata.checked_store import CheckedStore, closed_error
from storage.metadata.group import Change, Outcome
from storage.metadata.operations import Operation
from storage.metadata.sessions import KeptSession, SessionKeeper
from storage.metadata.store import (
    MetadataError,
    Session,
)
from storage.metadata.watches import WatchHub

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class QueuedRequest(Generic[T]):
    """A request on its way, and the future that its caller awaits."""

    __slots__ = ("done", "request")

    def __init__(self, request: T, done: "asyncio.Future[object]") -> None:
        self.request = request
        self.done = done

    def complete(self, outcome: object) -> None:
        """Give the outcome to the caller, if it still waits."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class EmbeddedStore(CheckedStore[KeptSession]):
    """A store whose only process is this one.  Backends add the state and the way to disk.

    Writes queue for a group commit.  The backend applies them in order and makes them durable;
    then, in one call on the loop, changes are published to watchers and callers get their results.
    Above the bounds of the queue an operation is refused, not delayed.  Reads of a backend return
    committed state, and nothing that is newer than the events that watchers have got: so an event
    after a read is never older than what was read.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._loop = asyncio.get_running_loop()
        self._hub: WatchHub = WatchHub()
        self._sessions = SessionKeeper(self._loop, self._queue_end_sessions)
        self._queued_operations = 0
        self._queued_bytes = 0
        self._closing: asyncio.Task[None] | None = None

    @abstractmethod
    def _enqueue(self, waiting: QueuedRequest[Operation]) -> None:
        """Take an operation into the next commit; call `_committed` with its outcome."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Finish what is queued and release everything."""

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
        """See `MetadataStore.close`.  Idempotent; one that is cancelled goes on."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._sessions.close()
        finally:
            self._closed = True
            await self._shut_down()
            self._hub.close()

    def _committed(
        self,
        group: list[QueuedRequest[Operation]],
        outcomes: Sequence[Outcome],
        changes: list[Change],
    ) -> None:
        """Publish changes to watchers, then complete the callers.

        Called on the loop, after a commit or its failure.
        """
        try:
            self._publish(changes)
        finally:
            for waiting, outcome in zip(group, outcomes, strict=True):
                self._queued_operations -= 1
                self._queued_bytes -= waiting.request.size
                waiting.complete(outcome)

    def _publish(self, changes: list[Change]) -> None:
        try:
            self._hub.publish(changes)
        except Exception as error:  # noqa: BLE001 - what is stored is stored, and callers wait
            _log.error("changes_not_told", changes=len(changes), exc_info=error)
            self._hub.resync()

    def _submit(
        self, operation: Operation, _owner: KeptSession | None = None
    ) -> "asyncio.Future[object]":
        done: asyncio.Future[object] = self._loop.create_future()
        error = self._refusal()
        if error is not None:
            done.set_exception(error)
            return done
        self._queued_operations += 1
        self._queued_bytes += operation.size
        self._enqueue(QueuedRequest(operation, done))
        return done

    def _refusal(self) -> MetadataError | None:
        if self._closed:
            return closed_error()
        if (
            self._queued_operations >= bounds.METADATA_QUEUE_OPERATIONS
            or self._queued_bytes >= bounds.METADATA_QUEUE_BYTES
        ):
            return MetadataError(
                f"The metadata store is {self._queued_operations} operations behind "
                f"({self._queued_bytes} bytes): look at the disk's write latency, try again later."
            )
        return None

    def _abandon_session(self, begun: "asyncio.Future[object]", timeout_ms: int) -> None:
        if begun.cancelled() or begun.exception() is not None or self._closed:
            return
        session = self._sessions.keep(cast(int, begun.result()), timeout_ms)
        session.end()
        self._sessions.remove(session)

    def _own(self, session: Session) -> KeptSession | None:
        if isinstance(session, KeptSession) and self._sessions.owns(session):
            return session
        return None

    def _session_id(self, owner: KeptSession) -> int:
        return owner.session_id

    def _queue_end_sessions(self, session_ids: tuple[int, ...]) -> "asyncio.Future[bool]":
        return cast("asyncio.Future[bool]", self._submit(operations.EndSessions(session_ids)))


def error_of_one(error: Exception) -> MetadataError:
    """Return a new error for one caller: raising one instance twice mixes their tracebacks."""
    if isinstance(error, MetadataError):
        return MetadataError(str(error))
    failed = MetadataError(f"The metadata store failed ({error!r}): this is a bug, report it.")
    failed.__cause__ = error
    return failed
