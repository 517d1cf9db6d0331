"""Stores the assignment of one subscription whenever it has changed."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from broker.scalable.assignment_record import StoredAssignment
from broker.scalable.counters import ScalableCounters
from broker.scalable.records import fits_record
from broker.scalable.topic_store import ConcurrentChange, StoredSubscription, TopicStore
from config.bounds import ASSIGNMENT_WRITE_RETRY_MAX_S, ASSIGNMENT_WRITE_RETRY_S
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import TopicName
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)


class _Write(NamedTuple):
    """A write of an assignment; `stored` is None if it was left out."""

    present: StoredAssignment
    stored: StoredAssignment | None


class AssignmentWriter:
    """Keeps the stored assignment of a subscription equal to the present one.

    Nobody waits for its writes.  There is one at a time: what changes meanwhile is stored by the
    next one, all at once, and an assignment that is stored already is not written.

    Each write is made of the record that was read or written before, so a controller that was
    replaced changes nothing any more: the first thing that its successor does is a write.

    An assignment with which the record would be larger than ASSIGNMENT_RECORD_BYTES is left out as
    a whole: if it were cut short, the next controller would take the missing segments to be free.
    """

    def __init__(
        self,
        store: TopicStore,
        topic: TopicName,
        subscription: str,
        present: Callable[[], StoredAssignment],
        stored: StoredSubscription | None,
        counters: ScalableCounters,
    ) -> None:
        """`present` returns the assignment to store; `stored` is the record, None if not read."""
        self._store = store
        self._topic = topic
        self._subscription = subscription
        self._present = present
        self._stored = stored
        self._written: StoredAssignment | None = None
        """The assignment that this controller knows to be stored."""
        self._unconfirmed: _Write | None = None
        """A write whose outcome is unknown.  It is made again before any other: so what is found
        in the record later is either this or another controller's."""
        self._counters = counters
        self._too_large = False
        self._task: asyncio.Task[None] | None = None
        """The task that writes, until nothing is left to be written."""
        self._writing = False
        self._ended = False

    @property
    def busy(self) -> bool:
        """Whether a change is not stored yet."""
        return self._task is not None

    def changed(self) -> None:
        """Store the assignment, which may have changed."""
        if self._task is None and not self._ended:
            self._task = asyncio.get_running_loop().create_task(self._write_all())
            self._task.add_done_callback(self._task_done)

    async def stored(self) -> None:
        """Return when all changes so far are stored, or cannot be any more."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def end(self) -> None:
        """Write nothing from now on, but for the write that is under way."""
        self._ended = True
        if self._task is not None and not self._writing:
            self._task.cancel()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("assignment_writer_failed", topic=str(self._topic), exc_info=error)

    async def _write_all(self) -> None:
        backoff = Backoff(ASSIGNMENT_WRITE_RETRY_S, ASSIGNMENT_WRITE_RETRY_MAX_S)
        while not self._ended and (present := self._next()) != self._written:
            self._writing = True
            failure: MetadataError | None = None
            try:
                await self._write(present)
            except MetadataError as error:
                failure = error
            finally:
                self._writing = False
            if failure is None:
                backoff.reset()
            elif not self._ended:
                log.warning("assignment_not_stored", **self._names, error=str(failure))
                await asyncio.sleep(backoff.pause_s())
        # Not when the loop gets round to `_task_done`: a change in between begins another task.
        self._task = None

    def _next(self) -> StoredAssignment:
        """The assignment to write next."""
        return self._present() if self._unconfirmed is None else self._unconfirmed.present

    async def _write(self, present: StoredAssignment) -> None:
        if self._stored is None:
            self._stored = await self._read()
        if self._stored is None:
            self._ended = True  # the subscription was deleted
            return
        fits = fits_record(self._stored.value, present)
        self._report_size(fits=fits)
        write = _Write(present, present if fits else None)
        if not fits and self._written is not None and self._stored.assignment is None:
            self._written = present  # The record has no assignment already.
            return
        try:
            self._stored = await self._store.put_assignment(
                self._topic, self._subscription, self._stored, write.stored
            )
        except ConcurrentChange:
            await self._take_in_conflict()
        except MetadataError:
            self._unconfirmed = write
            raise
        else:
            self._written, self._unconfirmed = present, None

    def _report_size(self, *, fits: bool) -> None:
        if not fits:
            self._counters.assignments_too_large += 1
        if fits == self._too_large:
            self._too_large = not fits
            if fits:
                log.info("assignment_stored_again", **self._names)
            else:
                log.warning(
                    "assignment_too_large",
                    **self._names,
                    effect="after a restart segments are assigned anew",
                    next="use fewer consumers in the subscription, or shorter names",
                )

    async def _take_in_conflict(self) -> None:
        """Continue from the record if its last write was an own one; else end."""
        found, own = await self._read(), self._unconfirmed
        if found is None or own is None or found.assignment != own.stored:
            self._ended = True
            if found is not None:
                log.info("assignment_stored_by_another_controller", **self._names)
            return
        self._stored, self._written, self._unconfirmed = found, own.present, None

    async def _read(self) -> StoredSubscription | None:
        return await self._store.subscription_record(self._topic, self._subscription)

    @property
    def _names(self) -> dict[str, str]:
        return {"topic": str(self._topic), "subscription": self._subscription}
